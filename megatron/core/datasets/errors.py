"""What is wrong with the user's data: the trainer and the tools end with status 4 on it."""

from __future__ import annotations

import os

from megatron.core.available_memory import available_bytes


class DataError(ValueError):
    """A corpus, an index, a split or a blend that cannot be trained on; the message says which and why."""


def bad_field(
    path: str | os.PathLike[str], field: str, offset: int | None, expected: object, found: object
) -> DataError:
    """The error for one field of a file.

    offset: byte where the field starts; None for what has no place in the file (its size).
    """
    place = "" if offset is None else f" at byte {offset}"
    return DataError(f"{os.fspath(path)}: {field}{place}: expected {expected}, found {found}")


def require_memory(num_bytes: int, of_what: str) -> None:
    """Raises DataError for more than the machine has: asking the system for it may end the process without a word."""
    available = available_bytes()
    if available is not None and num_bytes > available:
        needed, left = (f"{number / 2**30:.1f}" for number in (num_bytes, available))
        raise DataError(
            f"{of_what} takes {needed} GiB of memory in every process; this machine has {left} left"
        )
