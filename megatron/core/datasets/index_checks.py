"""Whether indices from disk are such as this program builds for the same request: their layout, and what they say.

A digest tells that a file is whole, not who wrote it. What passes here leads to tokens of the split for every sample,
each of the right length; the order itself is taken on trust. Checking takes a few
passes over the arrays, and no search as building does: 30 million samples of 3 million documents take 0.5 s instead of
3.4.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets.index_builders import (
    EpochPlan,
    sample_index_dtype,
    shuffle_index_dtype,
)

_ROWS_AT_A_TIME = 1 << 16  # whose temporaries stay in a core's cache

Layout = tuple[np.dtype[Any], tuple[int, ...]]


def index_layouts(lengths: NDArray[Any], sequences: range, plan: EpochPlan) -> dict[str, Layout]:
    """Dtype and shape of each index, before there are any."""
    num_documents = plan.num_epochs * len(sequences)
    return {
        "document_index": (np.dtype(np.int32), (num_documents,)),
        "sample_index": (sample_index_dtype(lengths, num_documents), (plan.num_samples + 1, 2)),
        "shuffle_index": (shuffle_index_dtype(plan), (plan.num_samples,)),
    }


def layout_bytes(layouts: Mapping[str, Layout]) -> int:
    """Memory that arrays of these layouts take."""
    return sum(dtype.itemsize * math.prod(shape) for dtype, shape in layouts.values())


def index_fault(
    arrays: Mapping[str, NDArray[Any]],
    lengths: NDArray[Any],
    sequences: range,
    sequence_length: int,
    plan: EpochPlan,
    *,
    extra_token: bool,
) -> str | None:
    """What is wrong with indices of the right layouts, None where nothing is."""
    documents, shuffle = arrays["document_index"], arrays["shuffle_index"]
    if not _within(documents, sequences.start, sequences.stop):
        return f"document_index has sequences outside {sequences.start} to {sequences.stop}"
    if (np.bincount(documents - sequences.start, minlength=len(sequences)) != plan.num_epochs).any():
        return f"document_index does not have each sequence {plan.num_epochs} times"
    if (fault := shuffle_fault(shuffle, plan.num_samples)) is not None:
        return fault
    x = int(extra_token)
    if not _cuts(arrays["sample_index"], lengths[documents], sequence_length, plan.tokens - x, x):
        return f"sample_index does not cut the documents into samples of length {sequence_length}"
    return None


def shuffle_fault(order: NDArray[Any], num_samples: int) -> str | None:
    """The same of an order of so many samples, or of its beginning."""
    if not _within(order, 0, num_samples):
        return f"shuffle_index has samples outside 0 to {num_samples}"
    seen = np.zeros(num_samples, dtype=bool)
    for first in range(0, len(order), _ROWS_AT_A_TIME):
        seen[order[first : first + _ROWS_AT_A_TIME]] = True
    if np.count_nonzero(seen) != len(order):
        return "shuffle_index does not have each sample once"
    return None


def _cuts(
    rows: NDArray[Any], lengths: NDArray[Any], sequence_length: int, last_start: int, extra_token: int
) -> bool:
    """Whether each (position, offset) is where its sample starts. lengths: of the documents in their order."""
    begins = np.zeros(len(lengths), dtype=np.int64)
    np.cumsum(lengths[:-1], dtype=np.int64, out=begins[1:])
    for first in range(0, len(rows), _ROWS_AT_A_TIME):
        positions, offsets = rows[first : first + _ROWS_AT_A_TIME].T
        if not _within(positions, 0, len(lengths)):
            return False
        starts = np.arange(first, first + len(positions), dtype=np.int64)
        starts *= sequence_length
        np.minimum(starts, last_start, out=starts)
        starts -= begins[positions]
        is_inside = offsets.min() >= 0 and (offsets <= lengths[positions] - extra_token).all()
        if not (is_inside and np.array_equal(offsets, starts)):
            return False
    return True


def _within(values: NDArray[Any], low: int, high: int) -> bool:
    return not len(values) or (low <= int(values.min()) and int(values.max()) < high)
