"""An update taken back by arithmetic: weights and moments from before it, out of those after it and the gradient.

[Note: what is lost] Each stored number was rounded once by the update and is rounded once more here; the arithmetic
between is fp64. A moment that lost digits when the gradient was added (a gradient far larger than it) has lost them for
good: m = (m' - (1 - beta) g) / beta is right to about one rounding of m', not of m. The first update is exact in its
moments, which were zero. So weights come back to about a rounding, and a run that rolls back goes on from slightly
other numbers than one that did not: the snapshot is exact, this needs no memory.

Formulas: AdamW as torch writes it, inverted (Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 4).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from megatron.core.device import elements_at_a_time

BLOCK = 1 << 18  # elements in fp64 at a time on CPU: a few MiB of temporaries


def undo_adamw(
    weights: Tensor,
    moments: tuple[Tensor, ...],
    grad: Tensor,
    *,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float],
    eps: float,
    num_steps: int,
) -> None:
    """In place, all [n]. moments: exp_avg, exp_avg_sq. num_steps: updates until now, the one taken back included."""
    beta1, beta2 = betas
    scale = lr / (1.0 - beta1**num_steps)
    root = math.sqrt(1.0 - beta2**num_steps)
    for w, m, v, g in _blocks(weights, *moments, grad):
        wide_m, wide_v, wide_g = m.double(), v.double(), g.double()
        update = wide_m / ((wide_v.sqrt() / root).add_(eps))
        w.copy_(w.double().add_(update, alpha=scale).div_(1.0 - lr * weight_decay))
        if num_steps == 1:
            m.zero_()
            v.zero_()
            continue
        _unmix(m, wide_m.sub_(wide_g, alpha=1.0 - beta1), beta1)
        # What rounding has left of a square that was added to almost nothing may be below zero.
        _unmix(v, wide_v.sub_(wide_g.square_(), alpha=1.0 - beta2).clamp_(min=0.0), beta2)


def _unmix(moment: Tensor, left: Tensor, beta: float) -> None:
    """left: beta times the moment before. With beta 0 nothing is left of it, and nothing will be used of it."""
    if beta == 0.0:
        moment.zero_()
    else:
        moment.copy_(left.div_(beta))


def undo_sgd(
    weights: Tensor,
    moments: tuple[Tensor, ...],
    grad: Tensor,
    *,
    lr: float,
    weight_decay: float,
    momentum: float,
    num_steps: int,
) -> None:
    """In place, all [n]; the decay is a part of the gradient. moments: the momentum buffer, or none."""
    for w, *buffers, g in _blocks(weights, *moments, grad):
        if not buffers:
            w.copy_(w.double().add_(g.double(), alpha=lr).div_(1.0 - lr * weight_decay))
            continue
        wide = buffers[0].double()
        before = w.double().add_(wide, alpha=lr)
        w.copy_(before)
        if num_steps == 1:
            buffers[0].zero_()
        else:
            buffers[0].copy_(wide.sub_(g.double()).sub_(before, alpha=weight_decay).div_(momentum))


def _blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of the same elements of each."""
    assert len({tensor.shape for tensor in tensors}) == 1, [tuple(tensor.shape) for tensor in tensors]
    size = elements_at_a_time(tensors[0], BLOCK)
    with torch.no_grad():
        yield from zip(*(tensor.split(size) for tensor in tensors), strict=True)
