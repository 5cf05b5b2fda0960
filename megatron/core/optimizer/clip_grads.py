"""Sizes of gradients: norm, zeros; and what follows from them: by how much a step is clipped, and whether it is taken
(arXiv 1211.5063).

[Note: one norm] The norm is built from one fp64 squared sum a region of a parameter (`ParamMeta.parts`: the whole
parameter where it is not cut), added in the model's order (`global_norm_index`). It depends on no bucket, group of
parameters or pipeline stage, so every way of running a model whose optimizer state is whole clips alike, and a pipeline
clips with the bits of one process.

[Note: the norm's bits] Where the optimizer is sharded over data parallel ranks, each squares its own part of a region,
and the region's sum is the sum of these parts' sums: right to the last bits of fp64, but not with the very bits of the
sum over the whole, nor with those of another number of ranks (they differ by about 1e-16 of it). What gradients are
multiplied with is made of the norm and rounded once to their precision, so fp32 and shorter gradients are clipped alike
unless the exact number lies that close to where fp32 rounds the other way: of steps that clip, about one in 10^8. fp64
gradients are clipped by a number that differs in its last bits. Steps that do not clip do not use the norm.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from megatron.core.distributed.custom_fsdp.squared_sums import device_of
from megatron.core.pipeline_parallel.post_validation.state import Decision, ValidationState


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
    device = device_of(parts)
    counts = torch.zeros(len(parts), dtype=torch.float64, device=device)
    for count, tensors in zip(counts, parts, strict=True):
        for tensor in tensors:
            count += tensor.numel() - tensor.count_nonzero()
    return counts


@dataclasses.dataclass(frozen=True)
class StepRules:
    """max_norm: `--clip-grad`, 0 = off. skips_nonfinite: gradients that are not finite make no step (else they are
    used, as without `--check-for-nan-in-loss-and-grad`)."""

    max_norm: float
    skips_nonfinite: bool = True

    def decide(self, state: ValidationState, norm: float) -> Decision:
        """norm: of the state's sums, divided."""
        if not state.finite and self.skips_nonfinite:
            return Decision(None, clean=False)
        coefficient = clip_coefficient(norm, self.max_norm)
        return Decision(coefficient, clean=state.finite and coefficient == 1.0)
