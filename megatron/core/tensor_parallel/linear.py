"""The matrix products of the framework: input gradient by autograd, weight gradient through the sink.

[Note: B and W] The backward of a linear layer is two independent products. dx = dy W is what the layer
before waits for; dW = dy^T x is what nobody waits for. The functions below return the first and hand (x,
dy) to the sink, which computes the second at once or keeps it for later. The weight itself gets no gradient
from autograd: `.grad` stays None.

[Note: B's communication behind W] A column layer's dx is a sum over tensor parallel ranks. Its reduction begins
before the sink is called and is waited for afterwards, so that it runs beside the weight GEMM. Under sequence
parallel x was kept in parts: it is gathered beside the GEMM of dx, unless the sink defers the weight gradient; then
the sink keeps the part and gathers in W. Where the plan has memory for it, F keeps x as it was gathered for the
product, and nothing is gathered a second time (`WeightGradSink.keeps_gathered`).
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megatron.core.protocols import WeightGradSink
from megatron.core.tensor_parallel.mappings import (
    ALONE,
    SequenceShard,
    TensorParallel,
    gather_sequence,
    start_sum,
    sum_ranks,
)


class Activation(Protocol):
    """An elementwise function whose input, not output, is kept for the backward pass."""

    def forward(self, x: Tensor) -> Tensor: ...

    def backward(self, x: Tensor, dy: Tensor) -> Tensor:
        """Gradient at x of dy at the output; may overwrite dy."""
        ...


class _Route(NamedTuple):
    """Where a product's weight gradients go, and the ranks that it is shared with."""

    sink: WeightGradSink
    key: str
    bias_key: str | None
    tp: TensorParallel
    activation: Activation | None = None


class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, route: _Route) -> Tensor:
        whole = gather_sequence(x, route.tp)
        ctx.in_parts = route.tp.sequence_parallel and not route.sink.keeps_gathered
        ctx.save_for_backward(x if ctx.in_parts else whole, weight)
        ctx.route = route
        return F.linear(whole, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None]:
        (dy,), route = grads, ctx.route
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        operand: Tensor | SequenceShard = x
        if ctx.in_parts and needs_weight:
            operand = SequenceShard(x, route.tp)
            if not route.sink.deferring:
                operand.start()
        dx = pending = None
        if needs_x:
            dx, pending = start_sum(linear_dgrad(dy, weight), route.tp)
        if needs_weight:
            route.sink.put(route.key, operand, dy)
        if route.bias_key is not None and needs_bias:
            route.sink.put(route.bias_key, None, dy)
        if pending is not None:
            pending.wait()
        return dx, None, None, None


class _RowLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, route: _Route) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.route = route
        active = x if route.activation is None else route.activation.forward(x)
        if route.tp.size == 1:
            return F.linear(active, weight, bias)
        total = sum_ranks(F.linear(active, weight), route.tp)
        return total if bias is None else total.add_(bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None]:
        route, activation = ctx.route, ctx.route.activation
        dy = gather_sequence(grads[0], route.tp)
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        dx = linear_dgrad(dy, weight) if needs_x else None
        if needs_weight:
            route.sink.put(route.key, x if activation is None else activation.forward(x), dy)
        if route.bias_key is not None and needs_bias:
            route.sink.put(route.bias_key, None, dy)
        if dx is not None and activation is not None:
            dx = activation.backward(x, dx)
        return dx, None, None, None


def linear_dgrad(dy: Tensor, weight: Tensor) -> Tensor:
    """Gradient at the input of a linear layer: dy [..., out], weight [out, in] -> [..., in]."""
    return dy.matmul(weight)


def column_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    sink: WeightGradSink,
    key: str,
    bias_key: str | None = None,
    tp: TensorParallel = ALONE,
) -> Tensor:
    """x W^T + b over this rank's output features: x [s, ..., in], weight [out/tp, in] -> [s, ..., out/tp].

    Under sequence parallel x is [s/tp, ..., in]. Communicates over tp: gathers x (sequence parallel only), and
    in the backward pass adds the input's gradient.
    """
    out: Tensor = _ColumnLinear.apply(x, weight, bias, _Route(sink, key, bias_key, tp))
    return out


def row_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    sink: WeightGradSink,
    key: str,
    bias_key: str | None = None,
    activation: Activation | None = None,
    tp: TensorParallel = ALONE,
) -> Tensor:
    """activation(x) W^T + b over this rank's input features: x [s, ..., in/tp], weight [out, in/tp] -> [s, ..., out].

    Under sequence parallel the result is [s/tp, ..., out]. Communicates over tp: adds the products of all ranks
    before the bias, and in the backward pass gathers dy (sequence parallel only), so that every rank has the whole
    gradient of the bias. With an activation only its input is kept; the output is computed again for the weight
    gradient (less than 1 % of the layer's time, a quarter of its memory).
    """
    out: Tensor = _RowLinear.apply(x, weight, bias, _Route(sink, key, bias_key, tp, activation))
    return out
