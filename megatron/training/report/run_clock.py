"""The run's time less its pauses: what an iteration takes does not count evaluations, checkpoints and planning."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator


class RunClock:
    """clock: seconds, monotonic."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._paused_s = 0.0

    def now(self) -> float:
        """Seconds, of which only differences mean something."""
        return self._clock() - self._paused_s

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside takes no time. Not to be nested."""
        started = self._clock()
        try:
            yield
        finally:
            self._paused_s += self._clock() - started
