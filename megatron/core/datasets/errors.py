"""What is wrong with the user's data: the trainer and the tools end with status 4 on it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from megatron.core.machine import available_bytes
from megatron.core.words import size_text


class DataError(ValueError):
    """A corpus, an index, a split or a blend that cannot be trained on; the message says which and why."""


@contextlib.contextmanager
def data_errors(path: str, flag: str = "", more: str = "") -> Iterator[None]:
    """What the system refuses inside, as a DataError that names the file. flag, more: before and after it."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{flag}{error.filename or path}: {error.strerror or error}{more}") from error


def bad_field(path: str, field: str, offset: int | None, expected: object, found: object) -> DataError:
    """The error for one field of a file.

    offset: byte where the field starts; None for what has no place in the file (its size).
    """
    place = "" if offset is None else f" at byte {offset}"
    return DataError(f"{path}: {field}{place}: expected {expected}, found {found}")


def require_memory(num_bytes: int, of_what: str) -> None:
    """Raises DataError for more than the machine has: asking the system for it may end the process without a word."""
    available = available_bytes()
    if available is not None and num_bytes > available:
        needs = f"takes {size_text(num_bytes)} of memory"
        raise DataError(f"{of_what} {needs}; this machine has {size_text(available)} left")
