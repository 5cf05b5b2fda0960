"""One row with its operations of data parallelism: from what is kept to what is issued when."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from megatron.core.pipeline_parallel.plan.held.row_uses import (
    Gap,
    RowUses,
    Span,
    WholeGradients,
    bytes_by_moment,
)
from megatron.core.pipeline_parallel.plan.ir import HSDP_ALL_REDUCE, REDUCE, UNSHARD, RawOp, Row
from megatron.core.pipeline_parallel.plan.kinds import IS_COMPUTE, IS_VALIDATION
from megatron.core.pipeline_parallel.plan.residency import Residency


class Stay(NamedTuple):
    """A unit's weights are gathered, or its gradients unreduced, from one use to another without a break."""

    unit: int
    uses: Sequence[Span]
    first: int
    last: int


Issue = tuple[int, Stay]  # the kind of an operation, and what it begins or ends
Issued = Mapping[int, Sequence[Issue]]  # by moment


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

    room: by moment, bytes of whole weights for gathers ahead, all that is gathered included. No unit is gathered ahead
    of its own last use. overlap: else each is issued at its first use.
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


def reductions(uses: RowUses, residency: Residency, kept: Iterable[Gap]) -> Issued:
    """Each unit's gradients are reduced behind each of its stays, in the order of their ends. A unit's sum over
    instances, behind its last reduction, waits for that one, and so stands behind the next one in the row."""
    groups = sorted(stays(uses.adds, kept, weights=False), key=lambda stay: stay.last)
    last = {stay.unit: stay for stay in groups}
    firsts = [first for _, first in uses.computations]
    issued: defaultdict[int, list[Issue]] = defaultdict(list)
    waiting: list[Issue] = []
    for stay in groups:
        moment = stay.last + 1
        if not residency.overlap_reduce:  # behind the computation, or the row
            place = bisect_left(firsts, moment)
            within = residency.grads_sharded and place < len(firsts)
            moment = firsts[place] if within else uses.num_moments
        issued[moment] += [(REDUCE, stay), *waiting]
        waiting = [(HSDP_ALL_REDUCE, stay)] if residency.outer > 1 and last[stay.unit] is stay else []
    issued[uses.num_moments] += waiting
    return issued


def gradients_held(uses: RowUses, reduced: Issued, *, reduced_first: bool) -> list[int]:
    """By moment, the most bytes of whole gradients and of those under way. reduced_first: as in `written`."""
    units = uses.units
    begins: defaultdict[int, list[int]] = defaultdict(list)
    completes: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for unit, spans in enumerate(uses.adds):
        for span in spans:
            begins[span.first].append(unit)
            if units.extra_bytes:
                completes[span.last].append((unit, span.begin[1]))
    gradients, most = WholeGradients(units), []
    for moment in range(uses.num_moments):
        before = 0 if reduced_first else gradients.growing + gradients.under_way
        for kind, stay in reduced.get(moment, ()):
            does = gradients.reduce if kind == REDUCE else gradients.outer_sum
            does(stay.unit)
        for unit in begins.get(moment, ()):
            gradients.begin(unit)
        for unit, stage in completes.get(moment, ()):
            gradients.complete(unit, stage)
        most.append(max(before, gradients.growing + gradients.under_way))
    return most


def written(uses: RowUses, issued: Sequence[Issued]) -> Row:
    """The row with what is issued; at one moment in this order: weights are freed first, and gathers come before
    reductions, as computations wait for gathers sooner, or where what is gathered has no room before older reductions
    are waited for, behind them. What belongs to the row's end stands behind its last transfer and before the step is
    decided on."""
    row, firsts = uses.row, [*(first for _, first in uses.computations), uses.num_moments]
    moments = set().union(*issued)

    def at(moment: int, begun: int) -> list[RawOp]:
        ops = []
        for kind, stay in (one for each in issued for one in each.get(moment, ())):
            # Named as a unit of the stage that uses it first, or last.
            stage = stay.uses[0 if kind == UNSHARD else -1].begin[1]
            place = uses.units.of[stage].index(stay.unit)
            ops.append((kind, stage, -1, begun, place, place + 1, -1, -1))
        return ops

    found: list[RawOp] = []
    computation = 0
    end = 1 + max(place for place, op in enumerate(row) if not IS_VALIDATION[op[0]])
    for op in row[:end]:
        if IS_COMPUTE[op[0]]:
            first = firsts[computation]
            computation += 1
            for moment in range(first, firsts[computation]):
                if moment in moments:
                    found += at(moment, moment - first + 1 if moment > first else 0)
        found.append(op)
    return (*found, *at(uses.num_moments, 0), *row[end:])
