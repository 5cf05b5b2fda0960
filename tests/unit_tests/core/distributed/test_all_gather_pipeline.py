"""Gathers unit by unit: states, memory, traffic and values, on real ranks."""

from __future__ import annotations

import pytest
import torch

from megatron.core.device import Device
from megatron.core.distributed.custom_fsdp.all_gather_pipeline import UnitState
from megatron.core.module import ModelError
from megatron.core.transport.parallel_state import single_process
from megatron.core.transport.traffic import Moved
from tests.harness.hand_driven import Model, build, sample
from tests.harness.ranks import run_ranks

SHARDED, GATHERING, UNSHARDED = UnitState.SHARDED, UnitState.GATHERING, UnitState.UNSHARDED


def gathers(ps):
    return ps.dp_gather_group.traffic.moved("all_gather")


def states(engine):
    return [engine.gathers.state(unit) for unit in range(len(engine.units))]


def test_a_unit_has_memory_from_its_gather_until_it_is_freed():
    def body(ctx):
        engine, chains = build(ctx.ps, Model(), "optim_grads_params")
        before = gathers(ctx.ps)
        tracker, (stage,) = engine.memory_tracker, engine.stage_units()
        sizes = [unit.weight_bytes for unit in stage.units]
        expected = {name: p.clone() for name, p in Model().chains()[0].named_parameters()}
        held = [tracker.live("gathered")]
        engine.gathers.start(1)
        seen = [states(engine)]
        engine.gathers.start(0)
        engine.gathers.wait(1)
        held.append(tracker.live("gathered"))
        seen.append(states(engine))
        for name in ("links.1.fc.weight", "links.1.fc.bias"):  # trained and frozen
            assert torch.equal(dict(chains[0].named_parameters())[name], expected[name])
        engine.gathers.free(0)  # while it is under way
        engine.gathers.free(1)
        assert engine.buffer.weight("links.1.gain").untyped_storage().nbytes() == 0
        held.append(tracker.live("gathered"))
        seen.append(states(engine))
        with engine.gathered([2, 1]):
            assert torch.equal(engine.buffer.weight("links.2.gain"), expected["links.2.gain"])
            engine.gathers.free(1)  # by somebody inside
            engine.gathers.start(1)
        held.append(tracker.live("gathered"))
        return sizes, held, seen, gathers(ctx.ps) - before

    for sizes, held, seen, moved in run_ranks(body, 2):
        assert held == [0, sizes[0] + sizes[1], 0, 0]
        assert seen == [
            [SHARDED, GATHERING, SHARDED],
            [GATHERING, UNSHARDED, SHARDED],
            [SHARDED] * 3,
        ]
        assert moved == Moved(5, sizes[0] + 3 * sizes[1] + sizes[2]), "one call a unit, of all its buckets"


def test_programming_errors():
    def body(ctx):
        engine, _ = build(ctx.ps, Model(), "optim_grads_params")
        with pytest.raises(AssertionError, match="nobody has begun to gather unit 'link 0'"):
            engine.gathers.wait(0)
        with pytest.raises(AssertionError, match="unit 'link 0' is not gathered"):
            engine.gathers.free(0)
        engine.gathers.start(0)
        with pytest.raises(AssertionError, match="unit 'link 0' is gathering already"):
            engine.gathers.start(0)
        engine.gathers.free(0)

    run_ranks(body, 2)


