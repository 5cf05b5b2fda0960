"""Data parallelism over the flat buffer, on real ranks, against one process that sees every sample."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from megatron.core import collectives
from megatron.core.device import Device
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.initial_weights import broadcast_weights
from megatron.core.optimizer.mixed_precision import build_optimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.parallel_state import single_process
from megatron.core.param_meta import LOOKUP, GradRoute, ParamMeta
from megatron.core.weight_grad import WeightGradAccumulator
from tests.harness.ranks import run_ranks

CPU = Device("cpu")
SMALL_BUCKETS = {"ddp_bucket_size": 20}  # several buckets even for a tiny model


def mlp(dtype=torch.float64, seed=0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def sample(index: int, dtype=torch.float64) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 + index), dtype=dtype)


def loss_of(module, x):
    return module(x).square().sum()


def expected_grads(module, num_samples, dtype=torch.float64):
    """Gradients of the sum over all samples, by plain autograd."""
    module = copy.deepcopy(module)
    for index in range(num_samples):
        loss_of(module, sample(index, dtype)).backward()
    return {name: p.grad for name, p in module.named_parameters()}


def train_step(ddp, rank, world, num_microbatches, dtype=torch.float64):
    """Rank r sees samples r, r + world, ...; returns the gradients after `finish`."""
    ddp.begin_step(num_microbatches)
    for index in range(num_microbatches):
        loss_of(ddp, sample(index * world + rank, dtype)).backward()
    ddp.finish()
    return {name: ddp.buffer.main_grad(name).clone() for name in ddp.buffer.names}


@pytest.mark.parametrize("world", [1, 2, 3])
def test_gradients_are_the_sum_over_ranks_and_microbatches(world):
    def body(ctx):
        grads = {}
        for overlap in (False, True):
            for num_microbatches in (1, 3):
                config = DistributedDataParallelConfig(overlap_grad_reduce=overlap, **SMALL_BUCKETS)
                ddp = DistributedDataParallel(mlp(), ctx.ps, config)
                assert len(ddp.buffer.arenas[0].layout.buckets) >= 3
                for _ in range(2):  # the second step starts from a clean buffer
                    grads[overlap, num_microbatches] = train_step(ddp, ctx.rank, world, num_microbatches)
                assert all(p.grad is None for p in ddp.chunks[0].parameters())
        return grads

    by_rank = run_ranks(body, world)
    for num_microbatches in (1, 3):
        expected = expected_grads(mlp(), num_microbatches * world)
        for name, grad in expected.items():
            results = [g[overlap, num_microbatches][name] for g in by_rank for overlap in (False, True)]
            torch.testing.assert_close(results[0], grad, rtol=1e-13, atol=1e-13)
            assert all(torch.equal(result, results[0]) for result in results)  # all ranks, overlapped or not


def test_with_more_than_two_ranks_sums_run_in_rank_order_whatever_the_buckets():
    def body(ctx):
        results = []
        for sizes in ({}, SMALL_BUCKETS, {"ddp_num_buckets": 2}):
            config = DistributedDataParallelConfig(overlap_grad_reduce=True, **sizes)
            ddp = DistributedDataParallel(mlp(torch.float32), ctx.ps, config)
            results.append(train_step(ddp, ctx.rank, 4, 1, torch.float32))
        return results

    by_rank = run_ranks(body, 4)
    own = []
    for rank in range(4):
        module = mlp(torch.float32)
        loss_of(module, sample(rank, torch.float32)).backward()
        own.append({name: p.grad for name, p in module.named_parameters()})
    for name in own[0]:
        total = ((own[0][name] + own[1][name]) + own[2][name]) + own[3][name]
        for results in by_rank:
            assert all(torch.equal(result[name], total) for result in results)


def test_overlap_reduces_buckets_during_backward_in_one_order(monkeypatch):
    def body(ctx):
        config = DistributedDataParallelConfig(overlap_grad_reduce=True, **SMALL_BUCKETS)
        ddp = DistributedDataParallel(mlp(), ctx.ps, config)
        launched = []
        real = collectives.sum_gradients
        monkeypatch.setattr(
            collectives,
            "sum_gradients",
            lambda b, g, **k: (launched.append(b.data_ptr()), real(b, g, **k))[1],
        )
        ddp.begin_step(2)
        counts = []
        for index in range(2):
            loss_of(ddp, sample(index)).backward()
            counts.append(len(launched))
        ddp.finish()
        arena = ddp.buffer.arenas[0]
        buckets = arena.layout.buckets
        starts = [arena.main_grads[b.start :].data_ptr() for b in buckets]
        return counts, launched == starts, len(buckets)

    for counts, in_order, num_buckets in run_ranks(body, 2):
        assert counts == [0, num_buckets]  # none before the last microbatch, all within its backward
        assert in_order


class Branches(nn.Module):
    """Which branch is used depends on the input: gradients become ready in another order on each rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b, self.unused = (nn.Linear(6, 6).double() for _ in range(3))
        self.frozen = nn.Linear(6, 6).double().requires_grad_(False)

    def forward(self, x, swap):
        if swap is None:
            return self.a(self.frozen(x))
        return self.a(self.b(self.frozen(x))) if swap else self.b(self.a(self.frozen(x)))


