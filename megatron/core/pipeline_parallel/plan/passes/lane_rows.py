"""One row with its operations of data parallelism: from what is kept to what is issued when."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron.core.pipeline_parallel.plan.ir import HSDP_ALL_REDUCE, REDUCE, RESHARD, UNSHARD, RawOp, Row
from megatron.core.pipeline_parallel.plan.kinds import IS_COMPUTE, IS_VALIDATION
from megatron.core.pipeline_parallel.plan.passes.keep import bytes_by_moment
from megatron.core.pipeline_parallel.plan.residency import Residency
from megatron.core.pipeline_parallel.plan.residency_walk import WholeGradients
from megatron.core.pipeline_parallel.plan.row_uses import Gap, RowUses, Span


@dataclass(frozen=True)
class Stay:
    """A unit's weights are gathered, or its gradients unreduced, from one use to another without a break."""

    unit: int
    uses: Sequence[Span]
    first: int
    last: int


def stays(spans: Sequence[Sequence[Span]], kept: Iterable[Gap], *, weights: bool) -> list[Stay]:
    """Uses joined over the gaps that are kept, by the moment at which they begin."""
    joined = {(gap.unit, gap.index) for gap in kept if gap.weights == weights}
    found: list[Stay] = []
    for unit, mine in enumerate(spans):
        at = 0
        while at < len(mine):
            end = at
            while (unit, end) in joined:
                end += 1
            found.append(Stay(unit, mine[at : end + 1], mine[at].first, mine[end].last))
            at = end + 1
    return sorted(found, key=lambda stay: stay.first)


def gather_moments(
    gathered: Sequence[Stay], sizes: Sequence[int], room: Sequence[float], *, overlap: bool
) -> list[int]:
    """When each gather is issued: as early as the room allows, in the order in which units are needed.

    room: by moment, bytes of whole weights for gathers ahead, all that is gathered included. No unit is
    gathered ahead of its own last use. overlap: else each is issued at its first use.
    """
    if not overlap:
        return [stay.first for stay in gathered]
    held = bytes_by_moment(len(room) + 1, ((one.first, one.last + 1, sizes[one.unit]) for one in gathered))
    moments = []
    latest, freed = 0, [0] * len(sizes)
    for stay in gathered:
        size, least = sizes[stay.unit], max(latest, freed[stay.unit])
        moment = stay.first
        while moment > least and held[moment - 1] + size <= room[moment - 1]:
            moment -= 1
            held[moment] += size
        moments.append(moment)
        latest, freed[stay.unit] = moment, stay.last + 1
    return moments


class LaneRow:
    """Collects operations by moment, and writes them into the row. At one moment weights are freed first, and
    gathers come before reductions, as computations wait for gathers sooner. reduced_first: behind them, where
    what is gathered has no room before older reductions are waited for."""

    def __init__(self, uses: RowUses, residency: Residency, *, reduced_first: bool = False) -> None:
        self._uses, self._residency, self._reduced_first = uses, residency, reduced_first
        self._firsts = [first for _, first in uses.computations]
        self._freed: defaultdict[int, list[RawOp]] = defaultdict(list)
        self._gathered: defaultdict[int, list[RawOp]] = defaultdict(list)
        self._reduced: defaultdict[int, list[RawOp]] = defaultdict(list)

    def gather(self, stay: Stay, moment: int) -> None:
        self._gathered[moment].append(self._op(UNSHARD, stay))

    def free(self, stay: Stay) -> None:
        self._freed[stay.last + 1].append(self._op(RESHARD, stay))

    def reduce(self, groups: Sequence[Stay]) -> None:
        """Each unit's gradients behind each of its stays. groups: by their ends. A unit's sum over instances,
        behind its last reduction, waits for that one, and so stands behind the next one in the row."""
        last = {stay.unit: stay for stay in groups}
        waiting: list[RawOp] = []
        end = self._uses.num_moments
        for stay in groups:
            moment = stay.last + 1
            if not self._residency.overlap_reduce:
                place = bisect_left(self._firsts, moment)
                moment = (
                    self._firsts[place] if self._residency.grads_cut and place < len(self._firsts) else end
                )
            self._reduced[moment] += [self._op(REDUCE, stay), *waiting]
            waiting = []
            if self._residency.outer > 1 and last[stay.unit] is stay:
                waiting.append(self._op(HSDP_ALL_REDUCE, stay))
        self._reduced[end] += waiting

    def gradients_held(self) -> list[int]:
        """By moment, the most bytes of whole gradients and of those under way."""
        units = self._uses.units
        begins: defaultdict[int, list[int]] = defaultdict(list)
        completes: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        for unit, spans in enumerate(self._uses.adds):
            for span in spans:
                begins[span.first].append(unit)
                if units.extra_bytes:
                    completes[span.last].append((unit, span.begin[1]))
        gradients, most = WholeGradients(units), []
        for moment in range(self._uses.num_moments):
            before = 0 if self._reduced_first else gradients.growing + gradients.under_way
            for op in self._reduced.get(moment, ()):
                does = gradients.reduce if op[0] == REDUCE else gradients.outer_sum
                does(units.of[op[1]][op[4]])
            for unit in begins.get(moment, ()):
                gradients.begin(unit)
            for unit, stage in completes.get(moment, ()):
                gradients.complete(unit, stage)
            most.append(max(before, gradients.growing + gradients.under_way))
        return most

    def _op(self, kind: int, stay: Stay) -> RawOp:
        """Named as a unit of the stage that uses it first, or last."""
        stage = stay.uses[0 if kind == UNSHARD else -1].begin[1]
        place = self._uses.units.of[stage].index(stay.unit)
        return (kind, stage, -1, 0, place, place + 1, -1, -1)

    def write(self) -> Row:
        """The row. What belongs to its end stands behind its last transfer and before the step is decided on."""
        row, firsts = self._uses.row, [*self._firsts, self._uses.num_moments]
        moments = {*self._freed, *self._gathered, *self._reduced}
        written: list[RawOp] = []
        computation = 0
        end = 1 + max(place for place, op in enumerate(row) if not IS_VALIDATION[op[0]])
        for op in row[:end]:
            if IS_COMPUTE[op[0]]:
                first = firsts[computation]
                computation += 1
                for moment in range(first, firsts[computation]):
                    if moment in moments:
                        written += self._at(moment, moment - first + 1 if moment > first else 0)
            written.append(op)
        return (*written, *self._at(self._uses.num_moments, 0), *row[end:])

    def _at(self, moment: int, begun: int) -> list[RawOp]:
        gathered, reduced = self._gathered[moment], self._reduced[moment]
        ops = self._freed[moment] + (reduced + gathered if self._reduced_first else gathered + reduced)
        return [(*op[:3], begun, *op[4:]) for op in ops] if begun else ops
