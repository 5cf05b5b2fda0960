"""When a row's computations use which units: moments, uses and the gaps between them; what whole gradients take.

[Note: moments] A row's accesses are numbered through, in row order: these are its moments, and one more stands for the
row's end. An operation of data parallelism belongs to a moment: it is issued when that access begins, or before the
computation is called where it is the computation's first.
"""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron.core.pipeline_parallel.plan.held.lanes import UnderWay, lane_of
from megatron.core.pipeline_parallel.plan.held.units import RankUnits
from megatron.core.pipeline_parallel.plan.ir import HSDP_ALL_REDUCE, IS_COMPUTE, REDUCE, RawOp, Row
from megatron.core.pipeline_parallel.plan.placement import Placement
from megatron.core.pipeline_parallel.plan.residency import Grouping, Residency


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
    """places: of computations in the row. firsts: their first moments, and the end. reads: by unit, when its weights
    are in use; consecutive accesses are one use, whatever stands between them that reads no weights; apart: only
    neighbours are, so that a W between two of them may have the room. adds: by unit, when a computation contributes to
    its gradients, from the first access to the last. num_moments: without the end. most_read: the most bytes of weights
    that one access reads."""

    def __init__(self, row: Row, units: RankUnits, *, apart: bool = False) -> None:
        self.row, self.units = row, units
        self.places: list[int] = []
        self.firsts: list[int] = []
        self.reads: list[list[Span]] = [[] for _ in range(len(units))]
        self.adds: list[list[Span]] = [[] for _ in range(len(units))]
        last_read = [-2] * len(units)  # by number of the reading access
        read_together: set[tuple[int, ...]] = set()
        moment = reading = 0
        for place, op in enumerate(row):
            if not IS_COMPUTE[op[0]]:
                continue
            self.places.append(place)
            self.firsts.append(moment)
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
        self.firsts.append(moment)
        self.num_moments = moment
        self.most_read = max(
            (sum(units.weight_bytes[unit] for unit in one) for one in read_together), default=0
        )

    def most_adding(self, asked: Residency) -> int:
        """The most bytes of gradients that are being added to or summed, if none are kept."""
        summed = reductions(self, asked, [gap for gap in self.gaps[1] if not gap.size])
        return max(gradients_held(self, summed, reduced_first=True), default=0)

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


def grouping_of(
    placement: Placement,
    units: Sequence[RankUnits],
    groups: Sequence[Sequence[Sequence[dict[int, int]]]],
) -> Grouping:
    """By stage and unit how many microbatches each REDUCE sums up. units, groups (of `RowWalk`): by rank."""
    return tuple(
        tuple(
            tuple(group.get(stage, 0) for group in groups[rank][number]) for number in units[rank].of[stage]
        )
        for stage, rank in enumerate(placement.ranks())
    )


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
    def whole(self) -> Sequence[int]:
        """Units whose gradients grow or wait."""
        return tuple(self._whole)

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


class Stay(NamedTuple):
    """A unit's weights are gathered, or its gradients unreduced, from one use to another without a break."""

    unit: int
    uses: Sequence[Span]
    first: int
    last: int


Issued = tuple[int, int, Stay]  # moment, kind of the operation, what it begins or ends


def stays(spans: Sequence[Sequence[Span]], kept: Iterable[Gap], *, weights: bool) -> list[Stay]:
    """Uses joined over the gaps that are kept, by the moment at which they begin."""
    joined = {(gap.unit, gap.index) for gap in kept if gap.weights == weights}
    found: list[Stay] = []
    for unit, mine in enumerate(spans):
        start = 0
        for index, use in enumerate(mine):
            if (unit, index) not in joined:
                found.append(Stay(unit, mine[start : index + 1], mine[start].first, use.last))
                start = index + 1
    return sorted(found, key=lambda stay: stay.first)


def reductions(uses: RowUses, residency: Residency, kept: Iterable[Gap]) -> list[Issued]:
    """Each unit's gradients are reduced behind each of its stays, in the order of their ends. A unit's sum over
    instances, behind its last reduction, waits for that one, and so stands behind the next one in the row."""
    groups = sorted(stays(uses.adds, kept, weights=False), key=lambda stay: stay.last)
    last = {stay.unit: stay for stay in groups}
    issued: list[Issued] = []
    waiting: Stay | None = None
    for stay in groups:
        moment = stay.last + 1
        if not residency.overlap_reduce:  # behind the computation, or the row
            behind = uses.firsts[bisect_left(uses.firsts, moment)]
            moment = behind if residency.grads_sharded else uses.num_moments
        issued.append((moment, REDUCE, stay))
        if waiting is not None:
            issued.append((moment, HSDP_ALL_REDUCE, waiting))
        has_instances = uses.units.units[stay.unit].repeated
        waiting = stay if has_instances and last[stay.unit] is stay else None
    return issued if waiting is None else [*issued, (uses.num_moments, HSDP_ALL_REDUCE, waiting)]


def gradients_held(uses: RowUses, issued: Sequence[Issued], *, reduced_first: bool) -> list[int]:
    """By moment, the most bytes of whole gradients and of those under way. reduced_first: as in `written`; else what is
    reduced at a moment is held together with what ends there."""
    gradients, held, now = WholeGradients(uses.units), list[int](), 0
    # At one moment what is issued comes before what begins, and accumulators of further uses come behind both.
    events = [(moment, 0, at) for at, (moment, _, _) in enumerate(issued)]
    for at, (_, kind, stay) in enumerate(issued):
        if kind == REDUCE:
            events.append((stay.first, 1, at))
            events += [(use.last, 2, at) for use in stay.uses if uses.units.extra_bytes]
    for moment, what, at in sorted(events):
        _, kind, stay = issued[at]
        held += [now] * (moment - len(held))
        if what == 0:
            lane, size = lane_of(kind), gradients.taken(stay.unit) if kind == REDUCE else 0
            gradients.under.of(stay.unit)
            gradients.under.before_one_more(lane)
            gradients.under.begin(lane, stay.unit, (size, 0.0))
        elif what == 1:
            gradients.begin(stay.unit)
        else:
            for stage in {use.begin[1] for use in stay.uses if use.last == moment}:
                gradients.complete(stay.unit, stage)
        now = gradients.growing + gradients.under_way
    held += [now] * (uses.num_moments - len(held))
    return held if reduced_first else [max(pair) for pair in zip(held, [0, *held], strict=False)]
