"""A decoder layer, x + attention(norm(x)), then x + mlp(norm(x)), as few autograd Functions.

[Note: a layer is lists] Where kernels are short, a layer's time is that of the Python and of the nodes of autograd
between them. So its parts below are long: the forward and the backward of each are lists of the same calls that the
modules alone make (`parallel_layers`, `norm`, `random`), in the same order, and so with the same bits. Weight gradients
go to the sink as ever ([Note: B and W]). Where attention proper is torch's kernel for CPUs and nothing else happens to
heads, the whole layer is one Function, whose lists are the parts' own, one after the other. Any other middle is left to
autograd, between a part that leads into it and one that leads out of it (docs/model.md).

[Note: norms again] With `--recompute-modules layernorm` nothing that a norm gives is kept: the backward computes it
once more, of what the norm itself keeps.

[Note: parts as built] The lists call no module. A layer with a part that was replaced, or whose calls somebody listens
to, runs its modules instead (`decoder.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from operator import contains, getitem
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from megatron.core.device import product
from megatron.core.tensor_parallel.functions import Kept, apply, direct_apply
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
    joined_heads,
    parted_heads,
)
from megatron.core.weight_grad import put_linear


class _LayerNode(torch.autograd.Function):
    """Around a part, which sees the residual stream and its gradient as tokens [s/tp b, h]; heads as they are."""

    @staticmethod
    def forward(ctx: Any, part: Part, anchor: Tensor | None, x: Tensor, *inputs: Any) -> Any:
        ctx.part, ctx.batch = part, x.shape[1]
        outputs, kept = part.forward(x.flatten(0, 1), ctx.batch, *inputs)
        ctx.save_for_backward(*kept)
        return outputs.view_as(x) if isinstance(outputs, Tensor) else outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if len(grads) == 1:
            grads = (grads[0].flatten(0, 1),)
        # From a weight's gradient, this is one file from the sink.
        dx, *others = ctx.part.backward(ctx.saved_tensors, ctx.batch, *grads)
        return None, None, dx.view(-1, ctx.batch, dx.shape[1]), *others


_new_layer_node = direct_apply(_LayerNode)


class IntoAttention:
    """norm, QKV, heads: x [s/tp b, h] -> query [b, heads, s, d], key and value [b, groups, s, d]. norm_again: see
    [Note: norms again]."""

    def __init__(self, norm: Norm, attention: SelfAttention, norm_again: bool) -> None:
        self.norm, self.attention, self.qkv = norm, attention, attention.linear_qkv
        self.norm_again, self.modules = norm_again, (norm, self.qkv)

    def forward(self, x: Tensor, batch: int) -> tuple[tuple[Tensor, Tensor, Tensor], Kept]:
        weight, bias = _parameters(self.qkv)
        y, of_norm = self.norm.normalise(x, *_parameters(self.norm))  # [s/tp b, h]
        rows, of_y = column_forward(y, weight, bias, self.qkv.route)  # [s b, (heads + 2 groups) d]
        kept_y = None if self.norm_again else of_y
        return self.attention.heads_of(rows, batch), (*of_norm, kept_y, weight, bias)

    def backward(self, kept: Kept, batch: int, *grads: Tensor) -> tuple[Tensor]:
        *of_norm, of_y, weight, bias = kept
        of_y = self.norm.again(of_norm) if of_y is None else of_y
        d = self.attention.rows_of(*grads)  # [s b, (heads + 2 groups) d]
        dy, pending, y = column_dgrad(d, of_y, weight, self.qkv.route)  # [s/tp b, h]
        put_linear(self.qkv.route, y, d, weight, bias)
        if pending is not None:
            pending.wait()
        return (self.norm.backward(of_norm, dy),)


class OutOfAttention:
    """Projection, dropout, residual: x [s/tp b, h] and attended [b, heads, s, d] -> [s/tp b, h]."""

    def __init__(self, attention: SelfAttention, site: DropoutSite, dropout: float) -> None:
        self.proj, self.head_dim = attention.linear_proj, attention.head_dim
        self.site, self.dropout, self.modules = site, dropout, (self.proj,)

    def forward(self, x: Tensor, batch: int, attended: Tensor, dropout: float) -> tuple[Tensor, Kept]:
        weight, bias = _parameters(self.proj)
        flat = joined_heads(attended)  # [s b, heads d]
        out, keep = drop(row_forward(flat, weight, bias, self.proj.route), dropout, self.site)  # [s/tp b, h]
        return x + out, (flat, keep, weight, bias)

    def backward(self, kept: Kept, batch: int, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        flat, keep, weight, bias = kept
        d = drop_others(in_dtype(dy, weight.dtype), keep, self.dropout)  # [s/tp b, h]
        d = gather_sequence(d, self.proj.route.tp)  # [s b, h]
        dflat = product(d, weight)  # [s b, heads d]
        put_linear(self.proj.route, flat, d, weight, bias)
        return dy, parted_heads(dflat, batch, self.head_dim), None  # [b, heads, s, d]


class MlpHalf:
    """norm, MLP, dropout, residual: x [s/tp b, h] -> [s/tp b, h]. norm_again: see [Note: norms again]."""

    def __init__(self, norm: Norm, mlp: MLP, site: DropoutSite, dropout: float, norm_again: bool) -> None:
        self.norm, self.fc1, self.fc2 = norm, mlp.linear_fc1, mlp.linear_fc2
        self.activation, self.site, self.dropout = mlp.activation, site, dropout
        self.norm_again = norm_again
        self.modules = (norm, self.fc1, self.fc2)

    def forward(self, x: Tensor, batch: int, dropout: float) -> tuple[Tensor, Kept]:
        linears = (weight1, bias1), (weight2, bias2) = _parameters(self.fc1), _parameters(self.fc2)
        y, of_norm = self.norm.normalise(x, *_parameters(self.norm))  # [s/tp b, h]
        wide, of_y = column_forward(y, weight1, bias1, self.fc1.route)  # [s b, f/tp], gated 2 f/tp
        activated = self.activation.forward(wide)  # [s b, f/tp]
        out = row_forward(activated, weight2, bias2, self.fc2.route)  # [s/tp b, h]
        out, keep = drop(out, dropout, self.site)
        inner = activated if self.activation.keeps_output else None
        kept_y = None if self.norm_again else of_y
        return x + out, (*of_norm, kept_y, wide, inner, keep, *linears[0], *linears[1])

    def backward(self, kept: Kept, batch: int, dy: Tensor) -> tuple[Tensor, None]:
        *of_norm, of_y, wide, inner, keep, weight1, bias1, weight2, bias2 = kept
        of_y = self.norm.again(of_norm) if of_y is None else of_y
        d = drop_others(in_dtype(dy, weight2.dtype), keep, self.dropout)  # [s/tp b, h]
        d = gather_sequence(d, self.fc2.route.tp)  # [s b, h]
        dwide = product(d, weight2)  # [s b, f/tp]
        inner = self.activation.forward(wide) if inner is None else inner  # [s b, f/tp]
        put_linear(self.fc2.route, inner, d, weight2, bias2)
        d = self.activation.backward(wide, dwide)  # gated [s b, 2 f/tp]
        del dwide
        dnorm, pending, y = column_dgrad(d, of_y, weight1, self.fc1.route)  # [s/tp b, h]
        put_linear(self.fc1.route, y, d, weight1, bias1)
        if pending is not None:
            pending.wait()
        d = self.norm.backward(of_norm, dnorm)
        return d.add_(in_dtype(dy, d.dtype)), None


class LayerHalves:
    """The layer: x [s, b, h] -> [s, b, h] (sequence parallel: [s/tp, b, h]). Communicates over tp. mlp: None for the
    first half alone, where the other one is left to its modules."""

    def __init__(self, into: IntoAttention, out_of: OutOfAttention, mlp: MlpHalf | None) -> None:
        self.into, self.out_of, self.mlp = into, out_of, mlp
        self.attention, self.core = into.attention, into.attention.core_attention
        self.modules = (*into.modules, *out_of.modules, *(() if mlp is None else mlp.modules))

    def __call__(
        self,
        x: Tensor,
        mask: Tensor | None,
        angles: Angles | None,
        cache: InferenceCache | None,
        dropout: float,
    ) -> Tensor:
        """dropout: the probability now."""
        if mask is angles is cache is None and self.attention.is_plain and self.core.is_one_kernel(x):
            return _applied(self, x, dropout)
        query, key, value = _applied(self.into, x)
        attended = self.attention.attend(query, key, value, mask, angles, cache)  # [b, heads, s, d]
        x = _applied(self.out_of, x, attended, dropout)
        return x if self.mlp is None else _applied(self.mlp, x, dropout)

    def forward(self, x: Tensor, batch: int, dropout: float) -> tuple[Tensor, Kept]:
        heads, of_into = self.into.forward(x, batch)
        attended, of_core = self.core.kernel_forward(*heads)
        x, of_out = self.out_of.forward(x, batch, attended, dropout)
        x, of_mlp = (x, ()) if self.mlp is None else self.mlp.forward(x, batch, dropout)
        return x, (*of_into, *of_core, *of_out, *of_mlp)

    def backward(self, kept: Kept, batch: int, dy: Tensor) -> tuple[Tensor, None]:
        of_into, of_core, of_out, of_mlp = kept[:8], kept[8:13], kept[13:17], kept[17:]
        if self.mlp is not None:
            dy, _ = self.mlp.backward(of_mlp, batch, dy)
        dy, dattended, _ = self.out_of.backward(of_out, batch, dy)
        (dx,) = self.into.backward(of_into, batch, *self.core.kernel_backward(of_core, dattended))
        return dx.add_(dy), None


Part = IntoAttention | OutOfAttention | MlpHalf | LayerHalves


class AsBuilt:
    """Whether the modules below one are still those that it was built with, and nobody listens to their calls. besides:
    children that may do as they like. Asked at every call, so each question to all of them is one loop in C."""

    def __init__(self, module: nn.Module, besides: Sequence[nn.Module] = ()) -> None:
        free = {id(part) for child in besides for part in child.modules()}
        children = [
            (owner, name, child)
            for owner in module.modules()
            for name, child in owner.named_children()
            if id(child) not in free
        ]
        self._owners = [owner._modules for owner, _, _ in children]
        self._names = [name for _, name, _ in children]
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
            or list(map(getitem, self._owners, self._names)) != self._parts
            or list(map(type, self._parts)) != self._kinds
            or any(map(contains, map(vars, self._parts), repeat("forward")))
            or any(map(contains, map(vars, self._parts), repeat("_compiled_call_impl")))
        )


_WithParameters = Norm | ColumnParallelLinear | RowParallelLinear


def _parameters(module: _WithParameters) -> tuple[Tensor, Tensor | None]:
    """Weight and bias; `module.weight` would look in three other places first."""
    held: dict[str, Any] = module._parameters
    return held["weight"], held.get("bias")


def _applied(part: Part, x: Tensor, *inputs: Any) -> Tensor:
    if x.requires_grad:
        return _new_layer_node(part, None, x, *inputs)
    parameters = (one for module in part.modules for one in module.parameters())
    return apply(part, x, *inputs, parameters=parameters, new_node=_new_layer_node)
