"""The batches of the step under way, kept so that the step can be run again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


class StepBatches:
    """An iterator over another one that can go back to the start of the current step.

    Used by `--nan-policy`: `rerun-once` repeats the step, and `abort` repeats it to find the rank and the parameter.
    fetch: draws from `source`; there to be timed and watched.
    """

    def __init__(self, source: Iterator[Any], *, fetch: Callable[[Iterator[Any]], Any] = next) -> None:
        self._source = source
        self._fetch = fetch
        self._kept: list[Any] = []
        self._position = 0

    def __iter__(self) -> StepBatches:
        return self

    def __next__(self) -> Any:
        if self._position == len(self._kept):
            self._kept.append(self._fetch(self._source))
        self._position += 1
        return self._kept[self._position - 1]

    def begin_step(self) -> None:
        """Forget the last step's batches."""
        assert self._position == len(self._kept), (
            f"rewound step not finished: {self._position} of {len(self._kept)}"
        )
        self._kept.clear()
        self._position = 0

    def rewind(self) -> None:
        """The next batches are those of this step again."""
        self._position = 0
