"""Rows with operations of data parallelism, by the policy or within a limit in bytes.

Under a limit room is known at every moment, and a row keeps to it by construction: a rank holds states at rest,
activations, the weights that an access reads, gradients that are added to or under way. What gradients take follows
from those that are kept over gaps; what they leave is for weights, kept and gathered ahead.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from megatron.core.pipeline_parallel.plan import ir
from megatron.core.pipeline_parallel.plan.costs import CostModel, activations
from megatron.core.pipeline_parallel.plan.held.lanes import LaneCosts, Lanes
from megatron.core.pipeline_parallel.plan.held.row_uses import (
    Gap,
    Issued,
    RowUses,
    Span,
    Stay,
    bytes_by_moment,
    gradients_held,
    grouping_of,
    reductions,
    stays,
)
from megatron.core.pipeline_parallel.plan.held.units import RankUnits, StageUnits, rank_units, residency_note
from megatron.core.pipeline_parallel.plan.ir import Plan, PlanError, RawOp, Row
from megatron.core.pipeline_parallel.plan.passes.belady import bytes_kept, keep_gaps, kept_gaps
from megatron.core.pipeline_parallel.plan.residency import Grouping, Residency
from megatron.core.pipeline_parallel.plan.simulate import Merit, simulate
from megatron.core.words import size_text

Groups = list[list[dict[int, int]]]

# Choices of gradients that are made until one fits; each looks for room in so many more moments ahead of a full one.
_TRIES, _BEFORE = 8, 4
_KEPT_OPERATIONS = 2_000


class ReservedRoom(NamedTuple):
    """What is left of the room when gaps are chosen.

    share: to gathers ahead alone. ahead: besides, as many bytes as bind gathers ahead elsewhere. under_way: to
    reductions, as much as where no gradients are kept. grads_first: weights are kept in what gradients leave.
    reduced_first: reductions come before gathers of the same moment.
    """

    share: float = 0.0
    ahead: bool = True
    under_way: bool = True
    grads_first: bool = False
    reduced_first: bool = False


class TooFullError(PlanError):
    """A rank holds more than it may, by `over` bytes."""

    def __init__(self, rank: int, limit: float, over: float) -> None:
        super().__init__(f"rank {rank} holds {size_text(limit + over)}, the limit is {size_text(limit)}")
        self.over = over


@dataclasses.dataclass(eq=False)
class RowMaker:
    """Makes plans that differ in what the search chooses. Of small plans the rows that were made are kept, or why there
    are none: most of what is tried differs from what was tried before on one rank."""

    plan: Plan
    stages: tuple[StageUnits, ...]
    residency: Residency
    costs: CostModel
    lanes: LaneCosts | None
    grouping: Grouping | None = None

    def __post_init__(self) -> None:
        self.units = units = rank_units(self.plan.placement, self.stages)
        apart = self.residency.limit is not None
        # By rank and row, when it uses which units.
        self.uses = functools.cache(lambda rank, row: RowUses(row, units[rank], apart=apart))
        self._rows: dict[tuple[int, Row, ReservedRoom], tuple[Row, Groups] | PlanError] = {}

    def made(self, order: Plan, reserve: ReservedRoom) -> Plan:
        """Raises PlanError where it does not fit."""
        made = [self._kept_row(rank, row, reserve) for rank, row in enumerate(order.rows)]
        groups = grouping_of(order.placement, self.units, [groups for _, groups in made])
        note = residency_note(self.residency, self.stages, groups)
        return dataclasses.replace(order, rows=tuple(row for row, _ in made), residency=note)

    def _kept_row(self, rank: int, row: Row, reserve: ReservedRoom) -> tuple[Row, Groups]:
        found = self._rows.get((rank, row, reserve))
        if found is None:
            try:
                found = self._row(self.uses(rank, row), reserve)
            except PlanError as error:
                found = error
            if self.plan.num_ops <= _KEPT_OPERATIONS:
                self._rows[rank, row, reserve] = found
        if isinstance(found, PlanError):
            raise found.with_traceback(None)
        return found

    def over(self, order: Plan, reserve: ReservedRoom) -> list[float]:
        """By rank, bytes by which its row is over the limit. Raises PlanError for what cannot be at all."""

        def over(rank: int, row: Row) -> float:
            try:
                self._kept_row(rank, row, reserve)
            except TooFullError as error:
                return error.over
            return 0.0

        return [over(rank, row) for rank, row in enumerate(order.rows)]

    def merit(self, planned: Plan) -> Merit:
        assert self.lanes is not None, "nothing says what gathers take"
        return simulate(planned, self.costs, Lanes(self.stages, self.residency, self.lanes)).merit

    def _row(self, uses: RowUses, reserve: ReservedRoom) -> tuple[Row, Groups]:
        """One rank's row, and its groups as in `RowWalk`."""
        asked, sharded = self.residency, self.residency.weights_sharded
        kept, bound = (self._kept if asked.limit is None else self._within_limit)(uses, reserve)
        comes = sharded or (asked.gathers_once and not self.plan.forward_only)
        gathered = stays(uses.reads, kept, weights=True) if comes else []
        moments = [0] * len(gathered)
        if sharded:
            moments = gather_moments(gathered, uses.units, bound, overlap=asked.overlap_gather)
        gathers = [(moment, ir.UNSHARD, stay) for moment, stay in zip(moments, gathered, strict=True)]
        frees = [(stay.last + 1, ir.RESHARD, stay) for stay in gathered if sharded]
        reduced = reductions(uses, asked, kept)
        groups: Groups = [[] for _ in uses.adds]
        for _, kind, stay in reduced:
            if kind == ir.REDUCE:
                groups[stay.unit].append(Counter(use.begin[1] for use in stay.uses))
        # Computations wait for gathers sooner than for reductions, which come first where what is gathered has no room
        # before older ones are waited for.
        behind = (*reduced, *gathers) if reserve.reduced_first else (*gathers, *reduced)
        return written(uses, (*frees, *behind)), groups

    def _kept(self, uses: RowUses, reserve: ReservedRoom) -> tuple[set[Gap], list[float]]:
        """Where there is no limit: the gaps that are kept, and by moment the bytes that whole weights may take."""
        asked, count = self.residency, uses.num_moments
        most = 0.0 if asked.budget is None else float(asked.budget[uses.units.rank])
        kept = kept_gaps(uses, asked, [most * (1 - reserve.share)] * count, self.grouping)
        if asked.policy == "step":
            return kept, [math.inf] * count
        most += asked.ahead_of(uses.units.weight_bytes)
        if asked.policy == "budget":
            return kept, [most - used for used in bytes_kept(count, kept, weights=False)]
        return kept, [most + used for used in bytes_kept(count, kept, weights=True)]

    def _within_limit(self, uses: RowUses, reserve: ReservedRoom) -> tuple[set[Gap], list[float]]:
        """The gaps that are kept, and by moment the bytes that whole weights may take in all. Raises PlanError where
        even the least is too much."""
        asked, units, count, rank = self.residency, uses.units, uses.num_moments, uses.units.rank
        assert asked.limit is not None
        free = self._room(uses, asked.limit[rank])
        reads = _in_use(uses.reads, units.weight_bytes, count) if asked.weights_sharded else [0] * count
        left = _less(free, reads)
        ahead = asked.ahead_of(units.weight_bytes) if asked.weights_sharded else 0
        spare = [max(0, ahead - one) if reserve.ahead and asked.overlap_gather else 0 for one in reads]
        most = float("inf") if asked.budget is None else float(asked.budget[rank])

        def to_keep(room: Sequence[float]) -> list[float]:
            return [(1 - reserve.share) * max(0.0, min(most, one)) for one in _less(room, spare)]

        least = kept_gaps(uses, asked, [0.0] * count, self.grouping)
        kept, held = least, self._gradients(uses, least, reserve)
        if asked.grads_sharded:
            other = held if reserve.under_way else _in_use(uses.adds, units.grad_bytes, count)
            room = _less(left, other)
            for attempt in range(_TRIES):
                kept = kept_gaps(uses, asked, to_keep(room), self.grouping, grads_alone=reserve.grads_first)
                held = self._gradients(uses, kept, reserve)
                over = _less(held, left)
                if max(over, default=0) <= 0:
                    break
                taken = bytes_by_moment(count, (gap[:3] for gap in kept))
                for moment, more in enumerate(over):
                    for one in range(max(0, moment - attempt * _BEFORE), moment + 1) if more > 0 else ():
                        room[one] = min(room[one], spare[one] + taken[one]) - more
            else:
                kept, held = least, self._gradients(uses, least, reserve)
        beyond = max(_less(held, left), default=0.0)
        if beyond > 0:
            raise TooFullError(rank, asked.limit[rank], beyond)
        bound = _less(free, held)
        if asked.budget is not None:
            grads = bytes_kept(count, kept, weights=False)
            bound = [min(one, ahead + most - more) for one, more in zip(bound, grads, strict=True)]
        if asked.weights_sharded:
            weights = keep_gaps(uses.gaps[0], to_keep(_less(bound, reads)))
            kept = {gap for gap in kept if not gap.weights} | weights
        return kept, bound

    def _room(self, uses: RowUses, limit: float) -> list[float]:
        """By moment, bytes of a limit that states at rest and activations leave: C(t) of
        docs/design/007-one-plan.md."""
        held = activations(uses.row, self.costs, forward_only=self.plan.forward_only)
        room: list[float] = []
        for (_, used, _), (first, end) in zip(held, itertools.pairwise(uses.firsts), strict=True):
            room += [limit - uses.units.bytes_at_rest - used] * (end - first)
        return room

    def _gradients(self, uses: RowUses, kept: set[Gap], reserve: ReservedRoom) -> list[int]:
        """By moment, what whole gradients and those under way take."""
        if not self.residency.grads_sharded:
            return [0] * uses.num_moments
        reduced = reductions(uses, self.residency, kept)
        return gradients_held(uses, reduced, reduced_first=reserve.reduced_first)


