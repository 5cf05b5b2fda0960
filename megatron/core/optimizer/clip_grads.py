"""Sizes of gradients: norm, zeros, what is not finite.

[Note: one norm] The norm is built from one fp64 squared sum a region of a parameter (`ParamMeta.parts`: the whole
parameter where it is not cut), added in the model's order (`model_vector`). It depends on no layout, bucket, group of
parameters or pipeline stage, so every way of running a model clips alike, and a pipeline clips with the bits of one
process.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

# Elements converted to fp64 at a time, into one buffer that is used again: 2 MiB, fits a core's cache. Measured on 34 M
# fp32 elements and one thread: 16 ms; with a new buffer for each block 100 ms (its pages are faulted in each time);
# blocks of 32 Ki 26 ms; torch.linalg.vector_norm(dtype=float64) and _foreach_norm 43 ms.
BLOCK = 262_144


def squared_sums(tensors: Sequence[Tensor]) -> Tensor:
    """[len(tensors)] fp64: each tensor's sum of squares. Squares of fp32 and shorter are exact and cannot
    overflow, so a sum is finite exactly if all elements are."""
    if not tensors:
        return torch.zeros(0, dtype=torch.float64)
    wide = torch.empty(BLOCK, dtype=torch.float64, device=tensors[0].device)
    return torch.stack([_squared_sum(tensor, wide) for tensor in tensors])


def _squared_sum(tensor: Tensor, wide: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=tensor.device)
    for block in tensor.reshape(-1).split(BLOCK):
        part = wide[: block.numel()].copy_(block)
        total += torch.dot(part, part)
    return total


def norm_of(sums: Iterable[float]) -> float:
    """The norm from squared sums in the model's order."""
    total = 0.0
    for value in sums:
        total += value
    return math.sqrt(total)


def clip_coefficient(norm: float, max_norm: float) -> float:
    """What gradients of this norm are multiplied by; 1.0 if they are short enough or max_norm is 0 (off)."""
    if max_norm <= 0.0:
        return 1.0
    return min(1.0, max_norm / (norm + 1e-6))


def zero_counts(tensors: Sequence[Tensor]) -> Tensor:
    """[len(tensors)] fp64: how many elements of each are exactly zero."""
    if not tensors:
        return torch.zeros(0, dtype=torch.float64)
    return torch.stack([tensor.numel() - tensor.count_nonzero() for tensor in tensors]).double()
