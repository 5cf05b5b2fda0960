"""A parameter's regions in a flat part of it.

A rank holds elements [start, end) of a parameter's flattened local tensor, as a 1-D tensor; the parameter is made of
regions (`ParamMeta.parts`), rectangles of the local tensor. What it holds of a region is again rectangles, views of
that tensor: few, since a flat slice is at most 2 x dims - 1 of them.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from megatron.core.param_meta import Region
from megatron.core.rectangles import Rectangle, cut_flat_slice, flat_range


@dataclasses.dataclass(frozen=True)
class RegionPart:
    """A rectangle of a region. offset: its first element in the global tensor. tensor: the view, in its shape."""

    offset: tuple[int, ...]
    tensor: Tensor


def region_parts(
    region: Region, shape: tuple[int, ...], part: Tensor, start: int, end: int
) -> list[RegionPart]:
    """What `part`, elements [start, end) of a flattened tensor of `shape`, holds of a region, in flat order."""
    _check(part, start, end)
    found = []
    for box in cut_flat_slice(shape, start, end):
        first = [max(a, b) for a, b in zip(box.offset, region.local, strict=True)]
        last = [
            min(a + n, b + m)
            for a, n, b, m in zip(box.offset, box.shape, region.local, region.shape, strict=True)
        ]
        if any(a >= b for a, b in zip(first, last, strict=True)):
            continue
        view = part.narrow(0, box.flat_start - start, box.numel).view(box.shape)
        for dim, (a, b, origin) in enumerate(zip(first, last, box.offset, strict=True)):
            view = view.narrow(dim, a - origin, b - a)
        offset = tuple(
            there + a - here for there, here, a in zip(region.offset, region.local, first, strict=True)
        )
        found.append(RegionPart(offset, view))
    return found


def region_slices(region: Region, shape: tuple[int, ...], part: Tensor, start: int, end: int) -> list[Tensor]:
    """The same elements in as few tensors as possible: a single 1-D one where a region's elements are neighbours."""
    _check(part, start, end)
    if region.numel == 0:
        return []
    span = flat_range(shape, Rectangle(region.local, region.shape))
    if span is None:
        return [piece.tensor for piece in region_parts(region, shape, part, start, end)]
    low, high = max(span[0], start), min(span[1], end)
    return [part[low - start : high - start]] if low < high else []


def _check(part: Tensor, start: int, end: int) -> None:
    assert tuple(part.shape) == (end - start,), (
        f"elements [{start}, {end}) in a tensor of {tuple(part.shape)}"
    )
