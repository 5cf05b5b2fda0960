"""What collectives move: calls and payload bytes, by kind; how long they were waited for (floor 0, pure).

The payload of a collective is its full buffer: what is gathered, or reduced, counted once.
"""

from __future__ import annotations

import dataclasses
import operator
import time
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Moved:
    """Calls of one collective and the bytes they were called with."""

    calls: int = 0
    payload_bytes: int = 0

    def __add__(self, other: Moved) -> Moved:
        if other is NOTHING:
            return self
        return Moved(self.calls + other.calls, self.payload_bytes + other.payload_bytes)

    def __sub__(self, other: Moved) -> Moved:
        if other is NOTHING:
            return self
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
        counted = self._moved.get(collective)
        return NOTHING if counted is None else Moved(*counted)


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What a rank's collectives move in a step: over the inner ranks, and over the outer ones. sent: what of it this
    rank sends, all-reduces twice, as they go round twice. waited_s: how long the rank stood waiting for them."""

    all_gather: Moved = NOTHING
    reduce_scatter: Moved = NOTHING
    all_reduce: Moved = NOTHING
    outer_all_gather: Moved = NOTHING
    outer_reduce_scatter: Moved = NOTHING
    outer_all_reduce: Moved = NOTHING
    sent: Moved = dataclasses.field(default=NOTHING, compare=False)
    waited_s: float = dataclasses.field(default=0.0, compare=False)

    def __add__(self, other: Traffic) -> Traffic:
        return self._each(operator.add, other)

    def __sub__(self, other: Traffic) -> Traffic:
        return self._each(operator.sub, other)

    def _each(self, change: Callable[[Any, Any], Any], other: Traffic) -> Traffic:
        return Traffic(*map(change, _figures(self), _figures(other)))


_figures = operator.attrgetter(*(field.name for field in dataclasses.fields(Traffic)))


def traffic_of(
    gather: TrafficCounter, reduce: TrafficCounter, outer: TrafficCounter, sizes: tuple[int, int]
) -> Traffic:
    """What groups of gathers and reductions over the inner ranks, and the one over the outer ranks, have moved. sizes:
    how many ranks these are, inner and outer."""
    each = {id(one): one for one in (gather, reduce, outer)}.values()
    inner = gather.moved("all_gather"), reduce.moved("reduce_scatter"), reduce.moved("all_reduce")
    over = outer.moved("all_gather"), outer.moved("reduce_scatter"), outer.moved("all_reduce")
    sent = NOTHING
    for (gathered, scattered, summed), ranks in zip((inner, over), sizes, strict=True):
        whole = gathered + scattered + summed + summed
        if ranks > 1:
            sent += Moved(whole.calls, whole.payload_bytes * (ranks - 1) // ranks)
    return Traffic(*inner, *over, sent, sum(one.waited_s for one in each))
