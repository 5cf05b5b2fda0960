"""Norms and counts of a model that several ranks hold parts of, against one process that holds all of it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from megatron.core.device import Device
from megatron.core.distributed.custom_fsdp.data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.custom_fsdp.flat_buffer import FlatBuffer
from megatron.core.distributed.custom_fsdp.squared_sums import squared_sums
from megatron.core.optimizer.clip_grads import norm_of
from megatron.core.optimizer.mixed_precision import build_optimizer
from megatron.core.optimizer.optimization_config import OptimizerConfig
from megatron.core.param_meta import ParamMeta
from megatron.core.sharding_table import STRATEGIES, ShardPlace, sharding_of
from megatron.core.transport import collectives
from megatron.core.transport.parallel_state import single_process
from tests.harness.cut_models import MODEL, cut_buffer, cut_stages, global_part
from tests.harness.ranks import RanksError, run_ranks

PS = single_process(Device("cpu"))
CPU = torch.device("cpu")


def gradient(name: str) -> torch.Tensor:
    """Sizes differ by orders of magnitude, so that the order of additions shows in the bits; some are zero."""
    index = list(MODEL).index(name)
    generator = torch.Generator().manual_seed(index)
    grad = torch.randn(MODEL[name], generator=generator) * 10.0 ** (index * 7 % 5 - 2)
    grad.view(-1)[:: index + 2] = 0.0
    return grad


def optimizer_of(ps, stages: dict[int, list[str]], *, tied_on: int | None = None, **cut):
    """This rank's optimizer, with gradients and weights in place."""
    buffer = cut_buffer(ps, stages, tied_on=tied_on, **cut)
    optimizer = build_optimizer(OptimizerConfig(lr=1e-2), buffer, ps)
    for name in buffer.names:
        local = torch.zeros(buffer.param_meta[name].local_shape)
        for region in buffer.param_meta[name].parts:
            region.view(local).copy_(global_part(region, gradient(name)))
        start, end = buffer.part(name, buffer.sharding.optimizer)
        buffer.main_grad_part(name).copy_(local.view(-1)[start:end])
        buffer.main_weight_part(name).copy_(3 * local.view(-1)[start:end])
    return optimizer


def one_process(divisor: float) -> tuple[float, int, float]:
    optimizer = optimizer_of(PS, {0: list(MODEL)})
    stats = optimizer.prepare(divisor, count_zero_grads=True)
    return stats.norm, stats.num_zeros, optimizer.params_norm()


def test_one_process_adds_a_number_a_parameter_in_the_models_order_and_communicates_nothing(monkeypatch):
    def forbidden(*args, **kwargs):
        raise AssertionError("a collective over one rank")

    monkeypatch.setattr(collectives.Call, "launch", forbidden)
    sums = squared_sums([gradient(name) for name in MODEL]).tolist()
    norm, zeros, weights = one_process(3.0)
    assert norm == norm_of(sums) / 3.0
    assert norm_of(sums) != norm_of(reversed(sums))  # the order can be seen in the bits
    assert zeros == sum(int((gradient(name) == 0).sum()) for name in MODEL)
    assert weights == pytest.approx(3 * norm_of(sums), rel=1e-6)


