"""Each layer cut over ranks against torch's own of the whole matrix: outputs and all gradients to 1e-10 in fp64."""

import dataclasses
import functools

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from megatron.core.tensor_parallel.mappings import TensorParallel, sequence_slice
from megatron.core.tensor_parallel.parallel_layers import (
    ColumnParallelLinear,
    PositionEmbedding,
    RowParallelLinear,
    VocabParallelEmbedding,
    local_ids,
)
from megatron.core.tensor_parallel.random import fill
from megatron.core.tensor_parallel.sink_module import LayerFactory, even_bands
from megatron.core.tensor_parallel.vocab_loss import vocab_parallel_cross_entropy
from megatron.core.transformer.activations import GELU
from megatron.core.weight_grad import WeightGradAccumulator
from tests.harness.ranks import RankContext, run_ranks, share_ranks
from tests.harness.tiny_models import join_parts

S, B, IN, OUT = 8, 3, 12, 16
EXACT = {"rtol": 0, "atol": 1e-10}


def build(make, tp):
    """A layer with initial weights, and the sink that holds its gradients."""
    sink = WeightGradAccumulator()
    factory = LayerFactory(sink, torch.float64, torch.device("cpu"), init_std=1.0, residual_std=1.0, tp=tp)
    layer = make(factory=factory.at("x"))
    for name, parameter in layer.named_parameters():
        fill(parameter, layer.meta[f"x.{name}"], 1)
    if getattr(layer, "bias", None) is not None:
        torch.nn.init.constant_(layer.bias, 0.5)
    sink.bind_new({key: meta.local_shape for key, meta in layer.meta.items()}, torch.float64, factory.device)
    return layer, sink


def given(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(shape[-1]))


def parts(layer, sink):
    weights = {key: (meta, layer.get_parameter(key[2:]).detach()) for key, meta in layer.meta.items()}
    return weights, {key: (meta, sink.main_grads[key]) for key, meta in layer.meta.items()}


def column(ctx: RankContext, sp: bool, gated: bool, keeps: bool = False):
    """keeps: B apart from W, which has to find the input gathered."""
    asked = []
    group = ctx.make_ps(tp=ctx.world_size).group("tp")
    group = dataclasses.replace(group, observer=lambda op, *_: asked.append(op))
    tp = TensorParallel(group, sp)
    bands = even_bands(OUT, tp, 2) if gated else None
    layer, sink = build(functools.partial(ColumnParallelLinear, IN, OUT, bias=True, bands=bands), tp)
    sink.keeps_gathered = keeps
    x = sequence_slice(given(S, B, IN), tp).clone().requires_grad_()
    y = layer(x)
    dy = given(S, B, OUT).view(S, B, 2 if gated else 1, -1)
    with sink.backward(0, split=keeps):
        y.backward(dy.chunk(ctx.world_size, -1)[ctx.rank].flatten(-2))
    if keeps:
        assert asked.count("all_gather") == sp  # F's own
        asked.clear()
        sink.flush(0)
        assert not asked
    return x.grad, y.detach(), *parts(layer, sink)


def row(ctx: RankContext, sp: bool):
    tp = TensorParallel(ctx.make_ps(tp=ctx.world_size).group("tp"), sp)
    layer, sink = build(functools.partial(RowParallelLinear, IN, OUT, bias=True), tp)
    x = given(S, B, IN).chunk(ctx.world_size, -1)[ctx.rank].clone().requires_grad_()
    y = layer(x, activation=GELU)
    y.backward(sequence_slice(given(S, B, OUT), tp))
    return x.grad, y.detach(), *parts(layer, sink)


def tables(ctx: RankContext, sp: bool):
    """Words, then positions: output and gradient of each."""
    tp = TensorParallel(ctx.make_ps(tp=ctx.world_size).group("tp"), sp)
    found = []
    for make, ids in ((VocabParallelEmbedding, word_ids()), (PositionEmbedding, position_ids())):
        layer, sink = build(functools.partial(make, OUT, IN), tp)
        y = layer(ids)
        y.backward(sequence_slice(given(S, B, IN), tp))
        found.append((y.detach(), *parts(layer, sink)))
    return found


def word_ids():
    return torch.randint(OUT, (S, B), generator=torch.Generator().manual_seed(0))


def position_ids():
    return torch.arange(S)[:, None].expand(S, B)


CHECKS = {
    **{f"column {sp} {g}": functools.partial(column, sp=sp, gated=g) for sp in (0, 1) for g in (0, 1)},
    "column 1 0 kept": functools.partial(column, sp=True, gated=False, keeps=True),
    "column 0 0 kept": functools.partial(column, sp=False, gated=False, keeps=True),
    **{f"row {sp}": functools.partial(row, sp=bool(sp)) for sp in (0, 1)},
    **{f"tables {sp}": functools.partial(tables, sp=bool(sp)) for sp in (0, 1)},
}


