"""Dropping activations and computing them again in the backward pass.

[Note: recompute] The first forward runs without a graph and keeps the segment's inputs and the dropout clock. The
backward runs the segment again with a graph, under that clock, and backpropagates through it: layers report each
weight gradient once, from the second run only, and dropout masks are the same in both, so gradients are bit-identical
to those without recomputation. `torch.utils.checkpoint` would also save and restore global random state and replay
through saved-tensor hooks; stateless dropout makes the former pointless.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatron.core.module import ModelContext

Segment = Callable[..., Tensor]


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, segment: Segment, context: ModelContext, anchor: Tensor | None, *inputs: Tensor | None
    ) -> Tensor:
        ctx.segment, ctx.context, ctx.moment = segment, context, context.moment
        ctx.save_for_backward(*inputs)
        return segment(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[3:]
        inputs = [
            None if saved is None else saved.detach().requires_grad_(need)
            for saved, need in zip(ctx.saved_tensors, needed, strict=True)
        ]
        with ctx.context.repeating(ctx.moment), torch.enable_grad():
            output = ctx.segment(*inputs)
        # It does not where all of the segment is frozen and only its input's gradient is asked for.
        if output.requires_grad:
            torch.autograd.backward(output, grads[0])
        return None, None, None, *(None if leaf is None else leaf.grad for leaf in inputs)


def recomputed(
    segment: Segment, context: ModelContext, *inputs: Tensor | None, anchor: Tensor | None = None
) -> Tensor:
    """segment(*inputs), keeping only the inputs for the backward pass. Source: arXiv 1604.06174.

    anchor: a parameter of the segment, so that the segment is part of the graph even where no input needs a
    gradient. Without gradients (evaluation) the segment just runs.
    """
    if not torch.is_grad_enabled():
        return segment(*inputs)
    return _Recompute.apply(segment, context, anchor, *inputs)


class _Again:
    """A tensor in several nodes' hands that none of them keeps: the first that asks in the backward has it computed,
    the last lets it go."""

    def __init__(self, y: Tensor, compute: Callable[[], Tensor]) -> None:
        self._place, self._compute = y.untyped_storage()._cdata, compute
        self._y: Tensor | None = None
        self._left = 0

    def pack(self, tensor: Tensor) -> Tensor | torch.Size:
        if tensor.untyped_storage()._cdata != self._place:
            return tensor
        self._left += 1
        return tensor.shape

    def unpack(self, packed: Tensor | torch.Size) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        y = self._compute() if self._y is None else self._y
        self._left -= 1
        self._y = y if self._left > 0 else None
        return y.view(packed)


def computed_again(y: Tensor, compute: Callable[[], Tensor]) -> contextlib.AbstractContextManager[Any]:
    """What is computed inside keeps `compute` in place of y, and of its views of other shapes. compute: once more,
    without a graph."""
    again = _Again(y, compute)
    return saved_tensors_hooks(again.pack, again.unpack)
