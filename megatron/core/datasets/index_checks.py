"""Whether indices from disk are such as this program builds for the same request: their layout, and what they say.

A digest tells that a file is whole, not who wrote it. What passes here leads to tokens of the split for every sample,
each of the right length; the order itself is taken on trust. Vectorised, and in blocks, so it costs less than reading.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets.index_builders import (
    DOCUMENTS_PER_BLOCK,
    EpochPlan,
    sample_index_dtype,
    shuffle_index_dtype,
)

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
    if not _within(shuffle, 0, plan.num_samples):
        return f"shuffle_index has samples outside 0 to {plan.num_samples}"
    seen = np.zeros(plan.num_samples, dtype=bool)
    seen[shuffle] = True
    if not seen.all():
        return "shuffle_index does not have each sample once"
    x = int(extra_token)
    return _sample_fault(arrays["sample_index"], lengths, documents, sequence_length, plan.tokens - x, x)


def _within(values: NDArray[Any], low: int, high: int) -> bool:
    return not len(values) or (low <= int(values.min()) and int(values.max()) < high)


def _sample_fault(
    rows: NDArray[Any],
    lengths: NDArray[Any],
    documents: NDArray[Any],
    sequence_length: int,
    last_start: int,
    x: int,
) -> str | None:
    """Row k must name the token k*L of the stream of documents, the last row the stream's end where that is earlier.

    x: 1 where a start names a token, so that it lies before its document's end; 0 where it may lie on it.
    """
    positions, offsets = rows[:, 0], rows[:, 1]
    if not _within(positions, 0, len(documents)) or (positions[1:] < positions[:-1]).any():
        return "sample_index has documents out of order, or beyond the last"
    base = 0
    for first in range(0, len(documents), DOCUMENTS_PER_BLOCK):
        block = lengths[documents[first : first + DOCUMENTS_PER_BLOCK]]
        ends = np.cumsum(block, dtype=np.int64)
        begin, stop = np.searchsorted(positions, (first, first + len(block)))
        places = positions[begin:stop] - first
        into, of = offsets[begin:stop].astype(np.int64), block[places]
        if ((into < 0) | (into > of - x)).any():
            return "sample_index has offsets outside their documents"
        expected = np.arange(begin, stop, dtype=np.int64) * sequence_length
        if (base + ends[places] - of + into != np.minimum(expected, last_start)).any():
            return "sample_index has samples of another length"
        base += int(ends[-1])
    return None
