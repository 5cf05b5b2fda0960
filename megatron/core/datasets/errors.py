"""What is wrong with the user's data: the trainer and the tools end with status 4 on it."""

from __future__ import annotations

import os


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
