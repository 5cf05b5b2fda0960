"""The data parallel engine under a pipeline: several chunks, several microbatches under way, any order of backwards."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from megatron.core import collectives
from megatron.core.device import Device
from megatron.core.distributed.custom_fsdp.hook_driven import (
    HookDrivenDataParallel as DistributedDataParallel,
)
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.module import ModelError
from megatron.core.parallel_state import single_process
from megatron.core.param_meta import LOOKUP, GradRoute, ParamMeta
from megatron.core.weight_grad import WeightGradAccumulator, add_gradient
from tests.harness.ranks import run_ranks

CPU = Device("cpu")
SHAPE = (4, 3)
LAYERS = 5  # of each chunk


class SinkChunk(nn.Module):
    """Weights `layers.<n>`, whose gradients a test puts into `sink`; the first is tied: two uses."""

    def __init__(self, first: int, frozen: str = "") -> None:
        super().__init__()
        self.layers = nn.ParameterDict(
            {
                str(n): nn.Parameter(torch.zeros(SHAPE, dtype=torch.float64))
                for n in range(first, first + LAYERS)
            }
        )
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name != frozen)
        self.sink = WeightGradAccumulator()

    def meta(self) -> dict[str, ParamMeta]:
        names = [name for name, _ in self.named_parameters()]
        uses = {names[0]: (names[0], names[0] + LOOKUP)}
        return {n: ParamMeta(n, SHAPE, route=GradRoute.SINK, uses=uses.get(n, ())) for n in names}


def engine(ps, *, overlap=True, bucket_size=2 * 12, frozen=""):
    """Two chunks of five 12-element weights; three weights a bucket would straddle them."""
    chunks = [SinkChunk(0, frozen), SinkChunk(LAYERS, frozen)]
    meta = chunks[0].meta() | chunks[1].meta()
    config = DistributedDataParallelConfig(overlap_grad_reduce=overlap, ddp_bucket_size=bucket_size)
    sinks = [chunk.sink for chunk in chunks]
    return DistributedDataParallel(chunks, ps, config, meta, sinks, stages=[1, 3]), chunks, meta


def contribution(key: str, microbatch: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hash((sum(key.encode()), microbatch, rank)) % 2**31)
    return torch.randn(SHAPE, generator=generator, dtype=torch.float64)


def put(ddp, chunks, key, microbatch, rank):
    name = ddp.buffer.param_of_key(key)
    sink = chunks[int(name.split(".")[1]) // LAYERS].sink
    sink.microbatch = microbatch
    add_gradient(sink.main_grads[key], contribution(key, microbatch, rank), overwrite=ddp.grad_begins(key))
    sink.done(key, microbatch)


def counted_launches(monkeypatch):
    launched = []
    real = collectives.sum_gradients
    monkeypatch.setattr(
        collectives, "sum_gradients", lambda b, g, **k: (launched.append(b.data_ptr()), real(b, g, **k))[1]
    )
    return launched


def keys_of(ddp):
    return [key for name in ddp.buffer.names for key in ddp.buffer.param_meta[name].grad_keys]


def grads_of(ddp):
    return {name: ddp.buffer.main_grad(name).clone() for name in ddp.buffer.names}


def expected(meta, num_microbatches, world, names):
    return {
        name: sum(
            contribution(key, m, rank)
            for rank in range(world)
            for key in meta[name].grad_keys
            for m in range(num_microbatches)
        )
        for name in names
    }


def test_it_is_a_grad_sync():
    ddp, _, _ = engine(single_process(CPU))
    ddp.unshard(0).wait()
    ddp.wait(0)
    ddp.reshard(1, 0)
    assert len(ddp.chunks) == 2
    with pytest.raises(AssertionError, match="one of 2 chunks is meant"):
        ddp(torch.zeros(1))


@pytest.mark.parametrize("overlap", [True, False])
def test_any_order_of_microbatches_gives_the_sum(overlap, monkeypatch):
    """Every rank reports in an order of its own: reductions start early, all in one order, and nothing hangs."""

    def body(ctx):
        launched = counted_launches(monkeypatch)
        ddp, chunks, meta = engine(ctx.ps, overlap=overlap)
        results = []
        for step in range(3):
            events = [(key, m) for key in keys_of(ddp) for m in range(4)]
            random.Random(10 * step + ctx.rank).shuffle(events)
            ddp.begin_step(4)
            launched.clear()
            for key, m in events:
                put(ddp, chunks, key, m, ctx.rank)
            before = len(launched)
            ddp.finish()
            results.append((before, list(launched), grads_of(ddp)))
        arena = ddp.buffer.arenas[0]
        starts = [arena.main_grads[bucket.start :].data_ptr() for bucket in arena.layout.buckets]
        return results, starts, expected(meta, 4, ctx.world_size, ddp.buffer.names)

    for results, starts, sums in run_ranks(body, 2):
        assert len(starts) == 5
        for before, order, grads in results:
            assert before == (len(starts) if overlap else 0)
            assert order == starts
            for name, grad in sums.items():
                torch.testing.assert_close(grads[name], grad, rtol=1e-13, atol=1e-13)


def test_a_bucket_starts_when_its_last_microbatch_is_in_whatever_its_number(monkeypatch):
    def body(ctx):
        launched = counted_launches(monkeypatch)
        ddp, chunks, _ = engine(ctx.ps, bucket_size=12)  # a bucket a weight, the last layer's first
        ddp.begin_step(3)
        seen = []
        for microbatch in (2, 0, 1):  # number 2 is not the last to arrive
            for key in ("layers.9", "layers.8"):
                put(ddp, chunks, key, microbatch, ctx.rank)
                seen.append(len(launched))
        for microbatch in range(3):  # layer 6 is complete, but layer 7 comes first in the layout
            put(ddp, chunks, "layers.6", microbatch, ctx.rank)
        seen.append(len(launched))
        ddp.finish()
        return seen, len(launched)

    for seen, total in run_ranks(body, 2):
        assert seen == [0, 0, 0, 0, 1, 2, 2]
        assert total == 10


def test_microbatch_done_completes_what_was_never_used_and_straddling_buckets_wait_for_both(monkeypatch):
    def body(ctx):
        launched = counted_launches(monkeypatch)
        ddp, chunks, _ = engine(ctx.ps, bucket_size=3 * 12, frozen="layers.2")
        seen = []
        ddp.begin_step(2)
        for m in range(2):
            for key in ("layers.9", "layers.6", "layers.5"):  # 8, 7 and a use of 5 never
                put(ddp, chunks, key, m, ctx.rank)
            seen.append(len(launched))
            ddp.microbatch_done(1, m)
        seen.append(len(launched))  # [9 8 7] is complete, [6 5 4] waits for chunk 0
        put(ddp, chunks, "layers.0", 0, ctx.rank)
        ddp.microbatch_done(0, 1)
        ddp.microbatch_done(0, 0)
        seen.append(len(launched))
        ddp.finish()
        return (
            seen,
            grads_of(ddp),
            {n: contribution(n, 0, 0) + contribution(n, 0, 1) for n in ("layers.0",)},
            [contribution("layers.9", m, r) for m in range(2) for r in range(2)],
        )

    for seen, grads, once, nines in run_ranks(body, 2):
        assert seen == [0, 0, 1, 3]
        assert "layers.2" not in grads
        torch.testing.assert_close(grads["layers.0"], once["layers.0"], rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(grads["layers.9"], sum(nines), rtol=1e-13, atol=1e-13)
        assert not grads["layers.7"].any()


def test_reduce_of_a_plan_starts_what_is_complete_and_its_work_waits(monkeypatch):
    def body(ctx):
        launched = counted_launches(monkeypatch)
        ddp, chunks, meta = engine(ctx.ps, overlap=False, bucket_size=3 * 12)
        ddp.begin_step(1)
        for key in keys_of(ddp):
            put(ddp, chunks, key, 0, ctx.rank)
        ddp.reduce(1, last=False).wait()
        seen = [len(launched)]
        work = ddp.reduce(1, last=True)
        seen.append(len(launched))
        work.wait()
        done = ddp.buffer.main_grad("layers.9").clone()
        ddp.reduce(0, last=True).wait()
        seen.append(len(launched))
        ddp.finish()
        return seen, done, grads_of(ddp), expected(meta, 1, 2, ddp.buffer.names)

    for seen, done, grads, sums in run_ranks(body, 2):
        assert seen == [0, 1, 4]
        torch.testing.assert_close(done, sums["layers.9"], rtol=1e-13, atol=1e-13)
        for name, grad in sums.items():
            torch.testing.assert_close(grads[name], grad, rtol=1e-13, atol=1e-13)


def test_without_reduction_gradients_stay_this_ranks_own():
    def body(ctx):
        ddp, chunks, _ = engine(ctx.ps)
        ddp.begin_step(1, reduce_gradients=False)
        for key in keys_of(ddp):
            put(ddp, chunks, key, 0, ctx.rank)
        ddp.microbatch_done(0, 0)
        ddp.microbatch_done(1, 0)
        own = {key: ddp.buffer.main_grad(key).clone() for key in keys_of(ddp)}
        ddp.begin_step(1)  # the next one starts clean
        ddp.finish()
        return own, grads_of(ddp)

    for rank, (own, after) in enumerate(run_ranks(body, 2)):
        assert all(torch.equal(grad, contribution(key, 0, rank)) for key, grad in own.items())
        assert not any(grad.any() for grad in after.values())


def test_too_many_or_too_late_gradients_are_programming_errors():
    def body(ctx):
        ddp, chunks, _ = engine(ctx.ps, bucket_size=12)
        ddp.begin_step(1)
        put(ddp, chunks, "layers.3", 0, ctx.rank)
        with pytest.raises(
            ModelError, match=r"'layers.3' arrived after its bucket .*more microbatches ran than begin_step"
        ):
            put(ddp, chunks, "layers.3", 0, ctx.rank)
        put(ddp, chunks, "layers.9", 0, ctx.rank)
        with pytest.raises(ModelError, match=r"'layers.9' arrived after its bucket had all its gradients"):
            put(ddp, chunks, "layers.9", 0, ctx.rank)
        ddp.finish()
        with pytest.raises(AssertionError, match="outside of a step"):
            put(ddp, chunks, "layers.9", 0, ctx.rank)
        return True

    assert run_ranks(body, 2) == [True, True]


def plain_chunks() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.ModuleDict({name: nn.Linear(4, 4).double()}) for name in ("first", "last")]


def test_plain_modules_as_chunks_report_by_hooks_with_backwards_out_of_order():
    """What a pipeline does with modules that are not ours: forwards of all microbatches, backwards in any order."""

    def body(ctx):
        chunks = plain_chunks()
        chunks[1]["last"].weight = chunks[0]["first"].weight  # refused: one tensor, two names
        with pytest.raises(ModelError, match="one tensor has two names"):
            DistributedDataParallel(chunks, ctx.ps, DistributedDataParallelConfig())
        chunks = plain_chunks()
        config = DistributedDataParallelConfig(overlap_grad_reduce=True, ddp_bucket_size=8)
        ddp = DistributedDataParallel(chunks, ctx.ps, config)
        ddp.begin_step(3)
        inputs = [torch.randn(2, 4, dtype=torch.float64) * (m + 1) for m in range(3)]
        losses = [chunks[1]["last"](chunks[0]["first"](x).tanh()).square().sum() for x in inputs]
        for m in (1, 2, 0) if ctx.rank else (2, 0, 1):
            losses[m].backward()
        ddp.finish()
        return inputs, grads_of(ddp)

    by_rank = run_ranks(body, 2)
    chunks = plain_chunks()
    for inputs, _ in by_rank:
        for x in inputs:
            chunks[1]["last"](chunks[0]["first"](x).tanh()).square().sum().backward()
    for _, grads in by_rank:
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-12, atol=1e-12)


def test_a_tensor_that_two_chunks_hold_waits_for_both_backwards(monkeypatch):
    class Half(nn.Module):
        def __init__(self, tied: nn.Parameter) -> None:
            super().__init__()
            self.tied = tied

    def body(ctx):
        launched = counted_launches(monkeypatch)
        tied = nn.Parameter(torch.ones(3, dtype=torch.float64))
        chunks = [Half(tied), Half(tied)]
        config = DistributedDataParallelConfig(overlap_grad_reduce=True)
        ddp = DistributedDataParallel(chunks, ctx.ps, config, stages=[0, 7])
        seen = []
        ddp.begin_step(2)
        for factor in (1.0, 10.0, 100.0, 1000.0):  # two microbatches, each backward through both chunks
            (tied * factor * (ctx.rank + 1)).sum().backward()
            seen.append(len(launched))
        ddp.finish()
        ddp.begin_step(1)
        ddp.microbatch_done(0, 0)
        seen.append(len(launched))
        ddp.microbatch_done(1, 0)
        seen.append(len(launched))
        ddp.finish()
        return seen

    def sums(ctx):
        tied = nn.Parameter(torch.ones(3, dtype=torch.float64))
        ddp = DistributedDataParallel([Half(tied), Half(tied)], ctx.ps, DistributedDataParallelConfig())
        ddp.begin_step(1)
        (tied * 2).sum().backward()
        (tied * 3).sum().backward()
        ddp.finish()
        return ddp.buffer.main_grad("tied").tolist()

    assert run_ranks(body, 2) == [[0, 0, 0, 1, 1, 2]] * 2
    assert run_ranks(sums, 2) == [[10.0] * 3] * 2
