"""The data parallel engine under a pipeline: several chunks, several microbatches under way, any order of backwards."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from megatron.core.distributed.custom_fsdp.data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.module import ModelError
from megatron.core.param_meta import LOOKUP, GradRoute, ParamMeta
from megatron.core.weight_grad import WeightGradAccumulator, add_gradient
from tests.harness.ranks import run_ranks

SHAPE = (4, 3)
LAYERS = 5  # of each chunk


class SinkChunk(nn.Module):
    """Weights `layers.<n>`, whose gradients a test puts into `sink`; the first is tied: two uses."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.layers = nn.ParameterDict(
            {
                str(n): nn.Parameter(torch.zeros(SHAPE, dtype=torch.float64))
                for n in range(first, first + LAYERS)
            }
        )
        self.sink = WeightGradAccumulator()

    def meta(self) -> dict[str, ParamMeta]:
        names = [name for name, _ in self.named_parameters()]
        uses = {names[0]: (names[0], names[0] + LOOKUP)}
        return {n: ParamMeta(n, SHAPE, route=GradRoute.SINK, uses=uses.get(n, ())) for n in names}


def engine(ps):
    """Two chunks of five 12-element weights; three weights a bucket would straddle them."""
    chunks = [SinkChunk(0), SinkChunk(LAYERS)]
    meta = chunks[0].meta() | chunks[1].meta()
    config = DistributedDataParallelConfig(ddp_bucket_size=2 * 12)
    sinks = [chunk.sink for chunk in chunks]
    return DistributedDataParallel(chunks, ps, config, meta, sinks, stages=[1, 3]), chunks, meta


def contribution(key: str, microbatch: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hash((sum(key.encode()), microbatch, rank)) % 2**31)
    return torch.randn(SHAPE, generator=generator, dtype=torch.float64)


def put(ddp, chunks, key, microbatch, rank):
    name = ddp.buffer.param_of_key(key)
    sink = chunks[int(name.split(".")[1]) // LAYERS].sink
    sink.microbatch = microbatch
    add_gradient(
        sink.main_grads[key], contribution(key, microbatch, rank), overwrite=ddp.reductions.grad_begins(key)
    )
    sink.done(key, microbatch)


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


def test_any_order_of_microbatches_gives_the_sum():
    """Every rank reports in an order of its own: nothing hangs."""

    def body(ctx):
        ddp, chunks, meta = engine(ctx.ps)
        results = []
        for step in range(3):
            events = [(key, m) for key in keys_of(ddp) for m in range(4)]
            random.Random(10 * step + ctx.rank).shuffle(events)
            ddp.begin_step(4)
            for key, m in events:
                put(ddp, chunks, key, m, ctx.rank)
            ddp.finish()
            results.append(grads_of(ddp))
        return results, len(ddp.buffer.buckets), expected(meta, 4, ctx.world_size, ddp.buffer.names)

    for results, num_buckets, sums in run_ranks(body, 2):
        assert num_buckets > 1
        for grads in results:
            for name, grad in sums.items():
                torch.testing.assert_close(grads[name], grad, rtol=1e-13, atol=1e-13)


def test_without_reduction_gradients_stay_this_ranks_own():
    def body(ctx):
        ddp, chunks, _ = engine(ctx.ps)
        ddp.begin_step(1, reduce_gradients=False)
        for key in keys_of(ddp):
            put(ddp, chunks, key, 0, ctx.rank)
        own = {key: ddp.buffer.main_grad(key).clone() for key in keys_of(ddp)}
        ddp.begin_step(1)  # the next one starts clean
        ddp.finish()
        return own, grads_of(ddp)

    for rank, (own, after) in enumerate(run_ranks(body, 2)):
        assert all(torch.equal(grad, contribution(key, 0, rank)) for key, grad in own.items())
        assert not any(grad.any() for grad in after.values())


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


class Half(nn.Module):
    def __init__(self, tied: nn.Parameter) -> None:
        super().__init__()
        self.tied = tied


def test_a_tensor_that_two_chunks_hold_is_summed_over_both_backwards():
    def sums(ctx):
        tied = nn.Parameter(torch.ones(3, dtype=torch.float64))
        ddp = DistributedDataParallel([Half(tied), Half(tied)], ctx.ps, DistributedDataParallelConfig())
        ddp.begin_step(1)
        (tied * 2).sum().backward()
        (tied * 3).sum().backward()
        ddp.finish()
        return ddp.buffer.main_grad("tied").tolist()

    assert run_ranks(sums, 2) == [[10.0] * 3] * 2
