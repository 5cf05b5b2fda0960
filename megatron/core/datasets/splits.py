"""Which sequences of a corpus are training, validation and test data."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

import numpy as np

from megatron.core.datasets.errors import DataError

SPLIT_NAMES = ("train", "valid", "test")
DEFAULT_SPLIT = "969,30,1"
Bounds = tuple[float, float]
"""A share of a corpus, from 0 to 1."""
SplitMatrix = tuple[Bounds | None, Bounds | None, Bounds | None]
"""The share of train, valid, test; None for a split of weight zero."""


def parse_split(split: str) -> SplitMatrix:
    """`--split` as shares: numbers found by pattern, padded to three with zeros, normalised by their sum.

    Raises DataError for a text without three or fewer non-negative numbers, one of them positive.
    """
    words = re.findall(r"[0-9.]+", split)
    if re.search(r"[A-Za-z]|-\s*[0-9.]", split):
        raise DataError(f"--split {split!r}: only non-negative decimal numbers, e.g. --split {DEFAULT_SPLIT}")
    try:
        weights = [float(word) for word in words]
    except ValueError:
        raise DataError(
            f"--split {split!r}: {words} are not all numbers, e.g. --split {DEFAULT_SPLIT}"
        ) from None
    if not 1 <= len(weights) <= 3:
        raise DataError(f"--split {split!r}: one to three numbers are needed, found {len(weights)}")
    weights += [0.0] * (3 - len(weights))
    if not (total := weights[0] + weights[1] + weights[2]) > 0:
        raise DataError(f"--split {split!r}: at least one weight must be above zero")
    shares = [weight / total for weight in weights]
    # float64 running sums, as they are: rounding them elsewhere would move the borders between splits.
    bounds = list(itertools.accumulate(shares, initial=0.0))
    train, valid, test = (
        (low, high) if share > 0 else None
        for share, low, high in zip(shares, bounds[:-1], bounds[1:], strict=True)
    )
    return train, valid, test


def sequence_range(bounds: Bounds, num_sequences: int) -> range:
    """The sequences of a share of a corpus: both ends rounded half to even."""
    return range(round(bounds[0] * float(num_sequences)), round(bounds[1] * float(num_sequences)))


def normalize(weights: Sequence[float]) -> list[float]:
    """Weights over their sum, in numpy's float64 arithmetic (its summation order decides the last bit)."""
    array = np.array(weights, dtype=np.float64)
    normalized: list[float] = (array / np.sum(array)).tolist()
    return normalized
