"""Activations of the MLP as pairs of functions: forward, and backward from the input alone.

Gated ones (arXiv 2002.05202) take [..., 2 f], the gate half then the up half, and return [..., f]; others keep the
shape. Squared ReLU: arXiv 2109.08668.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megatron.core.transformer.model_config import TransformerConfig

Elementwise = Callable[[Tensor], Tensor]
Derivative = Callable[..., Tensor]  # (dy, x, grad_input=dx) -> dx, as torch's own

_GELU = F.gelu, torch.ops.aten.gelu_backward.grad_input
_GELU_TANH = functools.partial(_GELU[0], approximate="tanh"), functools.partial(_GELU[1], approximate="tanh")


class MlpActivation(NamedTuple):
    """forward(x); backward(x, dy) -> dx, of the shape of x, which writes to dy, too. keeps_output: for the weight
    gradient behind it, which else has it computed again."""

    forward: Elementwise
    backward: Callable[[Tensor, Tensor], Tensor]
    keeps_output: bool = False


def _plain(forward: Elementwise, derivative: Derivative) -> MlpActivation:
    return MlpActivation(forward, lambda x, dy: derivative(dy, x, grad_input=dy))


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
        derivative(dy.mul_(up), gate, grad_input=dgate)
        return dx

    return MlpActivation(gated_forward, gated_backward)


def _quick_gelu(x: Tensor) -> Tensor:
    return torch.sigmoid(x * 1.702).mul_(x)


def _quick_gelu_backward(dy: Tensor, x: Tensor, grad_input: Tensor) -> Tensor:
    share = torch.sigmoid(x * 1.702)
    # d(x s(ax))/dx = s (1 + a x (1 - s))
    return torch.mul((1.0 - share).mul_(x).mul_(1.702).add_(1.0).mul_(share), dy, out=grad_input)


def _squared_relu_backward(dy: Tensor, x: Tensor, grad_input: Tensor) -> Tensor:
    return torch.mul(F.relu(x).mul_(dy), 2.0, out=grad_input)


GELU = _plain(*_GELU)
# By the flag that asks for it, in the order of docs/model.md.
BY_FLAG = {
    "swiglu": _gated(F.silu, torch.ops.aten.silu_backward.grad_input),
    "quick_geglu": _gated(_quick_gelu, _quick_gelu_backward),
    "geglu": _gated(*_GELU),
    "geglu_tanh": _gated(*_GELU_TANH),
    "squared_relu": _plain(lambda x: F.relu(x).square_(), _squared_relu_backward),
    "openai_gelu": _plain(*_GELU_TANH),
}


def mlp_activation(config: TransformerConfig) -> MlpActivation:
    """The activation that the flags choose; exact (erf) GELU when none is named."""
    activation = BY_FLAG.get(config.activation or "", GELU)
    return activation._replace(keeps_output=config.keep_activation_output)
