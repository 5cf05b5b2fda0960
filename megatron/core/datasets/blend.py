"""What `--data-path`, its per-split variants and `--split` say: corpora, their weights, whose sequences are whose."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Sequence

import numpy as np

from megatron.core import list_expression, safe_files
from megatron.core.datasets.errors import DataError, data_errors
from megatron.core.list_expression import ListExpressionError
from megatron.core.words import printable

MAX_FILE_BYTES = 1 << 26  # of files that name corpora
SPLIT_NAMES = ("train", "valid", "test")
DEFAULT_SPLIT = "969,30,1"
MOCK_SPLIT = "1,1,1"
Bounds = tuple[float, float]
"""A share of a corpus, from 0 to 1."""
SplitMatrix = tuple[Bounds | None, Bounds | None, Bounds | None]
"""The share of train, valid, test; None for a split of weight zero."""


@dataclasses.dataclass(frozen=True)
class Blend:
    """Corpora to train on together. weights: one for each prefix, not normalised; None to take each whole."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None = None


def parse_blend(words: Sequence[str], flag: str = "--data-path") -> Blend:
    """Words of `--data-path`: one prefix, several, or weight prefix pairs.

    An even number of words is tried as pairs; if no weight is a number all are prefixes. Raises DataError naming
    `flag` for an empty list, for names that are not printable, for weights of which only some are numbers, and for a
    weight that is not above zero.
    """
    if not words:
        raise DataError(f"{flag}: no corpus given")
    if (named := next((word for word in words if printable(word) != word), None)) is not None:
        raise DataError(f"{flag}: expects names without control characters, got {named!r:.80}")
    weights = [_number(word) for word in words[0::2]]
    if len(words) % 2 or weights.count(None) == len(weights):
        return Blend(tuple(words))
    numbers = []
    for weight, word, prefix in zip(weights, words[0::2], words[1::2], strict=True):
        if weight is None:
            told = "is no number, but other weights are; give weight prefix weight prefix ..."
            raise DataError(f"{flag}: {word!r} {told}")
        if not (weight > 0 and math.isfinite(weight)):
            told = "must be above zero; leave the corpus out instead"
            raise DataError(f"{flag}: weight {weight} of {prefix} {told}")
        numbers.append(weight)
    return Blend(tuple(words[1::2]), tuple(numbers))


def read_blend_file(path: str) -> Blend:
    """`--data-args-path`: a text file that holds the words of `--data-path`."""
    return parse_blend(_read(path, "--data-args-path").split(), f"--data-args-path {path}")


def read_per_split_file(path: str) -> tuple[Blend | None, Blend | None, Blend | None]:
    """`--per-split-data-args-path`: JSON {"train": [words], "valid": [...], "test": [...]}; a split may be missing."""
    flag = f"--per-split-data-args-path {path}"
    text = _read(path, "--per-split-data-args-path")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{flag}: not JSON: {error}") from error
    if not isinstance(content, dict) or set(content) - set(SPLIT_NAMES):
        raise DataError(f"{flag}: expected an object with the keys {', '.join(SPLIT_NAMES)}")
    blends: list[Blend | None] = []
    for split in SPLIT_NAMES:
        words = content.get(split)
        if words is not None and not isinstance(words, list):
            raise DataError(f"{flag}: {split}: expected a list of words, found {type(words).__name__}")
        for word in words or ():
            is_text = isinstance(word, str) and not any("\ud800" <= c <= "\udfff" for c in word)
            if not is_text and (isinstance(word, bool) or not isinstance(word, int | float)):
                raise DataError(f"{flag}: {split}: expected prefixes and weights, found {word!r:.80}")
        blends.append(parse_blend([str(word) for word in words], f"{flag}: {split}") if words else None)
    return blends[0], blends[1], blends[2]


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _read(path: str, flag: str) -> str:
    with data_errors(path, f"{flag} "):
        try:
            return safe_files.read_text(path, max_bytes=MAX_FILE_BYTES, follow=True)
        except ValueError as error:
            raise DataError(f"{flag} {error}") from error


def parse_split(split: str) -> SplitMatrix:
    """`--split` as shares of a corpus. Raises DataError for what `list_expression.parse_split` refuses."""
    try:
        shares = list_expression.parse_split(split)
    except ListExpressionError as error:
        raise DataError(f"--split {error}") from None
    # float64 running sums, as they are: rounding them elsewhere would move the borders between splits.
    bounds = itertools.pairwise(itertools.accumulate(shares, initial=0.0))
    train, valid, test = (pair if share > 0 else None for share, pair in zip(shares, bounds, strict=True))
    return train, valid, test


def sequence_range(bounds: Bounds, num_sequences: int) -> range:
    """The sequences of a share of a corpus: both ends rounded half to even."""
    return range(round(bounds[0] * float(num_sequences)), round(bounds[1] * float(num_sequences)))


def normalize(weights: Sequence[float]) -> list[float]:
    """Weights over their sum, in numpy's float64 arithmetic (its summation order decides the last bit)."""
    array = np.array(weights, dtype=np.float64)
    return (array / np.sum(array)).tolist()
