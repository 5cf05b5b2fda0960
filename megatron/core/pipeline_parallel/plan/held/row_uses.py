"""When a row's computations use which units: moments, uses and the gaps between them; what whole gradients take.

[Note: moments] A row's accesses are numbered through, in row order: these are its moments, and one more stands for the
row's end. An operation of data parallelism belongs to a moment: it is issued when that access begins, or before the
computation is called where it is the computation's first.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from megatron.core.pipeline_parallel.plan.held.units import RankUnits
from megatron.core.pipeline_parallel.plan.ir import IS_COMPUTE, REDUCE, RawOp, Row
from megatron.core.pipeline_parallel.plan.lanes import UnderWay, lane_of


@dataclass(slots=True)
class Span:
    """Moments [first, last] at which a unit is in use. begin, end: the computations at both ends."""

    first: int
    last: int
    begin: RawOp
    end: RawOp


class Gap(NamedTuple):
    """Moments [start, end) between a unit's use number `index` and the next one, and the bytes of keeping it. weights:
    gathered ones; else gradients."""

    start: int
    end: int
    size: int
    unit: int
    index: int  # type: ignore[assignment]  # no one looks for values in a gap
    weights: bool


class RowUses:
    """computations: (place in the row, first moment). reads: by unit, when its weights are in use; consecutive accesses
    are one use, whatever stands between them that reads no weights; apart: only neighbours are, so that a W between two
    of them may have the room. adds: by unit, when a computation contributes to its gradients, from the first access to
    the last. num_moments: without the end. most_read: the most bytes of weights that one access reads."""

    def __init__(self, row: Row, units: RankUnits, *, apart: bool = False) -> None:
        self.row, self.units = row, units
        self.computations: list[tuple[int, int]] = []
        self.reads: list[list[Span]] = [[] for _ in range(len(units))]
        self.adds: list[list[Span]] = [[] for _ in range(len(units))]
        last_read = [-2] * len(units)  # by number of the reading access
        read_together: set[tuple[int, ...]] = set()
        moment = reading = 0
        for place, op in enumerate(row):
            if not IS_COMPUTE[op[0]]:
                continue
            self.computations.append((place, moment))
            for use in units.uses(op):
                for unit in use.reads:
                    mine = self.reads[unit]
                    if last_read[unit] == reading - 1 and not (apart and mine[-1].last < moment - 1):
                        mine[-1].last = moment
                        mine[-1].end = op
                    else:
                        mine.append(Span(moment, moment, op, op))
                    last_read[unit] = reading
                if use.reads:
                    reading += 1
                    read_together.add(use.reads)
                for unit in use.begins:
                    self.adds[unit].append(Span(moment, moment, op, op))
                for unit in use.completes:
                    self.adds[unit][-1].last = moment
                moment += 1
        self.num_moments = moment
        self.most_read = max(
            (sum(units.weight_bytes[unit] for unit in one) for one in read_together), default=0
        )

    def most_adding(self, *, overlap_reduce: bool) -> int:
        """The most bytes of gradients that are being added to or summed, if each is reduced at once, or behind the
        computation that completes it."""
        gradients, most = WholeGradients(self.units), 0
        for place, _ in self.computations:
            op, complete = self.row[place], list[int]()
            uses = self.units.uses(op)
            for use in uses:
                for unit in use.begins:
                    gradients.begin(unit)
                for unit in use.completes:
                    gradients.complete(unit, op[1])
                    if self.units.grad_bytes[unit]:
                        complete.append(unit)
                most = max(most, gradients.held)
                while complete and (overlap_reduce or use is uses[-1]):
                    gradients.sum(REDUCE, complete.pop(0))
        return most

    @functools.cached_property
    def gaps(self) -> tuple[list[Gap], list[Gap]]:
        """Between uses of weights, and between contributions to gradients."""
        grad_sizes = list(self.units.grad_bytes)
        for (unit, _), more in self.units.extra_bytes.items():
            grad_sizes[unit] += more

        def between(spans: list[list[Span]], sizes: list[int], *, weights: bool) -> list[Gap]:
            return [
                Gap(mine[at].last + 1, mine[at + 1].first, sizes[unit], unit, at, weights)
                for unit, mine in enumerate(spans)
                for at in range(len(mine) - 1)
            ]

        weights = between(self.reads, self.units.weight_bytes, weights=True)
        return weights, between(self.adds, grad_sizes, weights=False)


def bytes_by_moment(count: int, intervals: Iterable[tuple[int, int, int]]) -> list[int]:
    """Of (start, end, size), held at moments [start, end) of `count`."""
    change = [0] * (count + 1)
    for start, end, size in intervals:
        change[start] += size
        change[end] -= size
    return list(itertools.accumulate(change[:-1]))


class WholeGradients:
    """Bytes of a rank's whole gradients. growing: of those that still grow or wait to be summed. under: what is being
    summed, with its bytes and when it ends, where that is known."""

    def __init__(self, units: RankUnits, under: UnderWay[tuple[int, float]] | None = None) -> None:
        self._units = units
        self.growing = 0
        self.under = UnderWay() if under is None else under
        self._whole: dict[int, int] = {}  # unit -> bytes
        self._extra: set[tuple[int, int]] = set()  # (unit, stage) whose accumulators are there

    @property
    def held(self) -> int:
        """With what is under way."""
        return self.growing + self.under_way

    @property
    def under_way(self) -> int:
        return sum([what[0] for _, _, what in self.under.entries])

    def begin(self, unit: int) -> None:
        """A computation contributes to them from here on; before that what is under way of them is through."""
        if unit not in self._whole:
            self.under.of(unit)
            self._whole[unit] = self._units.grad_bytes[unit]
            self.growing += self._units.grad_bytes[unit]

    def complete(self, unit: int, stage: int) -> None:
        """Its last access of a computation begins."""
        key = unit, stage
        if key in self._units.extra_bytes and key not in self._extra:
            self._extra.add(key)
            self._whole[unit] += self._units.extra_bytes[key]
            self.growing += self._units.extra_bytes[key]

    def taken(self, unit: int) -> int:
        """By a reduction, which reads so many bytes until it is through."""
        size = self._whole.pop(unit)
        self._extra = {key for key in self._extra if key[0] != unit}
        self.growing -= size
        return size

    def sum(self, kind: int, unit: int) -> None:
        """A reduction, or a sum over instances, of which nobody asks when it ends."""
        lane, size = lane_of(kind), self.taken(unit) if kind == REDUCE else 0
        self.under.of(unit)
        self.under.before_one_more(lane)
        self.under.begin(lane, unit, (size, 0.0))