@pytest.mark.parametrize(
    ("pp", "sizes", "placement"),
    [
        (2, [4, 7], [[0], [1]]),
        (4, [1, 2, 7, 1], [[0], [1], [2], [3]]),
        (2, [2, 3, 5, 1], [[0, 2], [1, 3]]),  # interleaved
        (2, [2, 3, 5, 1], [[0, 3], [1, 2]]),  # a V
        (3, [6, 0, 5], [[0], [1], [2]]),  # a stage without parameters
    ],
)
@pytest.mark.parametrize("tied", [False, True])
def test_a_pipeline_has_the_very_bits_of_one_process(pp, sizes, placement, tied):
    stages = cut_stages(sizes)

    def body(ctx):
        ps = ctx.make_ps(pp=pp)
        mine = {stage: stages[stage] for stage in placement[ps.pp_rank]}
        last_elsewhere = tied and len(stages) - 1 not in placement[0]
        optimizer = optimizer_of(ps, mine, tied_on=len(stages) - 1 if last_elsewhere else None)
        stats = optimizer.prepare(3.0, count_zero_grads=True)
        norm = optimizer.params_norm()
        optimizer.step(3.0, 0.5)  # a stage without parameters steps too
        return (stats.norm, stats.num_zeros, norm), optimizer.num_steps, optimizer.state()

    expected = one_process(3.0)
    for figures, num_steps, state in run_ranks(body, pp):
        assert figures == expected
        assert num_steps == state["num_steps"] == 1


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (4, 1), (2, 2)])
def test_tensor_parallel_counts_every_element_once(tp, pp):
    stages = cut_stages([5, 6] if pp == 2 else [11])

    def body(ctx):
        ps = ctx.make_ps(tp=tp, pp=pp)
        optimizer = optimizer_of(ps, {ps.pp_rank: stages[ps.pp_rank]}, tied_on=1 if pp == 2 else None)
        stats = optimizer.prepare(3.0, count_zero_grads=True)
        local = optimizer._figures(False)[0].clone()
        collectives.all_reduce(local, ps.mp_group)
        assert norm_of(local.tolist()) / 3.0 == stats.norm
        return stats.norm, stats.num_zeros, optimizer.params_norm()

    norm, zeros, weights = one_process(3.0)
    by_rank = run_ranks(body, tp * pp)
    for figures in by_rank:
        assert figures[0] == pytest.approx(norm, rel=1e-14)
        assert figures[1] == zeros
        assert figures[2] == pytest.approx(weights, rel=1e-14)
        assert figures == by_rank[0]  # every rank clips alike


