"""Waiting for other processes, in small pauses between which the process's owner may end it (floor 0).

A run's signal handlers only take a note, which the training loop reads between iterations. Whoever waits before that
(for a lock, a lease, ranks that do not come) would not hear of it: `pause` asks instead of `time.sleep`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar

_ask: ContextVar[Callable[[], None]] = ContextVar("asked before each pause", default=lambda: None)


@contextlib.contextmanager
def ended_by(ask: Callable[[], None]) -> Iterator[None]:
    """Within it every `pause` of this thread calls `ask` first, which raises where waiting is to end."""
    before = _ask.set(ask)
    try:
        yield
    finally:
        _ask.reset(before)


def pause(seconds: float) -> None:
    """Sleep between two looks at what is waited for. Raises what `ended_by` was given."""
    _ask.get()()
    time.sleep(seconds)
