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

from typing import Any, Protocol

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


class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        sink: WeightGradSink,
        key: str,
        bias_key: str | None,
        tp: TensorParallel,
    ) -> Tensor:
        whole = gather_sequence(x, tp)
        ctx.in_parts = tp.sequence_parallel and not sink.keeps_gathered
        ctx.save_for_backward(x if ctx.in_parts else whole, weight)
        ctx.sink, ctx.key, ctx.bias_key, ctx.tp = sink, key, bias_key, tp
        return F.linear(whole, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        operand: Tensor | SequenceShard = x
        if ctx.in_parts and needs_weight:
            operand = SequenceShard(x, ctx.tp)
            if not ctx.sink.deferring:
                operand.start()
        dx = pending = None
        if needs_x:
            dx, pending = start_sum(linear_dgrad(dy, weight), ctx.tp)
        if needs_weight:
            ctx.sink.put(ctx.key, operand, dy)
        if ctx.bias_key is not None and needs_bias:
            ctx.sink.put(ctx.bias_key, None, dy)
        if pending is not None:
            pending.wait()
        return dx, None, None, None, None, None, None


class _RowLinear(torch.autograd.Function):
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
        tp: TensorParallel,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sink, ctx.key, ctx.bias_key = sink, key, bias_key
        ctx.activation, ctx.tp = activation, tp
        active = x if activation is None else activation.forward(x)
        if tp.size == 1:
            return F.linear(active, weight, bias)
        total = sum_ranks(F.linear(active, weight), tp)
        return total if bias is None else total.add_(bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dy = gather_sequence(grads[0], ctx.tp)
        x, weight = ctx.saved_tensors
        activation = ctx.activation
        dx = linear_dgrad(dy, weight) if ctx.needs_input_grad[0] else None
        if ctx.needs_input_grad[1]:
            ctx.sink.put(ctx.key, x if activation is None else activation.forward(x), dy)
        if ctx.bias_key is not None and ctx.needs_input_grad[2]:
            ctx.sink.put(ctx.bias_key, None, dy)
        if dx is not None and activation is not None:
            dx = activation.backward(x, dx)
        return dx, None, None, None, None, None, None, None


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
    out: Tensor = _ColumnLinear.apply(x, weight, bias, sink, key, bias_key, tp)
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
    out: Tensor = _RowLinear.apply(x, weight, bias, sink, key, bias_key, activation, tp)
    return out