def test_unused_frozen_and_unequally_used_parameters():
    choices = [False, True]  # rank 0 uses a then b, rank 1 b then a; then rank 1 uses a only

    def body(ctx):
        config = DistributedDataParallelConfig(overlap_grad_reduce=True, **SMALL_BUCKETS)
        module = Branches()
        ddp = DistributedDataParallel(module, ctx.ps, config)
        frozen = module.frozen.weight.clone()
        results = []
        for swap in (choices[ctx.rank], None if ctx.rank else False):
            ddp.begin_step(1)
            ddp(sample(ctx.rank), swap).square().sum().backward()
            ddp.finish()
            results.append({n: ddp.buffer.main_grad(n).clone() for n in ddp.buffer.names})
        assert torch.equal(frozen, module.frozen.weight)
        assert not any(name.startswith("frozen") for name in ddp.buffer.names)
        return results

    by_rank = run_ranks(body, 2)
    for step, swaps in enumerate([(False, True), (False, None)]):
        module = Branches()
        for rank, swap in enumerate(swaps):
            module(sample(rank), swap).square().sum().backward()
        for name, p in module.named_parameters():
            if p.requires_grad:
                expected = torch.zeros_like(p) if p.grad is None else p.grad
                for results in by_rank:
                    torch.testing.assert_close(results[step][name], expected, rtol=1e-13, atol=1e-13)


class SinkLinear(nn.Module):
    """The smallest layer of our kind: puts its gradient into a sink, twice (a tied use)."""

    def __init__(self, sink) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 3, dtype=torch.float64))
        self.sink = sink


def test_sink_gradients_of_tied_uses_are_combined_before_the_reduction():
    def body(ctx):
        sink = WeightGradAccumulator()
        module = SinkLinear(sink)
        keys = ("weight", "weight" + LOOKUP)
        meta = {"weight": ParamMeta("weight", (4, 3), route=GradRoute.SINK, uses=keys)}
        config = DistributedDataParallelConfig(overlap_grad_reduce=True)
        ddp = DistributedDataParallel(module, ctx.ps, config, meta, sink)
        ddp.begin_step(2)
        for index in range(2):
            sink.microbatch = index
            x = torch.full((5, 3), float(index + ctx.rank), dtype=torch.float64)
            dy = torch.ones(5, 4, dtype=torch.float64)
            sink.put("weight", x, dy)
            sink.put("weight" + LOOKUP, torch.tensor([0, 1, 1]), torch.ones(3, 3, dtype=torch.float64))
        ddp.finish()
        return ddp.buffer.main_grad("weight").clone()

    world = 2
    matrix = 5.0 * sum(index + rank for index in range(2) for rank in range(world))
    lookup = torch.tensor([1.0, 2.0, 0.0, 0.0], dtype=torch.float64) * 2 * world
    expected = (matrix + lookup)[:, None].expand(4, 3)
    for grad in run_ranks(body, world):
        assert torch.equal(grad, expected)


