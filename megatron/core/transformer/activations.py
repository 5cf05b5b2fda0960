"""Activations of the MLP as pairs of functions: forward, and backward from the input alone.

Gated ones take [..., 2 f], the gate half then the up half, and return [..., f].
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megatron.core.transformer.transformer_config import TransformerConfig

Elementwise = Callable[[Tensor], Tensor]
Derivative = Callable[[Tensor, Tensor], Tensor]  # (dy, x) -> dx, as torch's own

_gelu_tanh = functools.partial(F.gelu, approximate="tanh")
_gelu_tanh_backward = functools.partial(torch.ops.aten.gelu_backward, approximate="tanh")


@dataclasses.dataclass(frozen=True)
class MlpActivation:
    """forward(x); backward(x, dy) -> dx."""

    forward: Elementwise
    backward: Callable[[Tensor, Tensor], Tensor]


def _plain(forward: Elementwise, derivative: Derivative) -> MlpActivation:
    return MlpActivation(forward, lambda x, dy: derivative(dy, x))


def _gated(forward: Elementwise, derivative: Derivative) -> MlpActivation:
    """The up half times an activation of the gate half, of which forward and derivative are."""

    def gated_forward(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return forward(gate).mul_(up)

    def gated_backward(x: Tensor, dy: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        dx = torch.empty_like(x)
        dgate, dup = dx.chunk(2, dim=-1)
        torch.mul(forward(gate), dy, out=dup)
        dgate.copy_(derivative(dy * up, gate))
        return dx

    return MlpActivation(gated_forward, gated_backward)


def _squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square_()


def _squared_relu_backward(dy: Tensor, x: Tensor) -> Tensor:
    return F.relu(x).mul_(dy).mul_(2.0)


def _quick_gelu(x: Tensor) -> Tensor:
    return torch.sigmoid(x * 1.702).mul_(x)


def _quick_gelu_backward(dy: Tensor, x: Tensor) -> Tensor:
    share = torch.sigmoid(x * 1.702)
    # d(x s(ax))/dx = s (1 + a x (1 - s))
    return (1.0 - share).mul_(x).mul_(1.702).add_(1.0).mul_(share).mul_(dy)


GELU = _plain(F.gelu, torch.ops.aten.gelu_backward)
# By the flag that asks for it, in the order of docs/model.md.
BY_FLAG = {
    "swiglu": _gated(F.silu, torch.ops.aten.silu_backward),
    "quick_geglu": _gated(_quick_gelu, _quick_gelu_backward),
    "geglu": _gated(F.gelu, torch.ops.aten.gelu_backward),
    "geglu_tanh": _gated(_gelu_tanh, _gelu_tanh_backward),
    "squared_relu": _plain(_squared_relu, _squared_relu_backward),
    "openai_gelu": _plain(_gelu_tanh, _gelu_tanh_backward),
}


def mlp_activation(config: TransformerConfig) -> MlpActivation:
    """The activation that the flags choose; exact (erf) GELU when none is named."""
    return BY_FLAG.get(config.activation or "", GELU)
