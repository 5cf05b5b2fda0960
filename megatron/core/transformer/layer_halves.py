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

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from megatron.core.tensor_parallel.mappings import gather_sequence
from megatron.core.tensor_parallel.parallel_layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    column_dgrad,
    column_forward,
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
from megatron.core.weight_grad import put_linear


class _IntoAttention(torch.autograd.Function):
    """norm, QKV, heads: x [s/tp, b, h] -> query [b, heads, s, d], key and value [b, groups, s, d]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor | None, half: AttentionHalf
    ) -> tuple[Tensor, Tensor, Tensor]:
        gamma, beta, weight, bias = *_parameters(half.norm), *_parameters(half.qkv)
        tokens = x.flatten(0, 1)  # [s/tp b, h]
        y, mean, rstd = half.norm.normalise(tokens, gamma, beta)
        rows, kept = column_forward(y, weight, bias, half.qkv.route)  # [s b, (heads + 2 groups) d]
        ctx.save_for_backward(tokens, gamma, beta, mean, rstd, kept, weight)
        ctx.half, ctx.trained = half, _trained(gamma, beta, weight, bias)
        return half.attention.heads_of(rows, x.shape[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (tokens, gamma, beta, mean, rstd, kept, weight), half = ctx.saved_tensors, ctx.half
        d = half.attention.rows_of(*grads)  # [s b, (heads + 2 groups) d]
        dy, pending, y = column_dgrad(d, kept, weight, half.qkv.route)  # [s/tp b, h]
        put_linear(half.qkv.route, y, d, ctx.trained[2:])
        if pending is not None:
            pending.wait()
        d = half.norm.backward(dy, tokens, gamma, beta, mean, rstd, ctx.trained[:2])
        return d.unflatten(0, (-1, len(grads[0]))), None, None  # [s/tp, b, h]


class _OutOfAttention(torch.autograd.Function):
    """Projection, dropout, residual: attended [b, heads, s, d] and x [s/tp, b, h] -> [s/tp, b, h]."""

    @staticmethod
    def forward(
        ctx: Any, attended: Tensor, x: Tensor, anchor: Tensor | None, half: AttentionHalf, dropout: float
    ) -> Tensor:
        weight, bias = _parameters(half.proj)
        flat = joined_heads(attended).flatten(0, 1)  # [s b, heads d]
        out = row_forward(flat, weight, bias, half.proj.route).view(x.shape)  # [s/tp, b, h]
        out, keep = drop(out, dropout, half.site)
        ctx.save_for_backward(flat, weight, keep)
        ctx.half, ctx.dropout, ctx.trained = half, dropout, _trained(weight, bias)
        return x + out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        (dy,), (flat, weight, keep), half = grads, ctx.saved_tensors, ctx.half
        d = drop_others(in_dtype(dy, weight.dtype), keep, ctx.dropout).flatten(0, 1)  # [s/tp b, h]
        d = gather_sequence(d, half.proj.route.tp)  # [s b, h]
        dflat = d.matmul(weight)  # [s b, heads d]
        put_linear(half.proj.route, flat, d, ctx.trained)
        d = dflat.view(-1, dy.shape[1], flat.shape[1] // half.head_dim, half.head_dim)
        return by_head(d), dy, None, None, None  # [b, heads, s, d]


class _Mlp(torch.autograd.Function):
    """norm, MLP, dropout, residual: x [s/tp, b, h] -> [s/tp, b, h]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor | None, half: MlpHalf, dropout: float) -> Tensor:
        gamma, beta = _parameters(half.norm)
        (weight1, bias1), (weight2, bias2) = _parameters(half.fc1), _parameters(half.fc2)
        tokens = x.flatten(0, 1)  # [s/tp b, h]
        y, mean, rstd = half.norm.normalise(tokens, gamma, beta)
        wide, kept = column_forward(y, weight1, bias1, half.fc1.route)  # [s b, f/tp], gated 2 f/tp
        out = row_forward(half.mlp.activation.forward(wide), weight2, bias2, half.fc2.route)  # [s/tp b, h]
        out, keep = drop(out.view(x.shape), dropout, half.site)  # [s/tp, b, h]
        ctx.save_for_backward(tokens, gamma, beta, mean, rstd, kept, weight1, wide, weight2, keep)
        ctx.half, ctx.dropout = half, dropout
        ctx.trained = _trained(gamma, beta, weight1, bias1, weight2, bias2)
        return x + out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        tokens, gamma, beta, mean, rstd, kept, weight1, wide, weight2, keep = ctx.saved_tensors
        (dy,), half, trained = grads, ctx.half, ctx.trained
        d = drop_others(in_dtype(dy, weight2.dtype), keep, ctx.dropout).flatten(0, 1)  # [s/tp b, h]
        d = gather_sequence(d, half.fc2.route.tp)  # [s b, h]
        dwide = d.matmul(weight2)  # [s b, f/tp]
        put_linear(half.fc2.route, half.mlp.activation.forward(wide), d, trained[4:])
        d = half.mlp.activation.backward(wide, dwide)  # gated [s b, 2 f/tp]
        del dwide
        dnorm, pending, y = column_dgrad(d, kept, weight1, half.fc1.route)  # [s/tp b, h]
        put_linear(half.fc1.route, y, d, trained[2:4])
        if pending is not None:
            pending.wait()
        d = half.norm.backward(dnorm, tokens, gamma, beta, mean, rstd, trained[:2])
        return d.view(dy.shape).add_(in_dtype(dy, d.dtype)), None, None, None