def test_world_of_one_neither_communicates_nor_copies(monkeypatch):
    def forbidden(*args, **kwargs):
        raise AssertionError("a collective in a world of one")

    monkeypatch.setattr(collectives, "sum_gradients", forbidden)
    monkeypatch.setattr(collectives, "all_reduce", forbidden)
    config = DistributedDataParallelConfig(overlap_grad_reduce=True, **SMALL_BUCKETS)
    ddp = DistributedDataParallel(mlp(), single_process(CPU), config)
    pointer = ddp.buffer.arenas[0].main_grads.data_ptr()
    grads = train_step(ddp, 0, 1, 3)
    for name, grad in expected_grads(mlp(), 3).items():
        torch.testing.assert_close(grads[name], grad, rtol=1e-13, atol=1e-13)
    assert ddp.buffer.arenas[0].main_grads.data_ptr() == pointer


def test_average_in_collective_divides_by_the_ranks():
    def body(ctx):
        config = DistributedDataParallelConfig(ddp_average_in_collective=True)
        ddp = DistributedDataParallel(mlp(), ctx.ps, config)
        grads = train_step(ddp, ctx.rank, 2, 1)
        divided_by = ddp.buffer.grads_divided_by
        optimizer = build_optimizer(OptimizerConfig(lr=1.0), ddp.buffer, ctx.ps)
        norm = optimizer.prepare(5.0).norm  # divides the sum by 5, whatever the collective did
        return grads, divided_by, norm

    expected = expected_grads(mlp(), 2)
    whole = torch.cat([grad.flatten() for grad in expected.values()])
    for grads, divided_by, norm in run_ranks(body, 2):
        assert divided_by == 2
        assert norm == pytest.approx(whole.norm().item() / 5, rel=1e-12)
        for name, grad in expected.items():
            torch.testing.assert_close(grads[name] * 2, grad, rtol=1e-13, atol=1e-13)


def test_bf16_gradients_are_added_in_fp32_and_rounded_once():
    def body(ctx):
        config = DistributedDataParallelConfig(grad_reduce_in_bf16=True)
        module = mlp(torch.bfloat16)
        ddp = DistributedDataParallel(module, ctx.ps, config)
        grads = train_step(ddp, ctx.rank, 3, 1, torch.bfloat16)
        plain = mlp(torch.bfloat16)
        loss_of(plain, sample(ctx.rank, torch.bfloat16)).backward()
        return grads, {name: p.grad for name, p in plain.named_parameters()}

    by_rank = run_ranks(body, 3)
    for name, reduced in by_rank[0][0].items():
        own = [plain[name].float() for _, plain in by_rank]
        assert reduced.dtype == torch.bfloat16
        assert torch.equal(reduced, ((own[0] + own[1]) + own[2]).bfloat16())


def test_broadcast_weights_makes_all_ranks_rank_zero():
    def body(ctx):
        module = mlp(torch.bfloat16, seed=ctx.rank)
        broadcast_weights([module], ctx.ps)
        ddp = DistributedDataParallel(module, ctx.ps, DistributedDataParallelConfig())
        return {
            n: (ddp.buffer.weight(n).clone(), ddp.buffer.main_weight(n).clone()) for n in ddp.buffer.names
        }

    for weights in run_ranks(body, 2):
        for name, p in mlp(torch.bfloat16, seed=0).named_parameters():
            assert torch.equal(weights[name][0], p)
            assert torch.equal(weights[name][1], p.float())


def test_calls_out_of_order_are_programming_errors():
    ddp = DistributedDataParallel(mlp(), single_process(CPU), DistributedDataParallelConfig())
    with pytest.raises(AssertionError, match=r"finish\(\) outside of a step"):
        ddp.finish()
    with pytest.raises(
        AssertionError, match=r"a gradient for 4.weight outside of a step|a gradient for 4.bias"
    ):
        loss_of(ddp, sample(0)).backward()
    with pytest.raises(AssertionError, match="a step of 0 microbatches"):
        ddp.begin_step(0)
    ddp.begin_step(1, reduce_gradients=False)
    with pytest.raises(AssertionError, match="begun without reduce_gradients"):
        ddp.finish()
    ddp.microbatch_done(0, 0)
    with pytest.raises(AssertionError, match="more microbatches done than the step has"):
        ddp.microbatch_done(0, 1)
    ddp.begin_step(1)
    ddp.finish()