def test_one_collective_a_step_over_the_model_parallel_ranks(monkeypatch):
    """And one over the world, where that is more: whether any rank has seen what is not finite."""

    def body(ctx):
        ps = ctx.make_ps(pp=2, dp=ctx.world_size // 2)
        optimizer = optimizer_of(ps, {ps.pp_rank: cut_stages([5, 6])[ps.pp_rank]})
        calls = []
        real = collectives.all_reduce
        monkeypatch.setattr(
            collectives, "all_reduce", lambda t, g, *a, **k: (calls.append(g.purpose), real(t, g, *a, **k))[1]
        )
        optimizer.prepare(1.0, count_zero_grads=True)
        return calls

    assert run_ranks(body, 2) == [["mp"]] * 2
    assert run_ranks(body, 4) == [["mp", "world"]] * 4


def test_nonfinite_gradients_are_known_everywhere():
    def body(ctx):
        ps = ctx.make_ps(tp=2, pp=2)
        optimizer = optimizer_of(ps, {ps.pp_rank: cut_stages([5, 6])[ps.pp_rank]})
        if ps.pp_rank == 1:
            optimizer.buffer.main_grad("l1.norm")[3] = math.nan  # all copies are alike once they are added
            if ps.tp_rank == 1:
                optimizer.buffer.main_grad("l3.fc2")[0, 0] = math.inf
        stats = optimizer.prepare(1.0)
        return stats.nonfinite, math.isnan(stats.norm)

    assert run_ranks(body, 4) == [(True, True)] * 4


def test_two_parameters_of_one_name_and_wrong_copies_are_refused():
    def same_name(ctx):
        ps = ctx.make_ps(pp=2)
        build_optimizer(OptimizerConfig(), cut_buffer(ps, {ps.pp_rank: ["l0.norm"]}), ps)

    with pytest.raises(
        RanksError, match=r"ModelError: pipeline stages 0 and 1 both have a parameter 'l0.norm': give"
    ):
        run_ranks(same_name, 2)

    def copies(ctx):
        ps = ctx.make_ps(tp=2)
        buffer = FlatBuffer(
            {"w": nn.Parameter(torch.zeros(2))},
            {"w": ParamMeta("w", (2,))},  # held by both, and says nothing of it
            DistributedDataParallelConfig(),
            sharding=STRATEGIES["no_shard"],
            place=ShardPlace(),
            device=CPU,
        )
        build_optimizer(OptimizerConfig(), buffer, ps)

    with pytest.raises(RanksError, match=r"number of owners.*\('w', \(0,\)\): 2"):
        run_ranks(copies, 2)


ROWS = {
    "optim": (sharding_of("optim"), 1),
    "optim_grads": (sharding_of("optim_grads"), 1),
    "optim_grads_params": (sharding_of("optim_grads_params"), 1),
    "hybrid": (sharding_of("optim_grads_params"), 2),
    "hybrid optim": (sharding_of("optim"), 2),
    "fully hybrid": (sharding_of("optim_grads_params", "optim"), 2),
}


@pytest.mark.parametrize(("tp", "pp", "dp"), [(1, 1, 2), (2, 1, 2), (1, 2, 2), (1, 1, 4)])
def test_cut_optimizers_count_every_element_once(monkeypatch, tp, pp, dp):
    """Every strategy: one sum over all ranks, the same bits on each, and nobody squares another's part."""
    stages = cut_stages([5, 6] if pp == 2 else [11])

    def body(ctx):
        calls = []
        real = collectives.all_reduce
        monkeypatch.setattr(
            collectives, "all_reduce", lambda t, g, *a, **k: (calls.append(g.purpose), real(t, g, *a, **k))[1]
        )
        figures = {}
        for row, (sharding, instances) in ROWS.items():
            ps = ctx.make_ps(tp=tp, pp=pp, dp=dp, instances=instances)
            optimizer = optimizer_of(ps, {ps.pp_rank: stages[ps.pp_rank]}, sharding=sharding, units=True)
            calls.clear()
            stats = optimizer.prepare(3.0, count_zero_grads=True)
            assert calls == ["world"]
            squared = sum(
                t.numel() for held in optimizer._owned(optimizer.buffer.main_grad_part) for t in held
            )
            local = optimizer._figures(False)[0].clone()
            collectives.all_reduce(local, ps.world_group)
            assert norm_of(local.tolist()) / 3.0 == stats.norm
            figures[row] = (stats.norm, stats.num_zeros, optimizer.params_norm()), squared
            optimizer.step(3.0, 0.5)
        return figures

    norm, zeros, weights = one_process(3.0)
    by_rank = run_ranks(body, tp * pp * dp)
    for row in ROWS:
        for figures, _ in (of_rank[row] for of_rank in by_rank):
            assert figures[0] == pytest.approx(norm, rel=1e-14)
            assert figures[1] == zeros
            assert figures[2] == pytest.approx(weights, rel=1e-14)
            assert figures == by_rank[0][row][0]
        assert sum(of_rank[row][1] for of_rank in by_rank) == sum(
            math.prod(shape) for shape in MODEL.values()
        )


def test_a_cut_optimizer_hears_of_other_ranks_nonfinite_gradients():
    def body(ctx):
        ps = ctx.make_ps(dp=2)
        found = []
        for bad in (math.nan, math.inf):
            optimizer = optimizer_of(ps, {0: list(MODEL)}, sharding=sharding_of("optim_grads_params"))
            part = optimizer.buffer.main_grad_part("embedding")
            if ps.dp_rank == 1:
                assert part.numel() == 0  # lies on the other rank: the norm of this one is finite
            else:
                part[-1] = bad
            stats = optimizer.prepare(1.0)
            found.append((stats.nonfinite, math.isfinite(stats.norm)))
        return found

    assert run_ranks(body, 2) == [[(True, False)] * 2] * 2
