"""The two halves of a decoder layer, x + attention(norm(x)) and x + mlp(norm(x)), as few autograd Functions.

[Note: a half is two lists] Where kernels are short, a layer's time is that of the Python and of the nodes of autograd
between them. So each Function below is a long one: its forward and its backward are lists of the same calls that the
modules alone make (`parallel_layers`, `norm`, `random`), in the same order, and so with the same bits. Weight gradients
go to the sink as ever ([Note: B and W]). Attention proper is left to autograd, between a Function that leads into it
and one that leads out of it: any other middle fits there (docs/model.md).

[Note: parts as built] The lists call no module. A half with a part that was replaced, or whose calls somebody listens
to, runs its modules instead (`decoder.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from megatron.core.tensor_parallel.parallel_layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    column_backward,
    column_forward,
    row_backward,
    row_forward,
)
from megatron.core.tensor_parallel.random import DropoutSite, drop, drop_others
from megatron.core.transformer.feed_forward import MLP
from megatron.core.transformer.norm import Norm, in_dtype
from megatron.core.transformer.self_attention import (
    Angles,
    InferenceCache,
    SelfAttention,
    by_head,
    joined_heads,
)


class _IntoAttention(torch.autograd.Function):
    """norm, QKV, heads: x [s/tp, b, h] -> query [b, heads, s, d], key and value [b, groups, s, d]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor | None, half: AttentionHalf
    ) -> tuple[Tensor, Tensor, Tensor]:
        gamma, beta, weight, bias = *_parameters(half.norm), *_parameters(half.qkv)
        y, mean, rstd = half.norm.normalise(x, gamma, beta)
        rows, kept = column_forward(y, weight, bias, half.qkv.route)  # [s, b, (heads + 2 groups) d]
        ctx.save_for_backward(x, gamma, beta, mean, rstd, kept, weight)
        ctx.half, ctx.trained = half, _trained(gamma, beta, weight, bias)
        return half.attention.heads_of(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None]:
        x, gamma, beta, mean, rstd, kept, weight = ctx.saved_tensors
        half, of_norm, of_qkv = ctx.half, ctx.trained[:2], ctx.trained[2:]
        needs_x = ctx.needs_input_grad[0]
        d = half.attention.rows_of(*grads)  # [s, b, (heads + 2 groups) d]
        d = column_backward(
            d, kept, weight, half.qkv.route, (needs_x or any(of_norm), *of_qkv)
        )  # [s/tp, b, h]
        if d is not None:
            d = half.norm.backward(d, x, gamma, beta, mean, rstd, (needs_x, *of_norm))
        return d, None, None


class _OutOfAttention(torch.autograd.Function):
    """Projection, dropout, residual: attended [b, heads, s, d] and x [s/tp, b, h] -> [s/tp, b, h]."""

    @staticmethod
    def forward(
        ctx: Any, attended: Tensor, x: Tensor, anchor: Tensor | None, half: AttentionHalf, dropout: float
    ) -> Tensor:
        weight, bias = _parameters(half.proj)
        flat = joined_heads(attended)  # [s, b, heads d]
        out, keep = drop(row_forward(flat, weight, bias, half.proj.route), dropout, half.site)  # [s/tp, b, h]
        ctx.save_for_backward(flat, weight, keep)
        ctx.half, ctx.trained = half, _trained(weight, bias)
        ctx.dropout, ctx.head_dim = dropout, attended.shape[3]
        return x + out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor, None, None, None]:
        (dy,), (flat, weight, keep) = grads, ctx.saved_tensors
        d = drop_others(in_dtype(dy, weight.dtype), keep, ctx.dropout)  # [s/tp, b, h]
        needs = ctx.needs_input_grad[0], *ctx.trained
        d = row_backward(d, flat, weight, ctx.half.proj.route, needs)  # [s, b, heads d]
        if d is not None:
            d = by_head(d.unflatten(2, (-1, ctx.head_dim)))  # [b, heads, s, d]
        return d, dy, None, None, None


