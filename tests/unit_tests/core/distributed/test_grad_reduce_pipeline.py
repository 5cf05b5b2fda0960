"""Reductions unit by unit: memory, order, what is refused, and steps that are not reduced, on real ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron.core.distributed.custom_fsdp.data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.module import ModelError, ModelUnit
from megatron.core.param_meta import LOOKUP, GradRoute, ParamMeta
from megatron.core.transport import collectives
from megatron.core.transport.traffic import Moved
from megatron.core.weight_grad import WeightGradAccumulator
from tests.harness.ranks import run_ranks

SHAPE = (4, 3)
ONE = torch.ones(SHAPE, dtype=torch.float64)


class Weights(nn.Module):
    """Modules "a", "b", ... with a weight each, whose gradients a test puts into a sink; the first one has two uses."""

    def __init__(self, names: str) -> None:
        super().__init__()
        for name in names:
            self.add_module(
                name, nn.ParameterDict({"w": nn.Parameter(torch.zeros(SHAPE, dtype=torch.float64))})
            )
        self.first = f"{names[0]}.w"

    def meta(self) -> dict[str, ParamMeta]:
        uses = {self.first: (self.first, self.first + LOOKUP)}
        return {
            name: ParamMeta(name, SHAPE, route=GradRoute.SINK, uses=uses.get(name, ()))
            for name, _ in self.named_parameters()
        }


def build(ps, strategy, names="abc", **config):
    """A unit a module, a bucket a unit."""
    model = Weights(names)
    made = DistributedDataParallelConfig(
        data_parallel_sharding_strategy=strategy, ddp_bucket_size=1, **config
    )
    units = [ModelUnit(name, (module,)) for name, module in model.named_children()]
    return DistributedDataParallel(model, ps, made, model.meta(), WeightGradAccumulator(), units=units)


def put(engine, key, value):
    grad = engine.buffer.main_grad(key) if engine.reductions.grad_begins(key) else None
    if grad is None:
        engine.buffer.main_grad(key).add_(value)
    else:
        grad.fill_(value)
    engine.reductions.grad_ready(key, 0)


def has_memory(engine, key):
    return engine.buffer.main_grad(key).untyped_storage().nbytes() > 0


def grads(engine):
    """Of each parameter, whose elements are all alike; they lie in the first rank's part, where gradients are cut."""
    parts = {name: engine.buffer.main_grad_part(name) for name in engine.buffer.names}
    return {name: part.unique().tolist() if part.numel() else None for name, part in parts.items()}


def live(engine):
    return engine.memory_tracker.live("grads"), engine.memory_tracker.live("extra")


@pytest.mark.parametrize("strategy", ["optim_grads", "optim_grads_params"])
def test_whole_gradients_have_memory_from_the_first_contribution_to_the_end_of_the_reduction(strategy):
    def body(ctx):
        engine = build(ctx.ps, strategy)
        (stage,) = engine.stage_units()
        assert [unit.extra_grad_bytes for unit in stage.units] == [ONE.numel() * 8, 0, 0]
        full = stage.units[1].grad_bytes
        held = []
        engine.begin_step(3)
        put(engine, "b.w", 1.0)
        held.append(live(engine))
        put(engine, "a.w", 1.0)
        put(engine, "a.w" + LOOKUP, 10.0)
        held.append(live(engine))
        engine.reductions.start(1)
        put(engine, "a.w", 2.0)  # kept for another microbatch
        engine.reductions.start(0)
        held.append(live(engine))  # under way
        put(engine, "b.w", 5.0)  # waits for the unit's own reduction, and overwrites
        held.append(live(engine))
        engine.reductions.start(2)  # to which nothing has contributed
        put(engine, "a.w", 100.0)
        engine.finish()  # reduces the rest, a without its further use
        held.append(live(engine))
        return held, full, grads(engine)

    use = ONE.numel() * 8
    for held, full, found in run_ranks(body, 2):
        assert held == [(full, 0), (2 * full, use), (2 * full, use), (2 * full, use), (0, 0)]
        assert found["a.w"] in ([2 * 113.0], None)
        assert found["b.w"] in ([2 * 6.0], None)
        assert found["c.w"] in ([0.0], None)


def test_at_most_two_reductions_are_under_way_and_the_oldest_is_waited_for(monkeypatch):
    def body(ctx):
        engine = build(ctx.ps, "optim_grads", "abcd")
        held = []
        real = collectives.reduce_scatter_units

        def watched(*args, **kwargs):
            held.append(live(engine)[0])
            return real(*args, **kwargs)

        monkeypatch.setattr(collectives, "reduce_scatter_units", watched)
        engine.begin_step(1)
        for name in "dcba":
            put(engine, f"{name}.w", 1.0)
        for unit in (3, 2, 1, 0):
            engine.reductions.start(unit)
        engine.finish()
        return held, engine.stage_units()[0].units[1].grad_bytes, engine.memory_tracker.transient_bytes

    for held, full, left in run_ranks(body, 2):
        assert held == [4 * full, 4 * full, 3 * full, 2 * full]
        assert left == 0


