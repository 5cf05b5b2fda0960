"""Sizes of gradients: norm, zeros, what is not finite.

[Note: one norm] The norm is built from one fp64 squared sum a region of a parameter (`ParamMeta.parts`: the whole
parameter where it is not cut), added in the model's order (`model_vector`). It depends on no bucket, group of
parameters or pipeline stage, so every way of running a model whose optimizer state is whole clips alike, and a pipeline
clips with the bits of one process.

[Note: the norm's bits] Where the optimizer is cut over data parallel ranks, each squares its own part of a region, and
the region's sum is the sum of these parts' sums: right to the last bits of fp64, but not with the very bits of the sum
over the whole, nor with those of another number of ranks (they differ by about 1e-16 of it). What gradients are
multiplied with is made of the norm and rounded once to their precision, so fp32 and shorter gradients are clipped alike
unless the exact number lies that close to where fp32 rounds the other way: of steps that clip, about one in 10^8. fp64
gradients are clipped by a number that differs in its last bits. Steps that do not clip do not use the norm.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from megatron.core.device import elements_at_a_time

# Elements converted to fp64 at a time on CPU, into one buffer that is used again: 2 MiB, fits a core's cache. Measured
# on 34 M fp32 elements and one thread: 16 ms; with a new buffer for each block 100 ms (its pages are faulted in each
# time); blocks of 32 Ki 26 ms; torch.linalg.vector_norm(dtype=float64) and _foreach_norm 43 ms.
BLOCK = 262_144


def squared_sums(tensors: Sequence[Tensor]) -> Tensor:
    """[len(tensors)] fp64: each tensor's sum of squares. Squares of fp32 and shorter are exact and cannot
    overflow, so a sum is finite exactly if all elements are."""
    return squared_sums_of_parts([[tensor] for tensor in tensors])


def squared_sums_of_parts(parts: Sequence[Sequence[Tensor]]) -> Tensor:
    """[len(parts)] fp64: the same over all of each one's tensors; 0 where there are none."""
    device = _device_of(parts)
    wide = torch.empty(0, dtype=torch.float64, device=device)
    wide.resize_(elements_at_a_time(wide, BLOCK))
    sums = [_squared_sum(tensors, wide) for tensors in parts]
    return torch.stack(sums) if sums else torch.zeros(0, dtype=torch.float64, device=device)


def _squared_sum(tensors: Sequence[Tensor], wide: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=wide.device)
    for tensor in tensors:
        for block in tensor.reshape(-1).split(wide.numel()):
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


def zero_counts_of_parts(parts: Sequence[Sequence[Tensor]]) -> Tensor:
    """[len(parts)] fp64: how many elements of each one's tensors are exactly zero."""
    device = _device_of(parts)
    counts = torch.zeros(len(parts), dtype=torch.float64, device=device)
    for count, tensors in zip(counts, parts, strict=True):
        for tensor in tensors:
            count += tensor.numel() - tensor.count_nonzero()
    return counts


def _device_of(parts: Sequence[Sequence[Tensor]]) -> torch.device:
    """Of the first tensor there is."""
    return next((tensor.device for tensors in parts for tensor in tensors), torch.device("cpu"))
