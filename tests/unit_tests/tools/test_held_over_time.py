"""What a rank holds over time: by hand, and as much as the walk says."""

import pytest

from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.held.lanes import LaneCosts, Lanes
from megatron.core.pipeline_parallel.plan.held.residency_walk import walk_row
from megatron.core.pipeline_parallel.plan.passes.add_residency import add_residency
from megatron.core.pipeline_parallel.plan.schedules import SCHEDULES
from megatron.core.pipeline_parallel.plan.simulate import simulate
from megatron.core.words import size_text
from tests.harness.measured_runs import lowered
from tests.harness.unit_stages import asked, model
from tests.unit_tests.core.pipeline_parallel.plan.held.test_lane_clock import timed
from tools.schedules.held_over_time import held_over_time, limits_in_bytes


def test_by_hand():
    found = timed(
        "0UNSHARD[0:1] 0RESHARD[0:1].2 0UNSHARD[1:2].2 0F0 0RESHARD[1:2].2 0UNSHARD[0:1].2 0REDUCE[1:2].2 0BW0 "
        "0RESHARD[0:1] 0REDUCE[0:1]"
    )
    told = " ".join(
        f"{at:g}:{one.gathered},{one.gradients},{one.under_way}" for at, one in held_over_time(found)[0]
    )
    # The first gather is issued at 0 and waited for until 1. F ends at 4, BW at 9.
    forward = "0:10,0,0 1:10,0,0 2:0,0,0 2:10,0,0 3:10,0,0 4:10,0,0"
    backward = "4:10,20,0 6:0,20,0 6:10,20,0 6:10,0,20 7:10,20,20 9:10,20,20 9:0,20,20 9:0,0,40 10.75:0,0,0"
    assert told == f"{forward} {backward}"


@pytest.mark.parametrize("name", SCHEDULES)
def test_times_go_on_and_the_most_is_that_of_the_walk(name):
    plan = lowered(name, 2, 4)
    costs = CostModel.of_ranks(plan.placement, activation=[40], memory_after_b=1.5, comm=0.25)
    plain = simulate(plan, costs)
    stages = model(plan.placement, 2)
    asks = asked("optim_grads_params", "memory", 2).within((1e4, 1e4))
    plan = add_residency(plan, stages, asks, costs)
    shared = simulate(plan, costs, Lanes(stages, asks, LaneCosts(bandwidth=20.0)))
    assert (limits_in_bytes(plain), limits_in_bytes(shared)) == (None, (1e4, 1e4))
    for rank, row in enumerate(plan.rows):
        assert max(one.total for _, one in held_over_time(plain)[rank]) == plain.peak_activation[rank]
        held = held_over_time(shared)[rank]
        peak = walk_row(row, shared.timeline.lanes[rank].units, asks, costs).peak
        assert max((one for _, one in held), key=lambda one: one.total) == peak
        for moments in (held, held_over_time(plain)[rank]):
            times = [at for at, _ in moments]
            assert times == sorted(times)
        assert held[-1][0] == shared.timeline.end(rank)


def test_sizes():
    assert [size_text(size) for size in (80.5 * 2**30, 25 * 2**20, 1536, 7)] == [
        "80.5 GiB",
        "25 MiB",
        "1.5 KiB",
        "7 bytes",
    ]
    assert size_text(2.5, "layers") == "2.5"
