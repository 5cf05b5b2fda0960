"""Activations of the MLP as pairs of functions: forward, and backward from the input alone.

Gated ones take [..., 2 f], the gate half then the up half, and return [..., f].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megatron.core.transformer.transformer_config import TransformerConfig

_gelu_backward = torch.ops.aten.gelu_backward
_silu_backward = torch.ops.aten.silu_backward


@dataclasses.dataclass(frozen=True)
class MlpActivation:
    """forward(x); backward(x, dy) -> dx."""

    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square_()


def _squared_relu_backward(x: Tensor, dy: Tensor) -> Tensor:
    return F.relu(x).mul_(dy).mul_(2.0)


def _swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def _swiglu_backward(x: Tensor, dy: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    dx = torch.empty_like(x)
    dgate, dup = dx.chunk(2, dim=-1)
    torch.mul(F.silu(gate), dy, out=dup)
    dgate.copy_(_silu_backward(dy * up, gate))
    return dx


def _quick_geglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return torch.sigmoid(gate * 1.702).mul_(gate).mul_(up)


def _quick_geglu_backward(x: Tensor, dy: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    dx = torch.empty_like(x)
    dgate, dup = dx.chunk(2, dim=-1)
    share = torch.sigmoid(gate * 1.702)
    torch.mul(share * gate, dy, out=dup)
    # d(g s(ag))/dg = s (1 + a g (1 - s))
    slope = (1.0 - share).mul_(gate).mul_(1.702).add_(1.0).mul_(share)
    torch.mul(slope, dy * up, out=dgate)
    return dx


GELU = MlpActivation(F.gelu, lambda x, dy: _gelu_backward(dy, x))
GELU_TANH = MlpActivation(_gelu_tanh, lambda x, dy: _gelu_backward(dy, x, approximate="tanh"))
SQUARED_RELU = MlpActivation(_squared_relu, _squared_relu_backward)
SWIGLU = MlpActivation(_swiglu, _swiglu_backward)
QUICK_GEGLU = MlpActivation(_quick_geglu, _quick_geglu_backward)


def mlp_activation(config: TransformerConfig) -> MlpActivation:
    """The activation that the flags choose; exact (erf) GELU when none is named."""
    if config.swiglu:
        return SWIGLU
    if config.quick_geglu:
        return QUICK_GEGLU
    if config.squared_relu:
        return SQUARED_RELU
    return GELU_TANH if config.openai_gelu else GELU