class AttentionHalf:
    """x + attention(norm(x)): [s, b, h] -> [s, b, h] (sequence parallel: [s/tp, b, h]). Communicates over tp."""

    def __init__(self, norm: Norm, attention: SelfAttention, site: DropoutSite) -> None:
        self.norm, self.attention, self.site = norm, attention, site
        self.qkv, self.proj, self.head_dim = attention.linear_qkv, attention.linear_proj, attention.head_dim

    def __call__(
        self,
        x: Tensor,
        mask: Tensor | None,
        angles: Angles | None,
        cache: InferenceCache | None,
        dropout: float,
    ) -> Tensor:
        """dropout: the probability."""
        query, key, value = _IntoAttention.apply(x, _anchor(x, self.norm, self.qkv), self)
        attended = self.attention.attend(query, key, value, mask, angles, cache)  # [b, heads, s, d]
        return _OutOfAttention.apply(attended, x, _anchor(attended, self.proj), self, dropout)


class MlpHalf:
    """x + mlp(norm(x)): [s, b, h] -> [s, b, h] (sequence parallel: [s/tp, b, h]). Communicates over tp."""

    def __init__(self, norm: Norm, mlp: MLP, site: DropoutSite) -> None:
        self.norm, self.mlp, self.site = norm, mlp, site
        self.fc1, self.fc2 = mlp.linear_fc1, mlp.linear_fc2

    def __call__(self, x: Tensor, dropout: float) -> Tensor:
        """dropout: the probability."""
        return _Mlp.apply(x, _anchor(x, self.norm, self.fc1, self.fc2), self, dropout)


class AsBuilt:
    """Whether the modules below one are still those that it was built with, and nobody listens to their calls."""

    def __init__(self, module: nn.Module) -> None:
        children = [(owner, *child) for owner in module.modules() for child in owner.named_children()]
        self._places = [(owner, name) for owner, name, _ in children]
        self._parts = parts = [part for _, _, part in children]
        self._kinds = [type(part) for part in parts]
        self._hooks = [
            *(part._forward_pre_hooks for part in parts),
            *(part._forward_hooks for part in parts),
            *(part._backward_pre_hooks for part in parts),
            *(part._backward_hooks for part in parts),
        ]

    def __bool__(self) -> bool:
        return not (
            any(self._hooks)
            or _has_any_global_hook()
            or [owner._modules[name] for owner, name in self._places] != self._parts
            or [part.__class__ for part in self._parts] != self._kinds
            or any(part._compiled_call_impl or "forward" in part.__dict__ for part in self._parts)
        )


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
