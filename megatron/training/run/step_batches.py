"""The microbatches of the step under way, by number."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any


class StepBatches:
    """An iterator's batches, taken a step at a time and kept for the step.

    A pipeline asks for a microbatch on the stage that embeds it and again where its loss is; `--nan-policy` runs a
    whole step again, with post-validation when the next one has begun.

    fetch: draws from `source`; there to be timed and watched. reads: whether this rank's stages need data at all;
    without it nothing is drawn, and every microbatch is empty.
    """

    def __init__(
        self, source: Iterator[Any], *, fetch: Callable[[Iterator[Any]], Any] = next, reads: bool = True
    ) -> None:
        self._source = source
        self._fetch = fetch
        self._reads = reads
        self._before: list[Any] = []  # of the step before, where it may come again
        self._kept: list[Any] = []
        self._ahead: list[Any] = []  # drawn already for the step after this one

    def begin_step(self, *, keep_last: bool = False) -> None:
        """The next step's batches. keep_last: `step_back` may be called; otherwise those of the last are forgotten."""
        self._before = self._kept if keep_last else []
        self._kept, self._ahead = self._ahead, []

    def step_back(self) -> None:
        """The step before is the one under way again; this one's batches are the next's."""
        self._ahead, self._kept, self._before = self._kept, self._before, []

    def microbatch(self, index: int) -> Any:
        """Microbatch `index` of the step; drawn, with those before it, at the first request."""
        if not self._reads:
            return EMPTY
        while len(self._kept) <= index:
            self._kept.append(self._fetch(self._source))
        return self._kept[index]


EMPTY: Mapping[str, Any] = {}
