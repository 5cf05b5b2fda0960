"""What collectives move: calls and payload bytes, by kind (floor 0, pure).

The payload of a collective is its full buffer: what is gathered, or reduced, counted once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class Moved:
    """Calls of one collective and the bytes they were called with."""

    calls: int = 0
    payload_bytes: int = 0

    def __add__(self, other: Moved) -> Moved:
        return Moved(self.calls + other.calls, self.payload_bytes + other.payload_bytes)


def moved(payloads: Iterable[int], times: int = 1) -> Moved:
    """So many times a call for each payload; what is empty needs none."""
    sizes = [size for size in payloads if size]
    return Moved(times * len(sizes), times * sum(sizes))


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What a rank's collectives move in a step: over the inner ranks, and over the outer ones."""

    all_gather: Moved = Moved()
    reduce_scatter: Moved = Moved()
    all_reduce: Moved = Moved()
    outer_all_gather: Moved = Moved()
    outer_reduce_scatter: Moved = Moved()
    outer_all_reduce: Moved = Moved()

    def __add__(self, other: Traffic) -> Traffic:
        names = [field.name for field in dataclasses.fields(Traffic)]
        return Traffic(**{name: getattr(self, name) + getattr(other, name) for name in names})