@pytest.mark.parametrize("overlap", [False, True])
def test_weights_that_are_whole_at_rest_are_gathered_behind_a_step(overlap):
    def body(ctx):
        engine, _ = build(ctx.ps, Model(), "optim", overlap_param_gather=overlap, ddp_bucket_size=1)
        (stage,) = engine.stage_units()
        before, moved = states(engine), gathers(ctx.ps)
        for name in engine.buffer.names:  # as an optimizer does: its part only
            engine.buffer.main_weight_part(name).fill_(7.0 + ctx.rank)
        engine.weights_changed()
        after = states(engine)
        for unit in range(3):
            engine.gathers.start(unit)  # as plans begin: nothing more to do
            engine.gathers.wait(unit)
            engine.gathers.free(unit)
        values = engine.buffer.weight("links.0.fc.weight").flatten()
        first, last = values.min().item(), values.max().item()
        return (
            before,
            after,
            states(engine),
            (first, last),
            gathers(ctx.ps) - moved,
            sum(unit.weight_bytes for unit in stage.units),
        )

    for before, after, end, values, moved, size in run_ranks(body, 2):
        assert before == end == [UNSHARDED] * 3
        assert after == [GATHERING if overlap else UNSHARDED] * 3
        assert values == (7.0, 7.0), "the first rank's part: all ranks have it"
        assert moved == Moved(3, size)


def test_weights_that_changed_free_what_is_gathered_and_instances_gather_first():
    """HFSDP: each of four ranks writes a fourth; a unit's inner shard is made whole before its first gather."""

    def body(ctx):
        ps = ctx.make_ps(dp=4, instances=2)
        engine, _ = build(
            ps, Model(), "optim_grads_params", outer_dp_sharding_strategy="optim", overlap_param_gather=True
        )
        buffer, before = engine.buffer, ps.dp_outer_group.traffic.moved("all_gather")
        engine.gathers.start(0)
        for name in buffer.names:
            start, end = buffer.part(name, buffer.sharding.optimizer)
            engine.settle_weights()
            buffer.main_weight_part(name).copy_(torch.arange(start, end))
        engine.weights_changed()
        seen, held = states(engine), engine.memory_tracker.live("gathered")
        with engine.gathered(range(3)):
            whole = buffer.weight("links.2.fc.weight").flatten().tolist()
        outer = ps.dp_outer_group.traffic.moved("all_gather") - before
        shards = sum(bucket.weights.numel() * 8 for bucket in buffer.buckets if bucket.trained)
        return seen, held, whole, outer, shards

    for seen, held, whole, outer, shards in run_ranks(body, 4):
        assert seen == [SHARDED] * 3
        assert held == 0
        assert whole == list(range(36))
        assert outer == Moved(3, shards)


def test_a_slot_takes_a_unit_once_the_one_before_is_freed():
    """Three links take two slots in turns: the third's gather is an error before the first is freed."""

    def body(ctx):
        engine, _ = build(ctx.ps, Model(), "optim_grads_params", fsdp_double_buffer=True)
        slots = [unit.slot for unit in engine.stage_units()[0].units]
        for unit in range(2):
            engine.gathers.start(unit)
        with pytest.raises(
            ModelError, match=r"--fsdp-double-buffer: unit 'link 2' needs its slot .* unit 'link 0'"
        ):
            engine.gathers.start(2)
        seen = [states(engine)]
        engine.gathers.free(0)
        engine.gathers.start(2)
        engine.gathers.wait(2)
        seen.append(states(engine))
        value = engine.buffer.weight("links.2.gain").clone()
        held = engine.memory_tracker.live("slots")
        return slots, seen, torch.equal(value, Model().chains()[0].links["2"].gain), held

    for slots, seen, equal, held in run_ranks(body, 2):
        assert slots == [0, 1, 0]
        assert seen == [[GATHERING, GATHERING, SHARDED], [SHARDED, GATHERING, UNSHARDED]]
        assert equal
        assert held > 0


def test_the_forward_of_the_only_chunk_waits_for_all_weights():
    engine, _ = build(single_process(Device("cpu")), Model(), "optim_grads_params")
    x = sample(0, torch.float64)
    assert torch.equal(engine(x), Model().chains()[0](x)), "one rank cuts nothing"
    two, _ = build(single_process(Device("cpu")), Model((1, 1)), "no_shard")
    with pytest.raises(AssertionError, match="one of 2 chunks is meant"):
        two(x)
