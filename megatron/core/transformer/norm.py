"""LayerNorm and RMSNorm on the sink."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.param_meta import InitKind
from megatron.core.protocols import WeightGradSink
from megatron.core.tensor_parallel.shards import whole_region
from megatron.core.tensor_parallel.sink_module import LayerFactory, SinkModule
from megatron.core.transformer.transformer_config import TransformerConfig

_layer_norm_backward = torch.ops.aten.native_layer_norm_backward


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        eps: float,
        offset: float,
        sink: WeightGradSink,
        key: str,
    ) -> Tensor:
        gamma = _effective(weight, offset, x.dtype)
        y, mean, rstd = torch.native_layer_norm(x, weight.shape, gamma, bias.to(x.dtype), eps)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.offset, ctx.sink, ctx.key = offset, sink, key
        return y.to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        gamma = _effective(weight, ctx.offset, x.dtype)
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dx, dgamma, dbeta = _layer_norm_backward(
            grads[0].to(x.dtype),
            x,
            weight.shape,
            mean,
            rstd,
            gamma,
            bias.to(x.dtype),
            [needs_x, needs_weight, needs_bias],
        )
        if needs_weight:
            ctx.sink.put(f"{ctx.key}.weight", None, dgamma)
        if needs_bias:
            ctx.sink.put(f"{ctx.key}.bias", None, dbeta)
        return dx, None, None, None, None, None, None


class _RMSNorm(torch.autograd.Function):
    """Computed in fp32 (fp64 for fp64); keeps its input and one number a row."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float, sink: WeightGradSink, key: str
    ) -> Tensor:
        work = torch.promote_types(x.dtype, torch.float32)
        wide = x.to(work)
        rstd = (
            torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
            .square_()
            .div_(x.shape[-1])
            .add_(eps)
            .rsqrt_()
        )
        ctx.save_for_backward(x, weight, rstd)
        ctx.offset, ctx.sink, ctx.key = offset, sink, key
        return (wide * rstd).mul_(_effective(weight, offset, work)).to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        dy = grads[0].to(rstd.dtype)
        unit = x.to(rstd.dtype) * rstd
        if ctx.needs_input_grad[1]:
            ctx.sink.put(f"{ctx.key}.weight", None, (dy * unit).flatten(0, -2).sum(0))
        dx = None
        if ctx.needs_input_grad[0]:
            dunit = dy * _effective(weight, ctx.offset, rstd.dtype)
            along = (dunit * unit).mean(-1, keepdim=True)
            dx = dunit.sub_(unit.mul_(along)).mul_(rstd).to(x.dtype)
        return dx, None, None, None, None, None


def _effective(weight: Tensor, offset: float, dtype: torch.dtype) -> Tensor:
    """The factor that a stored weight stands for."""
    weight = weight.to(dtype)
    return weight + offset if offset else weight


class Norm(SinkModule):
    """LayerNorm (weight and bias) or RMSNorm (weight) over the last dim; [..., size] -> [..., size].

    With `apply_layernorm_1p` the stored weight is the factor minus one. The input may be wider than the
    weights (an fp32 residual stream); the output has the weights' dtype.

    Every tensor parallel rank holds all of it. over_heads: it norms attention heads, of which each rank has its
    own; else the residual stream, of which each rank has its own tokens under sequence parallel only. Where ranks
    see different rows, each has a part of the gradient.
    """

    def __init__(
        self,
        config: TransformerConfig,
        size: int,
        *,
        name: str,
        factory: LayerFactory,
        over_heads: bool = False,
    ) -> None:
        super().__init__(name, factory)
        partial = self.tp.size > 1 if over_heads else self.tp.sequence_parallel
        regions = whole_region((size,), self.tp, partial=partial)
        self.eps = config.norm_epsilon
        self.offset = 1.0 if config.apply_layernorm_1p else 0.0
        self.weight = self.new_parameter(
            "weight",
            (size,),
            regions=regions,
            init=InitKind.ZEROS if config.apply_layernorm_1p else InitKind.ONES,
        )
        self.bias: nn.Parameter | None = None
        if config.normalization == "LayerNorm":
            self.bias = self.new_parameter("bias", (size,), regions=regions, init=InitKind.ZEROS)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor
        if self.bias is None:
            y = _RMSNorm.apply(x, self.weight, self.eps, self.offset, self.sink, self.name)
        else:
            y = _LayerNorm.apply(x, self.weight, self.bias, self.eps, self.offset, self.sink, self.name)
        return y
