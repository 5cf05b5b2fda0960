"""When a row's computations use which units: moments, uses and the gaps between them; what whole gradients take.

[Note: moments] A row's accesses are numbered through, in row order: these are its moments, and one more stands for the
row's end. An operation of data parallelism belongs to a moment: it is issued when that access begins, or before the
computation is called where it is the computation's first.

[Note: under way] Gradients are under way from their REDUCE on, until somebody waits for it: the second reduction or sum
over instances behind it, as two are under way at most; new gradients of the unit; its sum over instances; the row's
end. All these are places in the row, so what is held depends on no clock.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from megatron.core.pipeline_parallel.plan.held.units import RankUnits
from megatron.core.pipeline_parallel.plan.ir import IS_COMPUTE, RawOp, Row
from megatron.core.pipeline_parallel.plan.residency import MOST_UNDER_WAY


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
    the last. num_moments: without the end. most_adding: the most bytes of gradients that are being added to or reduced,
    if each is reduced at once (overlap_reduce), or behind the computation. most_read: the most bytes of weights that
    one access reads."""

    def __init__(
        self, row: Row, units: RankUnits, *, overlap_reduce: bool = True, apart: bool = False
    ) -> None:
        self.row, self.units = row, units
        self.computations: list[tuple[int, int]] = []
        self.reads: list[list[Span]] = [[] for _ in range(len(units))]
        self.adds: list[list[Span]] = [[] for _ in range(len(units))]
        self.most_adding = 0
        last_read = [-2] * len(units)  # by number of the reading access
        under: deque[int] = deque(maxlen=MOST_UNDER_WAY)
        complete: list[int] = []  # bytes of gradients
        read_together: set[tuple[int, ...]] = set()
        moment = reading = adding = 0
        for place, op in enumerate(row):
            if not IS_COMPUTE[op[0]]:
                continue
            self.computations.append((place, moment))
            uses = units.uses(op)
            for use in uses:
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
                    adding += units.grad_bytes[unit]
                for unit in use.completes:
                    self.adds[unit][-1].last = moment
                    more = units.extra_bytes.get((unit, op[1]), 0)
                    adding += more
                    complete.append(units.grad_bytes[unit] + more)
                if complete and (overlap_reduce or use is uses[-1]):
                    self.most_adding = max(self.most_adding, adding + sum(under))
                    under.extend(complete)
                    adding -= sum(complete)
                    complete = []
                moment += 1
        self.num_moments = moment
        self.most_read = max(
            (sum(units.weight_bytes[unit] for unit in one) for one in read_together), default=0
        )

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
    """Bytes of a rank's whole gradients. growing: of those that still grow or wait. under_way: of those that are being
    reduced, see [Note: under way]."""

    def __init__(self, units: RankUnits) -> None:
        self._units = units
        self.growing = self.under_way = 0
        self._whole: dict[int, int] = {}  # unit -> bytes
        self._extra: set[tuple[int, int]] = set()  # (unit, stage) whose accumulators are there
        self._under: list[tuple[int, int]] = []  # reductions and sums over instances: unit, bytes

    def begin(self, unit: int) -> None:
        """A computation contributes to them from here on."""
        if unit not in self._whole:
            self.wait_for(unit)
            self._whole[unit] = self._units.grad_bytes[unit]
            self.growing += self._units.grad_bytes[unit]

    def complete(self, unit: int, stage: int) -> None:
        """Its last access of a computation begins."""
        one = unit, stage
        if one in self._units.extra_bytes and one not in self._extra:
            self._extra.add(one)
            self._whole[unit] += self._units.extra_bytes[one]
            self.growing += self._units.extra_bytes[one]

    def reduce(self, unit: int) -> None:
        size = self._whole.pop(unit)
        self._extra = {one for one in self._extra if one[0] != unit}
        self.growing -= size
        self._start(unit, size)

    def outer_sum(self, unit: int) -> None:
        self.wait_for(unit)
        self._start(unit, 0)

    def _start(self, unit: int, size: int) -> None:
        if len(self._under) == MOST_UNDER_WAY:
            self.wait_for(self._under[0][0])
        self._under.append((unit, size))
        self.under_way += size

    def wait_for(self, unit: int | None = None) -> None:
        """What is under way of a unit, or of all, is through."""
        self._under = [one for one in self._under if one[0] != unit and unit is not None]
        self.under_way = sum(size for _, size in self._under)
