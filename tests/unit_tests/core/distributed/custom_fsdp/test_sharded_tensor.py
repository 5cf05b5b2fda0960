"""Sharded tensors: every operation on them is that of the whole tensor, or refused; rectangles for
torch.distributed.checkpoint; tensor parallel parts."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import MetadataIndex

from megatron.core.distributed.sharded_module.flat_span import FlatSpan
from megatron.core.distributed.sharded_module.sharded_tensor import ShardedTensor, local_grad
from megatron.core.module import ModelError
from megatron.core.param_meta import ParamMeta, Region
from tests.harness.ranks import share_ranks


def part(shape: tuple[int, ...], start: int, end: int) -> ShardedTensor:
    """Without the ranks that have the rest."""
    whole = torch.arange(math.prod(shape), dtype=torch.float32)
    return ShardedTensor(whole[start:end].clone(), FlatSpan(ParamMeta("w", shape), start, end))


# torch.distributed.checkpoint --------------------------------------------------------------------------


@given(st.lists(st.integers(1, 4), max_size=3), st.data())
def test_chunks_of_all_ranks_make_up_the_tensor(dims, data):
    shape = tuple(dims)
    numel = math.prod(shape)
    cuts = sorted({0, numel, *data.draw(st.lists(st.integers(0, numel), max_size=3))})
    found = torch.full(shape, -1.0)
    for start, end in itertools.pairwise(cuts):
        one = part(shape, start, end)
        for item in one.__create_write_items__("w", one):
            assert item.tensor_data.size == torch.Size(shape)
            chunk = item.tensor_data.chunk
            view = found
            for dim, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                view = view.narrow(dim, offset, size)
            assert bool((view == -1).all()), "two chunks have an element"
            view.copy_(one.__get_tensor_shard__(MetadataIndex("w", chunk.offsets)))
    assert torch.equal(found.view(-1), torch.arange(numel, dtype=torch.float32))


def test_an_empty_one_notes_a_load_too():
    one = part((2,), 2, 2)
    before = one.local._version
    assert one.__create_write_items__("w", one) == []
    assert one.local._version == before
    assert one.__create_chunk_list__() == []
    assert one.local._version > before


# Operations, against the whole tensor ------------------------------------------------------------------

Operation = Callable[..., Any]
ELEMENTWISE: tuple[Operation, ...] = (
    lambda a, b: a * 2 + b,
    lambda a, b: torch.lerp(a, b, 0.1),
    lambda a, b: torch.addcdiv(a, a, b.abs() + 1, value=0.5),
    lambda a, b: a.clone().mul_(b).clamp_(min=0),
    lambda a, b: torch.where(a > b, a, 0.0),
    lambda a, b: torch.max(a, b),
    lambda a, b: a + torch.arange(float(a.shape[-1])) if a.ndim else a,
    lambda a, b: a.to(torch.float64).float(),
    lambda a, b: torch.maximum(a, b, out=torch.empty_like(a)),
    lambda a, b: a.new_zeros(a.shape) + torch.ones_like(b) + torch.full_like(a, 3.0),
    lambda a, b: a.clone().masked_fill_(a > 0, 7.0),
    lambda a, b: torch._foreach_add([a, b], [b, a], alpha=2)[1],
    lambda a, b: a.view(-1).unsqueeze(0).flatten().view(a.shape),
    lambda a, b: copy.deepcopy(a).copy_(b),
    lambda a, b: a.detach().zero_().add_(b.data),
    lambda a, b: a.isfinite().logical_and(b.ne(0)).float(),
)
FIGURES: tuple[Operation, ...] = (
    lambda a, b: a.sum(),
    lambda a, b: a.mean(dtype=torch.float64),
    lambda a, b: a.sum(dim=tuple(range(a.ndim)), keepdim=True),
    lambda a, b: a.norm(),
    lambda a, b: torch.linalg.vector_norm(a, 1),
    lambda a, b: torch.linalg.vector_norm(a, float("-inf")),
    lambda a, b: a.norm(float("inf"), dtype=torch.float64),
    lambda a, b: torch.stack(torch._foreach_norm([a, b.view(-1)], 2)),
    lambda a, b: a.std() if a.numel() > 1 else a.sum(),
    lambda a, b: a.var(unbiased=False),
    lambda a, b: a.amax() - a.min(),
    lambda a, b: a.count_nonzero(),
    lambda a, b: torch.tensor([(a > 9).any(), (a > -9).all(), torch.equal(a, b), torch.equal(a, a.clone())]),
    lambda a, b: torch.allclose(a, a + 1e-9),
    lambda a, b: a.flatten().dot(b.flatten()),
    lambda a, b: (a * b).sum() / (a.norm() * b.norm()),
    lambda a, b: torch.tensor(a.sum().item() if a.numel() > 1 else a.item()),
    lambda a, b: (a.shape, a.ndim, a.numel(), a.dim(), a.size(), a.is_contiguous(), a.stride()),
)
SHAPES = ((3, 4), (5,), (), (2, 3, 4), (1, 1))


def operations_are_those_of_the_whole(ctx) -> None:
    group = ctx.ps.dp_group
    for shape in SHAPES:
        torch.manual_seed(0)
        one, other = torch.randn(shape), torch.randn(shape)
        numel = math.prod(shape)
        cuts = sorted([0, numel, *(numel * 2 // 3 for _ in range(ctx.world_size - 1))])
        span = FlatSpan(ParamMeta("w", shape), cuts[ctx.rank], cuts[ctx.rank + 1], (group,))
        ours = [ShardedTensor(span.part_of(whole).clone(), span) for whole in (one, other)]
        for operation in ELEMENTWISE:
            found = operation(*ours)
            assert isinstance(found, ShardedTensor)
            torch.testing.assert_close(found.full_tensor(), operation(one, other))
        for operation in FIGURES:
            torch.testing.assert_close(operation(*ours), operation(one, other))
        assert torch.equal(ours[0].full_tensor(), one), "nothing was written"
        mixed = ours[0].clone()
        mixed.add_(other)  # a whole one beside it
        torch.testing.assert_close(mixed.full_tensor(), one + other)
        torch.manual_seed(1)
        drawn = ours[0].clone().uniform_(-1, 1)
        torch.manual_seed(1)
        assert torch.equal(drawn.full_tensor(), torch.empty(shape).uniform_(-1, 1))
    first = ctx.rank == 0
    span = FlatSpan(ParamMeta("z", (1,)), 0 if first else 1, 1, (group,))
    negative = ShardedTensor(torch.tensor([-0.0] * first), span)
    assert math.copysign(1, negative.full_tensor().item()) == -1, "a gathered zero keeps its sign"


def gradients_flow_through_what_is_computed(ctx) -> None:
    """Of penalties on weights: each rank its own part."""
    whole = nn.Parameter(torch.arange(1.0, 13).view(3, 4))
    (whole.norm() + whole.square().mean() + whole.abs().sum()).backward()
    span = FlatSpan(ParamMeta("w", (3, 4)), 7 * ctx.rank, 7 + 5 * ctx.rank, (ctx.ps.dp_group,))
    ours = nn.Parameter(ShardedTensor(span.part_of(whole.detach()).clone(), span))
    (ours.norm() + ours.square().mean() + ours.abs().sum()).backward()
    torch.testing.assert_close(local_grad(ours), span.part_of(whole.grad))


def tensor_parallel_parts(ctx) -> None:
    """Rows of a weight on two tensor parallel ranks, each cut over two; a norm that both of these hold."""
    ps = ctx.make_ps(dp=2, tp=2)
    whole = torch.arange(1.0, 25).view(6, 4)
    tp, dp = ps.tp_group.rank, ps.dp_group.rank
    rows = Region((0, 0), (3 * tp, 0), (3, 4))
    copied = Region((0, 0), (0, 0), (6, 4), copies=2)
    for region, numel in ((rows, 12), (copied, 24)):
        meta = ParamMeta("w", (6, 4), regions=(region,))
        cut = numel // 3
        span = FlatSpan(meta, cut * dp, cut if dp == 0 else numel, (ps.dp_group, ps.tp_group), ps.tp_group)
        local = whole[3 * tp : 3 * tp + 3] if region is rows else whole
        ours = ShardedTensor(local.flatten()[span.start : span.end].clone(), span)
        assert ours.shape == (6, 4)
        torch.testing.assert_close(ours.norm(), whole.norm())
        torch.testing.assert_close(ours.sum(), whole.sum())
        assert torch.equal(ours.full_tensor(), whole)
        assert torch.equal((ours + whole).full_tensor(), 2 * whole)


def test_on_two_ranks():
    checks = (operations_are_those_of_the_whole, gradients_flow_through_what_is_computed)
    share_ranks(2, {check.__name__: check for check in checks})


def test_on_four_ranks():
    share_ranks(4, {check.__name__: check for check in (tensor_parallel_parts,)})


# Refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "asked",
    [
        lambda one: one[0],
        lambda one: one.t(),
        lambda one: one @ one.new_zeros(4, 2),
        lambda one: one.sum(0),
        lambda one: one.max(1),
        lambda one: one.sort(),
        lambda one: torch.cat([one, one]),
        lambda one: torch.stack([one, one]),
        lambda one: torch.zeros(3, 4).copy_(one),
        lambda one: torch._foreach_add_([torch.zeros(3, 4)], [one]),
        lambda one: torch.zeros(2, 3, 4) + one,
        lambda one: one + part((4,), 1, 2),
        lambda one: one.bernoulli(),
        lambda one: one.expand(2, 3, 4),
        lambda one: torch._foreach_max([one]),
    ],
)
def test_what_needs_the_whole_is_refused(asked: Callable[[Tensor], Any]):
    with pytest.raises(
        ModelError, match=r"of 'w' \(.*\), of which this rank has elements \[.*full_tensor\(\) is"
    ):
        asked(part((3, 4), 2, 7))


def test_other_refusals():
    one = part((3, 4), 2, 7)
    with pytest.raises(
        ModelError, match=r"'w': this rank has elements \(0, 5\) of one tensor and \(2, 7\) of"
    ):
        one + part((3, 4), 0, 5)
    with pytest.raises(ModelError, match=r"'w' is pickled.*checkpoint.save\(\).*full_state_dict\(\)"):
        pickle.dumps(one)
    with pytest.raises(ModelError, match=r"'w' would have shape \(5,\).*keeps both"):
        one.data = torch.zeros(5)
    for read in (one.tolist, one.numpy):
        with pytest.raises(ModelError, match=r"of 'w' .*full_tensor\(\)"):
            read()
    assert repr(one) == "ShardedTensor('w', shape=(3, 4), elements [2, 7): tensor([2., 3., 4., 5., 6.]))"