@pytest.mark.parametrize("strategy", ["no_shard", "optim"])
def test_what_comes_after_the_sum_of_whole_gradients_is_refused(strategy):
    def body(ctx):
        engine = build(ctx.ps, strategy)
        for _ in range(2):
            engine.begin_step(2)
            put(engine, "a.w", 1.0)
            put(engine, "a.w", 2.0)
            put(engine, "a.w" + LOOKUP, 4.0)
            engine.reductions.start(0)
            with pytest.raises(
                ModelError, match=r"'a.w' came after its unit 'a' was reduced for the last time"
            ):
                put(engine, "a.w", 1.0)
            with pytest.raises(AssertionError, match="unit 'a' was reduced for the last time"):
                engine.reductions.start(0)
            engine.finish()
        return grads(engine), engine.traffic

    for found, traffic in run_ranks(body, 2):
        assert found["a.w"] in ([14.0], None)
        assert found["b.w"] in ([0.0], None)
        size = 3 * 256 * 8
        moved = traffic.all_reduce if strategy == "no_shard" else traffic.reduce_scatter
        assert moved == Moved(3, size), "a step's own, not both steps'"


def test_what_comes_after_a_sum_over_instances_is_refused():
    def body(ctx):
        engine = build(ctx.make_ps(dp=4, instances=2), "optim_grads")
        engine.begin_step(1)
        put(engine, "a.w", 1.0 + ctx.rank)
        engine.reductions.start(0)
        engine.reductions.start_outer(0)
        with pytest.raises(ModelError, match=r"'a.w' came after its unit 'a' was reduced for the last time"):
            put(engine, "a.w", 1.0)
        with pytest.raises(AssertionError, match="unit 'a' is summed over instances already"):
            engine.reductions.start_outer(0)
        put(engine, "b.w", 1.0)
        engine.finish()
        return grads(engine), engine.traffic

    for found, traffic in run_ranks(body, 4):
        assert found["a.w"] in ([10.0], None)
        assert found["b.w"] in ([4.0], None)
        assert traffic.reduce_scatter.calls == traffic.outer_all_reduce.calls == 3, "a call a unit"


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
def test_a_step_without_reduction_says_what_is_not_finite(strategy):
    def body(ctx):
        engine = build(ctx.ps, strategy)
        engine.begin_step(1)
        put(engine, "c.w", float("nan"))
        engine.finish()
        engine.begin_step(2, reduce_gradients=False)
        put(engine, "b.w", float("nan") if ctx.rank else 1.0)
        engine.reductions.start(1)
        put(engine, "a.w" + LOOKUP, float("inf"))
        with pytest.raises(AssertionError, match="begun without reduce_gradients"):
            engine.finish()
        found = engine.nonfinite_keys()
        engine.begin_step(1)
        put(engine, "b.w", 1.0)
        engine.finish()
        return set(found), grads(engine), engine.nonfinite_keys()

    for rank, (found, after, later) in enumerate(run_ranks(body, 2)):
        assert found == {"a.w" + LOOKUP, *(["b.w"] if rank else [])}, "c's is of the step before"
        assert after["b.w"] in ([2.0], None)
        assert after["c.w"] in ([0.0], None)
        assert later == {}


def test_gradients_at_rest_keep_their_memory_as_long_as_they_are_asked_for():
    def body(ctx):
        engine = build(ctx.ps, "optim_grads")
        kept = []
        for keep in (False, True):
            engine.begin_step(1)
            put(engine, "a.w", 3.0)
            engine.finish()
            engine.begin_step(1, keep_gradients=keep)
            kept.append((engine.memory_tracker.live("main_grads"), grads(engine)["a.w"] if keep else None))
            engine.release_gradients()
            put(engine, "a.w", 4.0)
            kept.append((engine.memory_tracker.live("main_grads"), None))
            engine.reductions.start(0)
            kept.append((engine.memory_tracker.live("main_grads"), None))
            engine.finish()
        return kept, grads(engine)["a.w"], engine.buffer.persistent_bytes()["main_grads"]

    for rank, (kept, last, size) in enumerate(run_ranks(body, 2)):
        assert last in ([8.0], None)
        assert [held for held, _ in kept] == [0, 0, size // 3, size, 0, size // 3]
        assert kept[3][1] == ([6.0] if rank == 0 else None)


def test_gradients_take_slots_of_a_double_buffer_in_turns():
    def body(ctx):
        engine = build(ctx.ps, "optim_grads", "bcd", fsdp_double_buffer=True)
        engine.begin_step(1)
        for unit, name in reversed(list(enumerate("bcd"))):
            put(engine, f"{name}.w", 1.0)  # the third waits for the first one's reduction
            engine.reductions.start(unit)
        engine.finish()
        found = grads(engine)
        engine.begin_step(1)
        put(engine, "d.w", 1.0)
        with pytest.raises(ModelError, match=r"--fsdp-double-buffer: unit 'b' needs its slot .* unit 'd'"):
            put(engine, "b.w", 1.0)
        return found, engine.memory_tracker.live("grads")

    for found, held in run_ranks(body, 2):
        assert all(values in ([2.0], None) for values in found.values())
        assert held == 0


def test_programming_errors():
    def body(ctx):
        engine = build(ctx.ps, "optim_grads")
        for call in (
            engine.finish,
            lambda: engine.reductions.start(0),
            lambda: engine.reductions.start_outer(0),
        ):
            with pytest.raises(AssertionError, match="outside of a step: call begin_step"):
                call()
        with pytest.raises(AssertionError, match=r"a gradient for b.w outside of a step"):
            put(engine, "b.w", 1.0)
        with pytest.raises(AssertionError, match="a step of 0 microbatches"):
            engine.begin_step(0)
        engine.begin_step(1)
        engine.reductions.start(0)
        with pytest.raises(AssertionError, match="a step begins while gradients are still being reduced"):
            engine.begin_step(1)
        engine.finish()

    run_ranks(body, 2)
