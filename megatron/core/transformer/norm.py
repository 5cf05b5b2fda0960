"""LayerNorm and RMSNorm on the sink."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron.core.param_meta import InitKind
from megatron.core.tensor_parallel.functions import Kept, apply, direct
from megatron.core.tensor_parallel.sink_module import LayerFactory, SinkModule, whole_region
from megatron.core.transformer.model_config import TransformerConfig

_layer_norm_backward = direct(torch.ops.aten.native_layer_norm_backward.default)


def in_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in this dtype; asking first is cheaper than a cast that does nothing."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


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
        self.weight_key, self.bias_key = self.key("weight"), self.key("bias")
        self.shape = (size,)
        self.eps, self.less_one = config.norm_epsilon, config.apply_layernorm_1p
        ones = InitKind.ZEROS if self.less_one else InitKind.ONES
        self.weight = self.new_parameter("weight", (size,), ones, regions)
        self.bias: nn.Parameter | None = None
        if config.normalization == "LayerNorm":
            self.bias = self.new_parameter("bias", (size,), InitKind.ZEROS, regions)

    def factor(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """The factor [size] that a stored weight stands for."""
        weight = in_dtype(weight, dtype)
        return weight + 1.0 if self.less_one else weight

    def _factors(self, weight: Tensor, bias: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Those of LayerNorm, in the dtype of what is normed."""
        if weight.dtype == dtype and not self.less_one:
            return weight, bias
        return self.factor(weight, dtype), in_dtype(bias, dtype)

    def forward(self, x: Tensor) -> Tensor:
        parameters = self.weight, self.bias
        return apply(_Norm(self, *parameters), x, parameters=parameters)

    # --- without autograd, for the lists of a layer's halves

    def normalise(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Kept]:
        """(y [..., size] in the weights' dtype; kept: x, weight, bias, mean and 1 / deviation [..., 1]). RMSNorm,
        which computes in fp32 (fp64 for fp64), has no mean."""
        if bias is not None:
            gamma, beta = self._factors(weight, bias, x.dtype)
            y, mean, rstd = torch.native_layer_norm(x, self.shape, gamma, beta, self.eps)
            return in_dtype(y, weight.dtype), (x, weight, bias, mean, rstd)
        work = torch.promote_types(x.dtype, torch.float32)
        wide = in_dtype(x, work)
        squares = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_()
        rstd = squares.div_(x.shape[-1]).add_(self.eps).rsqrt_()
        y = in_dtype((wide * rstd).mul_(self.factor(weight, work)), weight.dtype)
        return y, (x, weight, None, None, rstd)

    def again(self, kept: Kept) -> Tensor:
        """y, computed from what `normalise` kept."""
        return self.normalise(*kept[:3])[0]

    def backward(self, kept: Kept, dy: Tensor) -> Tensor:
        """dx in memory of its own, of x's dtype. The gradients of weight and bias go to the sink."""
        x, weight, bias, mean, rstd = kept
        if bias is None:
            return self._rms_backward(in_dtype(dy, rstd.dtype), x, weight, rstd)
        gamma, beta = self._factors(weight, bias, x.dtype)
        trained = weight.requires_grad, bias.requires_grad
        dx, dgamma, dbeta = _layer_norm_backward(
            in_dtype(dy, x.dtype), x, self.shape, mean, rstd, gamma, beta, (True, *trained)
        )
        if trained[0]:
            self.sink.put(self.weight_key, None, dgamma)
        if trained[1]:
            self.sink.put(self.bias_key, None, dbeta)
        assert isinstance(dx, Tensor)
        return dx

    def _rms_backward(self, dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> Tensor:
        unit = in_dtype(x, rstd.dtype) * rstd
        if weight.requires_grad:
            self.sink.put(self.weight_key, None, (dy * unit).flatten(0, -2).sum(0))
        dunit = dy * self.factor(weight, rstd.dtype)
        along = (dunit * unit).mean(-1, keepdim=True)
        return in_dtype(dunit.sub_(unit.mul_(along)).mul_(rstd), x.dtype)


class _Norm(NamedTuple):
    """A `GradFunction` of x."""

    norm: Norm
    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> tuple[Tensor, Kept]:
        return self.norm.normalise(x, self.weight, self.bias)

    def backward(self, kept: Kept, dy: Tensor) -> tuple[Tensor]:
        return (self.norm.backward(kept, dy),)


def norm_again(y: Tensor) -> Callable[[], Tensor] | None:
    """What computes y once more, where y is what a norm has just given; None otherwise (somebody's hook has changed it,
    or nothing asks for a gradient). It has copies of the norm's weights, which may be gone by then."""
    node: Any = y.grad_fn
    function = getattr(node, "function", None)
    if not isinstance(function, _Norm):
        return None
    x, *parameters = node.saved_tensors[:3]
    kept = x, *(one if one is None else one.detach().clone() for one in parameters)
    return lambda: function.norm.again(kept)
