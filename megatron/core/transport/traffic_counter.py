"""What the collectives of a group have moved: calls and payload bytes; how long they were waited for (floor 0, pure).

The payload of a collective is its full buffer: what is gathered, or reduced, counted once.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Moved:
    """Calls of one collective and the bytes they were called with."""

    calls: int = 0
    payload_bytes: int = 0

    def __add__(self, other: Moved) -> Moved:
        return Moved(self.calls + other.calls, self.payload_bytes + other.payload_bytes)

    def __sub__(self, other: Moved) -> Moved:
        return Moved(self.calls - other.calls, self.payload_bytes - other.payload_bytes)


NOTHING = Moved()


class TrafficCounter:
    """Counts since the group was made; whoever wants to know what a step has moved takes differences.

    waited_s: how long the host stood in waits for collectives under way. waits: it stands in one, or never came out
    of it.
    """

    def __init__(self) -> None:
        self._moved: dict[str, tuple[int, int]] = {}  # calls, bytes: of a `Moved`, which takes longer to make
        self.waited_s = 0.0
        self.waits = False

    def wait_for(self, wait: Callable[[], object]) -> None:
        """Call it: the host waits for a collective. Where that fails, it is still known that the host stood there. By
        hand: in cold caches a context manager costs as much as the rest of a wait."""
        began = time.monotonic()
        self.waits = True
        wait()
        self.waits = False
        self.waited_s += time.monotonic() - began

    def count(self, collective: str, payload_bytes: int) -> None:
        calls, before = self._moved.get(collective, (0, 0))
        self._moved[collective] = (calls + 1, before + payload_bytes)

    def moved(self, collective: str) -> Moved:
        """Of "all_gather", "reduce_scatter", "all_reduce" (`sum_gradients` is one) or "broadcast"."""
        return Moved(*self._moved.get(collective, (0, 0)))
