"""What `--data-path` and its per-split variants name."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence

from megatron.core import safe_files
from megatron.core.datasets.errors import DataError
from megatron.core.datasets.splits import SPLIT_NAMES

MAX_FILE_BYTES = 1 << 26  # of files that name corpora


@dataclasses.dataclass(frozen=True)
class Blend:
    """Corpora to train on together. weights: one for each prefix, not normalised; None to take each whole."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None = None


def parse_blend(words: Sequence[str], flag: str = "--data-path") -> Blend:
    """Words of `--data-path`: one prefix, several, or weight prefix pairs.

    An even number of words is tried as pairs; if no weight is a number all are prefixes. Raises DataError
    naming `flag` for an empty list, for weights of which only some are numbers, and for a weight that is not
    above zero.
    """
    if not words:
        raise DataError(f"{flag}: no corpus given")
    weights = [_number(word) for word in words[0::2]]
    if len(words) % 2 or weights.count(None) == len(weights):
        return Blend(tuple(words))
    if None in weights:
        word = words[2 * weights.index(None)]
        raise DataError(
            f"{flag}: {word!r} is no number, but other weights are; give weight prefix weight prefix ..."
        )
    numbers = tuple(weight for weight in weights if weight is not None)
    for weight, prefix in zip(numbers, words[1::2], strict=True):
        if not (weight > 0 and math.isfinite(weight)):
            told = "must be above zero; leave the corpus out instead"
            raise DataError(f"{flag}: weight {weight} of {prefix} {told}")
    return Blend(tuple(words[1::2]), numbers)


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
    try:
        return safe_files.read_text(path, max_bytes=MAX_FILE_BYTES, follow=True)
    except OSError as error:
        raise DataError(f"{flag} {path}: {error.strerror}") from error
    except ValueError as error:
        raise DataError(f"{flag} {error}") from error