@functools.cache
def found(size):
    return share_ranks(size, CHECKS)


def joined(ranks, at):
    return (join_parts([rank[at] for rank in ranks], gradients=False)), join_parts(
        [rank[at + 1] for rank in ranks], gradients=True
    )


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("gated", [0, 1])
@pytest.mark.parametrize("sp", [0, 1])
def test_column(size, sp, gated):
    check_column(found(size)[f"column {sp} {gated}"], size, sp, gated)


@pytest.mark.parametrize("sp", [0, 1])
def test_an_input_kept_gathered_is_not_gathered_in_w(sp):
    check_column(found(2)[f"column {sp} 0 kept"], 2, sp, 0)


def check_column(ranks, size, sp, gated):
    weights, grads = joined(ranks, 2)
    whole, _ = build(functools.partial(ColumnParallelLinear, IN, OUT, bias=True), TensorParallel())
    assert torch.equal(weights["x.weight"], whole.weight)
    x = given(S, B, IN).requires_grad_()
    weight, bias = weights["x.weight"].requires_grad_(), weights["x.bias"].requires_grad_()
    y = F.linear(x, weight, bias)
    y.backward(given(S, B, OUT))
    split = y.detach().view(S, B, 2 if gated else 1, -1).chunk(size, -1)
    for rank, (dx, out, *_) in enumerate(ranks):
        torch.testing.assert_close(out, split[rank].flatten(-2), **EXACT)
        torch.testing.assert_close(dx, x.grad.chunk(size)[rank] if sp else x.grad, **EXACT)
    torch.testing.assert_close(grads["x.weight"], weight.grad, **EXACT)
    torch.testing.assert_close(grads["x.bias"], bias.grad, **EXACT)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("sp", [0, 1])
def test_row(size, sp):
    ranks = found(size)[f"row {sp}"]
    weights, grads = joined(ranks, 2)
    x = given(S, B, IN).requires_grad_()
    weight, bias = weights["x.weight"].requires_grad_(), weights["x.bias"].requires_grad_()
    y = F.linear(F.gelu(x), weight, bias)
    y.backward(given(S, B, OUT))
    for rank, (dx, out, *_) in enumerate(ranks):
        torch.testing.assert_close(out, y.detach().chunk(size)[rank] if sp else y.detach(), **EXACT)
        torch.testing.assert_close(dx, x.grad.chunk(size, -1)[rank], **EXACT)
    torch.testing.assert_close(grads["x.weight"], weight.grad, **EXACT)
    torch.testing.assert_close(grads["x.bias"], bias.grad, **EXACT)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("sp", [0, 1])
@pytest.mark.parametrize("table", [0, 1], ids=["words", "positions"])
def test_lookup(size, sp, table):
    ranks = [rank[table] for rank in found(size)[f"tables {sp}"]]
    weights, grads = joined(ranks, 1)
    weight = weights["x.weight"].requires_grad_()
    y = F.embedding((word_ids(), position_ids())[table], weight)
    y.backward(given(S, B, IN))
    for rank, (out, *_) in enumerate(ranks):
        assert torch.equal(out, y.detach().chunk(size)[rank] if sp else y.detach())
    torch.testing.assert_close(grads["x.weight"], weight.grad, **EXACT)


def test_local_ids():
    class Third:
        rank, size = 2, 4

    held, outside = local_ids(torch.tensor([0, 7, 8, 11, 12]), 16, Third)
    assert outside.tolist() == [True, True, False, False, True]
    assert held[2:4].tolist() == [0, 3]
    assert ((held >= 0) & (held < 4)).all()
    for vocabulary in (16, 14):  # of 14, the last rank has two
        for unknown in (-1, vocabulary, 1000):  # held by nobody: no rank looks it up in silence
            for rank in range(4):
                Third.rank = rank
                rows = torch.zeros(min(4, vocabulary - 4 * rank), 2)
                with pytest.raises(IndexError):
                    F.embedding(local_ids(torch.tensor([unknown]), vocabulary, Third)[0], rows)
    held, outside = local_ids(torch.tensor([0, 11, 12, 13]), 14, Third)
    assert outside.tolist() == [True, True, False, False]
    assert held.tolist() == [0, 1, 0, 1]


def check_unknown_label(ctx):
    tp = TensorParallel.of(ctx.make_ps(tp=2), False)
    for label in (-1, 8):
        with pytest.raises((RuntimeError, IndexError)):
            vocab_parallel_cross_entropy(torch.zeros(1, 4), torch.tensor([label]), tp)


def test_a_label_that_no_rank_holds_is_refused():
    run_ranks(check_unknown_label, 2)
