"""Whether indices from disk are such as this program builds for the same request: their layout, and what they say.

A digest tells that a file is whole, not who wrote it. What passes here leads to tokens of the split for every sample,
each of the right length; the order itself is taken on trust. Where samples start follows from the order of documents:
it is built again and compared, which takes as long as checking it would.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets.index_builders import (
    EpochPlan,
    build_sample_index,
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
    expected = build_sample_index(lengths, documents, sequence_length, plan, extra_token=extra_token)
    if not np.array_equal(arrays["sample_index"], expected):
        return f"sample_index does not cut the documents into samples of length {sequence_length}"
    return None


def _within(values: NDArray[Any], low: int, high: int) -> bool:
    return not len(values) or (low <= int(values.min()) and int(values.max()) < high)
