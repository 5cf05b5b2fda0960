"""LayerNorm and RMSNorm on the sink."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.param_meta import InitKind
from megatron.core.tensor_parallel.sink_module import LayerFactory, SinkModule, whole_region
from megatron.core.transformer.transformer_config import TransformerConfig

_layer_norm_backward = torch.ops.aten.native_layer_norm_backward


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, norm: Norm) -> Tensor:
        gamma = norm.factor(weight, x.dtype)
        y, mean, rstd = torch.native_layer_norm(x, weight.shape, gamma, bias.to(x.dtype), norm.eps)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.norm = norm
        return y.to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None]:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        norm, dy = ctx.norm, grads[0].to(x.dtype)
        gamma, beta, needed = norm.factor(weight, x.dtype), bias.to(x.dtype), list(ctx.needs_input_grad[:3])
        dx, dgamma, dbeta = _layer_norm_backward(dy, x, weight.shape, mean, rstd, gamma, beta, needed)
        _, needs_weight, needs_bias = needed
        if needs_weight:
            norm.sink.put(norm.key("weight"), None, dgamma)
        if needs_bias:
            norm.sink.put(norm.key("bias"), None, dbeta)
        return dx, None, None, None


class _RMSNorm(torch.autograd.Function):
    """Computed in fp32 (fp64 for fp64); keeps its input and one number a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, norm: Norm) -> Tensor:
        work = torch.promote_types(x.dtype, torch.float32)
        wide = x.to(work)
        squares = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_()
        rstd = squares.div_(x.shape[-1]).add_(norm.eps).rsqrt_()
        ctx.save_for_backward(x, weight, rstd)
        ctx.norm = norm
        return (wide * rstd).mul_(norm.factor(weight, work)).to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None]:
        x, weight, rstd = ctx.saved_tensors
        norm, dy = ctx.norm, grads[0].to(rstd.dtype)
        unit = x.to(rstd.dtype) * rstd
        if ctx.needs_input_grad[1]:
            norm.sink.put(norm.key("weight"), None, (dy * unit).flatten(0, -2).sum(0))
        dx = None
        if ctx.needs_input_grad[0]:
            dunit = dy * norm.factor(weight, rstd.dtype)
            along = (dunit * unit).mean(-1, keepdim=True)
            dx = dunit.sub_(unit.mul_(along)).mul_(rstd).to(x.dtype)
        return dx, None, None


class Norm(SinkModule):
    """LayerNorm (weight and bias) or RMSNorm (weight) over the last dim; [..., size] -> [..., size].

    With `apply_layernorm_1p` the stored weight is the factor minus one. The input may be wider than the
    weights (an fp32 residual stream); the output has the weights' dtype.

    Every tensor parallel rank holds all of it. over_heads: it norms attention heads, of which each rank has its
    own; else the residual stream, of which each rank has its own tokens under sequence parallel only. Where ranks
    see different rows, each has a part of the gradient.

    Sources: LayerNorm (arXiv 1607.06450), RMSNorm (arXiv 1910.07467).
    """

    def __init__(
        self, config: TransformerConfig, size: int, factory: LayerFactory, *, over_heads: bool = False
    ) -> None:
        super().__init__(factory)
        partial = self.tp.size > 1 if over_heads else self.tp.sequence_parallel
        regions = whole_region((size,), self.tp, partial=partial)
        self.eps, self.less_one = config.norm_epsilon, config.apply_layernorm_1p
        ones = InitKind.ZEROS if self.less_one else InitKind.ONES
        self.weight = self.new_parameter("weight", (size,), ones, regions)
        self.bias: nn.Parameter | None = None
        if config.normalization == "LayerNorm":
            self.bias = self.new_parameter("bias", (size,), InitKind.ZEROS, regions)

    def factor(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """The factor [size] that a stored weight stands for."""
        weight = weight.to(dtype)
        return weight + 1.0 if self.less_one else weight

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return _RMSNorm.apply(x, self.weight, self)
        return _LayerNorm.apply(x, self.weight, self.bias, self)
