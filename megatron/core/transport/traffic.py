"""What collectives move: calls and payload bytes, by kind (floor 0, pure).

The payload of a collective is its full buffer: what is gathered, or reduced, counted once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from megatron.core.transport.traffic_counter import NOTHING, Moved, TrafficCounter


def moved(payloads: Iterable[int], times: int = 1) -> Moved:
    """So many times a call for each payload; what is empty needs none."""
    sizes = [size for size in payloads if size]
    return Moved(times * len(sizes), times * sum(sizes))


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What a rank's collectives move in a step: over the inner ranks, and over the outer ones. waited_s: how long the
    rank stood waiting for them."""

    all_gather: Moved = NOTHING
    reduce_scatter: Moved = NOTHING
    all_reduce: Moved = NOTHING
    outer_all_gather: Moved = NOTHING
    outer_reduce_scatter: Moved = NOTHING
    outer_all_reduce: Moved = NOTHING
    waited_s: float = dataclasses.field(default=0.0, compare=False)

    def __add__(self, other: Traffic) -> Traffic:
        names = [field.name for field in dataclasses.fields(Traffic)]
        return Traffic(**{name: getattr(self, name) + getattr(other, name) for name in names})

    def __sub__(self, other: Traffic) -> Traffic:
        names = [field.name for field in dataclasses.fields(Traffic)]
        return Traffic(**{name: getattr(self, name) - getattr(other, name) for name in names})


def traffic_of(gather: TrafficCounter, reduce: TrafficCounter, outer: TrafficCounter) -> Traffic:
    """What groups of gathers and reductions over the inner ranks, and the one over the outer ranks, have moved."""
    each = {id(one): one for one in (gather, reduce, outer)}.values()
    return Traffic(
        gather.moved("all_gather"),
        reduce.moved("reduce_scatter"),
        reduce.moved("all_reduce"),
        outer.moved("all_gather"),
        outer.moved("reduce_scatter"),
        outer.moved("all_reduce"),
        waited_s=sum(one.waited_s for one in each),
    )
