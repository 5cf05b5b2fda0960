"""One or three sums under way, where the table of lanes says two: at every boundary the engine holds what the plan
says, to the byte, and comes to the same bits."""

import pytest
import torch

from megatron.core.pipeline_parallel.plan.held.lanes import LANES
from megatron.core.pipeline_parallel.plan.ir import PEERS
from tests.harness.layouts import NO_DROPOUT, Layout, Run
from tests.harness.planned_steps import BoundaryLog, walk_of
from tests.harness.ranks import run_ranks

ZERO3 = ("--use-custom-fsdp", "--data-parallel-sharding-strategy", "optim_grads_params")


def steps(ctx, counts):
    """By how many may be under way: what was held and planned at boundaries, the most that was under way in the engine,
    and what two steps make of the weights."""
    torch.set_num_threads(1)
    row, found = LANES[PEERS], []
    for most in counts:
        LANES[PEERS] = row._replace(most_under_way=most)
        layout = Layout(dp=ctx.world_size, more=ZERO3)
        run = Run(ctx, layout, ["--num-layers", "4", *NO_DROPOUT], global_batch=2 * ctx.world_size)
        model, under = run.engine.model, run.engine.model.reductions._under_way
        log, counted, begin = BoundaryLog(model.memory_tracker), [], under.begin

        def begins(*what, under=under, counted=counted, begin=begin):
            begin(*what)
            counted.append(len(under.entries))

        under.begin = begins
        run.step(1)
        with log.installed():
            run.step(2)
        model.settle_weights()
        *planned, _ = [(one.gathered, one.gradients + one.under_way) for one in walk_of(run).boundaries]
        held = [(one.gathered, one.grads) for one in log.found]
        buffer = model.buffer
        weights = {name: buffer.main_weight_part(name).tolist() for name in buffer.names}
        found.append((held, planned, max(counted), weights))
    return found


@pytest.mark.grid
def test_the_engine_holds_what_the_table_of_lanes_allows():
    counts = (2, 1, 3)
    for by_count in run_ranks(steps, 2, counts, timeout=110):
        for most, (held, planned, under_way, weights) in zip(counts, by_count, strict=True):
            assert len(planned) > 20
            assert held == planned
            assert under_way == most
            assert weights == by_count[0][-1]
