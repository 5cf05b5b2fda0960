"""The matrix product of the framework: input gradient by autograd, weight gradient through the sink.

[Note: B and W] The backward of a linear layer is two independent products. dx = dy W is what the layer
before waits for; dW = dy^T x is what nobody waits for. The function below returns the first and hands (x,
dy) to the sink, which computes the second at once or keeps it for later. The weight itself gets no gradient
from autograd: `.grad` stays None.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megatron.core.protocols import WeightGradSink


class Activation(Protocol):
    """An elementwise function whose input, not output, is kept for the backward pass."""

    def forward(self, x: Tensor) -> Tensor: ...

    def backward(self, x: Tensor, dy: Tensor) -> Tensor:
        """Gradient at x of dy at the output; may overwrite dy."""
        ...


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        sink: WeightGradSink,
        key: str,
        bias_key: str | None,
        activation: Activation | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sink, ctx.key, ctx.bias_key, ctx.activation = sink, key, bias_key, activation
        return F.linear(x if activation is None else activation.forward(x), weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        x, weight = ctx.saved_tensors
        activation = ctx.activation
        dx = linear_dgrad(dy, weight) if ctx.needs_input_grad[0] else None
        if ctx.needs_input_grad[1]:
            ctx.sink.put(ctx.key, x if activation is None else activation.forward(x), dy)
        if ctx.bias_key is not None and ctx.needs_input_grad[2]:
            ctx.sink.put(ctx.bias_key, None, dy)
        if dx is not None and activation is not None:
            dx = activation.backward(x, dx)
        return dx, None, None, None, None, None, None


def linear_dgrad(dy: Tensor, weight: Tensor) -> Tensor:
    """Gradient at the input of a linear layer: dy [..., out], weight [out, in] -> [..., in]."""
    return dy.matmul(weight)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    sink: WeightGradSink,
    key: str,
    bias_key: str | None = None,
    activation: Activation | None = None,
) -> Tensor:
    """activation(x) W^T + b: x [..., in], weight [out, in] -> [..., out].

    With an activation only its input is kept; the output is computed again for the weight gradient (less
    than 1 % of the layer's time, a quarter of its memory).
    """
    out: Tensor = _Linear.apply(x, weight, bias, sink, key, bias_key, activation)
    return out
