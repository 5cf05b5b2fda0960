"""The microbatches of the step under way, by number."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any


class StepBatches:
    """An iterator's batches, taken a step at a time and kept for the step.

    A pipeline asks for a microbatch on the stage that embeds it and again where its loss is; `--nan-policy` runs a
    whole step again.

    fetch: draws from `source`; there to be timed and watched. reads: whether this rank's stages need data at all;
    without it nothing is drawn, and every microbatch is empty.
    """

    def __init__(
        self, source: Iterator[Any], *, fetch: Callable[[Iterator[Any]], Any] = next, reads: bool = True
    ) -> None:
        self._source = source
        self._fetch = fetch
        self._reads = reads
        self._kept: list[Any] = []

    def begin_step(self) -> None:
        """Forget the last step's batches."""
        self._kept.clear()

    def microbatch(self, index: int) -> Any:
        """Microbatch `index` of the step; drawn, with those before it, at the first request."""
        if not self._reads:
            return EMPTY
        while len(self._kept) <= index:
            self._kept.append(self._fetch(self._source))
        return self._kept[index]


EMPTY: Mapping[str, Any] = {}