class _Mlp(torch.autograd.Function):
    """norm, MLP, dropout, residual: x [s/tp, b, h] -> [s/tp, b, h]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor | None, half: MlpHalf, dropout: float) -> Tensor:
        gamma, beta = _parameters(half.norm)
        (weight1, bias1), (weight2, bias2) = _parameters(half.fc1), _parameters(half.fc2)
        y, mean, rstd = half.norm.normalise(x, gamma, beta)
        wide, kept = column_forward(y, weight1, bias1, half.fc1.route)  # [s, b, f/tp], gated 2 f/tp
        out = row_forward(half.mlp.activation.forward(wide), weight2, bias2, half.fc2.route)  # [s/tp, b, h]
        out, keep = drop(out, dropout, half.site)
        ctx.save_for_backward(x, gamma, beta, mean, rstd, kept, weight1, wide, weight2, keep)
        ctx.half, ctx.dropout = half, dropout
        ctx.trained = _trained(gamma, beta, weight1, bias1, weight2, bias2)
        return x + out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None]:
        x, gamma, beta, mean, rstd, kept, weight1, wide, weight2, keep = ctx.saved_tensors
        (dy,), half, trained = grads, ctx.half, ctx.trained
        needs_x = ctx.needs_input_grad[0]
        needs_y = needs_x or any(trained[:2])
        needs_wide = needs_y or any(trained[2:4])
        d = drop_others(in_dtype(dy, weight2.dtype), keep, ctx.dropout)  # [s/tp, b, h]
        d = row_backward(d, wide, weight2, half.fc2.route, (needs_wide, *trained[4:]), half.mlp.activation)
        if d is not None:  # [s, b, f/tp], gated 2 f/tp
            d = column_backward(d, kept, weight1, half.fc1.route, (needs_y, *trained[2:4]))  # [s/tp, b, h]
        if d is not None:
            d = half.norm.backward(d, x, gamma, beta, mean, rstd, (needs_x, *trained[:2]))
        return d.add_(in_dtype(dy, d.dtype)) if needs_x else None, None, None, None


class _Half:
    """What the lists of a half read of its modules, in one place.

    parts: (a module, the name of a child that it was built with), all modules whose calls the lists leave out. site:
    where the half's output is dropped.
    """

    def __init__(self, norm: Norm, site: DropoutSite, parts: Sequence[tuple[nn.Module, str]]) -> None:
        self.norm, self.site = norm, site
        children = [(owner, name, owner.get_submodule(name)) for owner, name in parts]
        self._parts = [(owner, name, part, type(part)) for owner, name, part in children]
        self._hooks = [
            hooks
            for _, _, part in children
            for hooks in (
                part._forward_hooks,
                part._forward_pre_hooks,
                part._backward_hooks,
                part._backward_pre_hooks,
            )
        ]

    @property
    def as_built(self) -> bool:
        """See [Note: parts as built]."""
        if any(self._hooks) or _has_any_global_hook():
            return False
        for owner, name, part, kind in self._parts:
            if owner._modules[name] is not part or part.__class__ is not kind:
                return False
            if "forward" in part.__dict__ or part._compiled_call_impl is not None:
                return False
        return True


class AttentionHalf(_Half):
    """x + attention(norm(x)): [s, b, h] -> [s, b, h] (sequence parallel: [s/tp, b, h]). Communicates over tp."""

    def __init__(self, layer: nn.Module, norm: Norm, attention: SelfAttention, site: DropoutSite) -> None:
        of_attention = ("linear_qkv", "core_attention", "linear_proj")
        parts = [
            (layer, "input_layernorm"),
            (layer, "self_attention"),
            *((attention, of) for of in of_attention),
        ]
        super().__init__(norm, site, parts)
        self.attention, self.qkv, self.proj = attention, attention.linear_qkv, attention.linear_proj

    def __call__(
        self,
        x: Tensor,
        mask: Tensor | None,
        angles: Angles | None,
        cache: InferenceCache | None,
        dropout: float,
    ) -> Tensor:
        heads = _IntoAttention.apply(x, _anchor(x, self.norm, self.qkv), self)
        attended = self.attention.attend(*heads, mask, angles, cache)  # [b, heads, s, d]
        return _OutOfAttention.apply(attended, x, _anchor(attended, self.proj), self, dropout)


class MlpHalf(_Half):
    """x + mlp(norm(x)): [s, b, h] -> [s, b, h] (sequence parallel: [s/tp, b, h]). Communicates over tp."""

    def __init__(self, layer: nn.Module, norm: Norm, mlp: MLP, site: DropoutSite) -> None:
        parts = [(layer, "pre_mlp_layernorm"), (layer, "mlp"), (mlp, "linear_fc1"), (mlp, "linear_fc2")]
        super().__init__(norm, site, parts)
        self.mlp, self.fc1, self.fc2 = mlp, mlp.linear_fc1, mlp.linear_fc2

    def __call__(self, x: Tensor, dropout: float) -> Tensor:
        return _Mlp.apply(x, _anchor(x, self.norm, self.fc1, self.fc2), self, dropout)


_WithParameters = Norm | ColumnParallelLinear | RowParallelLinear


def _parameters(module: _WithParameters) -> tuple[Tensor, Tensor | None]:
    """Weight and bias; `module.weight` would look in three other places first."""
    held = module._parameters
    weight = held["weight"]
    assert weight is not None
    return weight, held.get("bias")


def _trained(*parameters: Tensor | None) -> list[bool]:
    """Of which of them the gradient is asked for."""
    return [one is not None and one.requires_grad for one in parameters]


def _anchor(x: Tensor, *modules: _WithParameters) -> Tensor | None:
    """A parameter that hangs a Function into the graph where its input does not. Others are no inputs of it: autograd
    would go to each of them with nothing in its hands."""
    if x.requires_grad or not torch.is_grad_enabled():
        return None
    return next((one for module in modules for one in module.parameters() if one.requires_grad), None)
