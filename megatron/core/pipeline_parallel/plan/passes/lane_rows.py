"""One row with its operations of data parallelism: from what is kept to what is issued when."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from megatron.core.pipeline_parallel.plan import ir
from megatron.core.pipeline_parallel.plan.held.row_uses import (
    Gap,
    RowUses,
    Span,
    WholeGradients,
    bytes_by_moment,
)
from megatron.core.pipeline_parallel.plan.ir import RawOp, Row
from megatron.core.pipeline_parallel.plan.residency import Residency


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


def reductions(uses: RowUses, residency: Residency, kept: Iterable[Gap]) -> list[Issued]:
    """Each unit's gradients are reduced behind each of its stays, in the order of their ends. A unit's sum over
    instances, behind its last reduction, waits for that one, and so stands behind the next one in the row."""
    groups = sorted(stays(uses.adds, kept, weights=False), key=lambda stay: stay.last)
    last = {stay.unit: stay for stay in groups}
    firsts = [first for _, first in uses.computations]
    issued: list[Issued] = []
    waiting: Stay | None = None
    for stay in groups:
        moment = stay.last + 1
        if not residency.overlap_reduce:  # behind the computation, or the row
            place = bisect_left(firsts, moment)
            within = residency.grads_sharded and place < len(firsts)
            moment = firsts[place] if within else uses.num_moments
        issued.append((moment, ir.REDUCE, stay))
        if waiting is not None:
            issued.append((moment, ir.HSDP_ALL_REDUCE, waiting))
        has_instances = uses.units.unit(stay.unit).repeated
        waiting = stay if has_instances and last[stay.unit] is stay else None
    return issued if waiting is None else [*issued, (uses.num_moments, ir.HSDP_ALL_REDUCE, waiting)]


def gradients_held(uses: RowUses, issued: Sequence[Issued], *, reduced_first: bool) -> list[int]:
    """By moment, the most bytes of whole gradients and of those under way. reduced_first: as in `written`; else what is
    reduced at a moment is held together with what ends there."""
    gradients, held, now = WholeGradients(uses.units), list[int](), 0
    # At one moment what is issued comes before what begins, and accumulators of further uses come behind both.
    events = [(moment, 0, at) for at, (moment, _, _) in enumerate(issued)]
    for at, (_, kind, stay) in enumerate(issued):
        if kind == ir.REDUCE:
            events.append((stay.first, 1, at))
            events += [(use.last, 2, at) for use in stay.uses if uses.units.extra_bytes]
    for moment, what, at in sorted(events):
        _, kind, stay = issued[at]
        held += [now] * (moment - len(held))
        if what == 0:
            gradients.sum(kind, stay.unit)
        elif what == 1:
            gradients.begin(stay.unit)
        else:
            for stage in {use.begin[1] for use in stay.uses if use.last == moment}:
                gradients.complete(stay.unit, stage)
        now = gradients.held
    held += [now] * (uses.num_moments - len(held))
    return held if reduced_first else [max(pair) for pair in zip(held, [0, *held], strict=False)]


def written(uses: RowUses, issued: Sequence[Issued]) -> Row:
    """The row with what is issued, at one moment in this order. What belongs to the row's end stands behind its last
    transfer and before the step is decided on."""
    row, firsts = uses.row, [*(first for _, first in uses.computations), uses.num_moments]
    by_moment: defaultdict[int, list[tuple[int, Stay]]] = defaultdict(list)
    for moment, kind, stay in issued:
        by_moment[moment].append((kind, stay))

    def at(moment: int, begun: int) -> list[RawOp]:
        ops = []
        for kind, stay in by_moment.get(moment, ()):
            # Named as a unit of the stage that uses it first, or last.
            stage = stay.uses[0 if kind == ir.UNSHARD else -1].begin[1]
            place = uses.units.of[stage].index(stay.unit)
            ops.append((kind, stage, -1, begun, place, place + 1, -1, -1))
        return ops

    found: list[RawOp] = []
    computation = 0
    end = 1 + max(place for place, op in enumerate(row) if not ir.IS_VALIDATION[op[0]])
    for op in row[:end]:
        if ir.IS_COMPUTE[op[0]]:
            first = firsts[computation]
            computation += 1
            for moment in range(first, firsts[computation]):
                if moment in by_moment:
                    found += at(moment, moment - first + 1 if moment > first else 0)
        found.append(op)
    return (*found, *at(uses.num_moments, 0), *row[end:])
