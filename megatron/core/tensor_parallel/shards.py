"""How a layer's parameters are cut over tensor parallel ranks, as regions of `ParamMeta`.

A rank holds bands of rows (column layers, vocabularies) or of columns (row layers), or all of a parameter. Without
other ranks nothing is cut and there are no regions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from megatron.core.param_meta import Region
from megatron.core.tensor_parallel.mappings import TensorParallel


@dataclasses.dataclass(frozen=True)
class Band:
    """Consecutive rows (or columns) of a parameter that this rank holds.

    copies: so many consecutive ranks hold the same ones, each computing the gradient of its own use of them.
    """

    offset: int
    size: int
    copies: int = 1


def even_bands(total: int, tp: TensorParallel, parts: int = 1) -> tuple[Band, ...]:
    """This rank's share of each of `parts` equal parts of `total` rows (a gated MLP has two: gate and up)."""
    part = total // parts
    share = part // tp.size
    assert share * tp.size * parts == total, f"{total} = {parts} parts over {tp.size} ranks"
    return tuple(Band(index * part + tp.rank * share, share) for index in range(parts))


def band_regions(
    shape: tuple[int, ...], bands: Sequence[Band], dim: int, tp: TensorParallel
) -> tuple[Region, ...]:
    """Regions of a parameter of global `shape` of which this rank holds `bands` along `dim`, one after the other."""
    if tp.size == 1:
        return ()
    regions = []
    at = 0
    for band in bands:
        regions.append(
            Region(
                local=_at(dim, at, len(shape)),
                offset=_at(dim, band.offset, len(shape)),
                shape=(*shape[:dim], band.size, *shape[dim + 1 :]),
                copies=band.copies,
                partial=band.copies > 1,
            )
        )
        at += band.size
    return tuple(regions)


def _at(dim: int, index: int, dims: int) -> tuple[int, ...]:
    return tuple(index if d == dim else 0 for d in range(dims))


def whole_region(shape: tuple[int, ...], tp: TensorParallel, *, partial: bool) -> tuple[Region, ...]:
    """The one region of a parameter that every rank holds. partial: each has a part of its gradient."""
    if tp.size == 1:
        return ()
    start = (0,) * len(shape)
    return (Region(start, start, shape, copies=tp.size, partial=partial),)