def _in_use(spans: Sequence[Sequence[Span]], sizes: Sequence[int], count: int) -> list[int]:
    """By moment, bytes of what is used."""
    every = zip(spans, sizes, strict=True)
    return bytes_by_moment(count, ((one.first, one.last + 1, size) for mine, size in every for one in mine))


def _less(room: Sequence[float], taken: Sequence[float]) -> list[float]:
    """By moment."""
    return [one - other for one, other in zip(room, taken, strict=True)]


def gather_moments(
    gathered: Sequence[Stay], units: RankUnits, room: Sequence[float], *, overlap: bool
) -> list[int]:
    """When each gather is issued: as early as the room allows, in the order in which units are needed.

    room: by moment, bytes of whole weights for gathers ahead, all that is gathered included. No unit is gathered ahead
    of its own last use, nor of that of a unit whose slot it takes. overlap: else each is issued at its first use.
    Raises PlanError where two units need one slot at once.
    """
    sizes = units.weight_bytes
    held = bytes_by_moment(len(room) + 1, ((one.first, one.last + 1, sizes[one.unit]) for one in gathered))
    moments = []
    latest, freed = (
        0,
        dict[tuple[str, int], tuple[int, int]](),
    )  # by memory: from when on, and behind which unit
    for stay in gathered:
        slot = units.units[stay.unit].slot
        memory = ("unit", stay.unit) if slot is None else ("slot", slot)
        free, behind = freed.get(memory, (0, stay.unit))
        if stay.first < free:
            mine, other = (units.units[one].name for one in (stay.unit, behind))
            raise PlanError(
                f"--fsdp-double-buffer: unit {mine!r} needs its slot while unit {other!r} still uses it: these two do "
                "not run one after the other; leave out --fsdp-double-buffer"
            )
        size, least, moment = sizes[stay.unit], max(latest, free), stay.first
        while overlap and moment > least and held[moment - 1] + size <= room[moment - 1]:
            moment -= 1
            held[moment] += size
        moments.append(moment)
        latest, freed[memory] = moment, (stay.last + 1, stay.unit)
    return moments


def written(uses: RowUses, issued: Sequence[Issued]) -> Row:
    """The row with what is issued, at one moment in this order. What belongs to the row's end stands behind its last
    transfer and before the step is decided on."""
    end = 1 + max(place for place, op in enumerate(uses.row) if not ir.IS_VALIDATION[op[0]])
    places = [*uses.places, end]
    before: list[list[RawOp]] = [[] for _ in range(len(uses.row) + 1)]
    for moment, kind, stay in sorted(issued, key=lambda one: one[0]):
        at = bisect_right(uses.firsts, moment) - 1
        first = uses.firsts[at]
        begun = moment - first + 1 if moment > first else 0
        # Named as a unit of the stage that uses it first, or last.
        stage = stay.uses[0 if kind == ir.UNSHARD else -1].begin[1]
        unit = uses.units.of[stage].index(stay.unit)
        before[places[at]].append((kind, stage, -1, begun, unit, unit + 1, -1, -1))
    return tuple(itertools.chain(*((*ops, *uses.row[at : at + 1]) for at, ops in enumerate(before))))
