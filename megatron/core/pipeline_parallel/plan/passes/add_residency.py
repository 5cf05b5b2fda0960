"""Add gathers, reductions and sums over instances: everything that data parallelism does in a step is in the
plan.

Each row is walked as its accesses (see `units`). The policy says which gaps between two uses are kept:
`memory` none, `step` all, `backward` a microbatch's from F to B, `budget` the shortest ones that there is
room for (see `keep`). Every stay then has a gather before it, as early as the room for gathers ahead allows,
and what was gathered is freed behind its last use; a group of microbatches whose gradients stay together has
its reduction right behind the last of them.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from megatron.core.pipeline_parallel.plan.collector import without_collector
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import Plan, PlanError, Row
from megatron.core.pipeline_parallel.plan.kinds import IS_COMPUTE, IS_DATA_PARALLEL
from megatron.core.pipeline_parallel.plan.lane_clock import Lanes
from megatron.core.pipeline_parallel.plan.passes.lane_rows import LaneRow, gather_moments, stays
from megatron.core.pipeline_parallel.plan.passes.room import bytes_kept, kept_gaps, room_to_keep
from megatron.core.pipeline_parallel.plan.passes.trailing_w import split_trailing
from megatron.core.pipeline_parallel.plan.residency import Grouping, LaneCosts, PlannedResidency, Residency
from megatron.core.pipeline_parallel.plan.residency_walk import grouping_of, walk_row
from megatron.core.pipeline_parallel.plan.row_uses import RowUses
from megatron.core.pipeline_parallel.plan.simulate import simulate
from megatron.core.pipeline_parallel.plan.units import RankUnits, StageUnits
from megatron.core.pipeline_parallel.plan.verify import verify

# Tried where there is something to choose: shares of the room that are left to gathers ahead, parts of trailing W's.
_SHARES = (0.0, 0.25, 0.5)
_PARTS = (1 << 20, 4, 1)  # all, some, none: whole chunks one after the other
# Rows that are made until one keeps to a limit in bytes.
_TRIES, _BEFORE = 8, 4

Groups = list[list[dict[int, int]]]


@without_collector()
def add_residency(
    plan: Plan,
    stages: Sequence[StageUnits],
    residency: Residency,
    costs: CostModel,
    lanes: LaneCosts | None = None,
    *,
    grouping: Grouping | None = None,
) -> Plan:
    """The plan with its operations of data parallelism; the plan itself where nothing is shared.

    plan: with transfers or without, with post-validation or without, of training or evaluation. lanes: what
    gathers and reductions take; with them a budget is divided between units that are kept and gathers ahead
    as it is fastest, and trailing W's come unit by unit where that is faster. grouping: of an earlier plan,
    to keep its bits. Raises PlanError for a policy that the plan cannot have, and where the result is wrong.
    """
    assert not any(IS_DATA_PARALLEL[op[0]] for row in plan.rows for op in row), "add_residency: a second time"
    if residency.policy == "backward" and plan.placement.num_stages > 1:
        raise PlanError(
            "policy backward keeps a microbatch's weights from F to B, and in a pipeline several are under way: use "
            "policy budget"
        )
    if not residency.moves:
        return plan
    maker = _Maker(stages, residency, costs, lanes, grouping)
    best = maker.fastest(plan)
    verify(best, costs, stages=stages, residency=residency)
    return best


@dataclasses.dataclass(frozen=True)
class _Maker:
    """Plans that differ in what add_residency chooses."""

    stages: Sequence[StageUnits]
    residency: Residency
    costs: CostModel
    lanes: LaneCosts | None
    grouping: Grouping | None

    def fastest(self, plan: Plan) -> Plan:
        """The best of a few; the first of them where nothing tells what gathers and reductions take."""
        asked, uses = self.residency, self._uses(plan)
        best, share = self._add(plan, uses, _SHARES[0]), _SHARES[0]
        divides = asked.policy == "budget" and asked.weights_cut and asked.overlap_gather
        keeps = not asked.grads_cut or asked.policy in ("step", "budget")
        if self.lanes is None or not (divides or keeps):
            return best
        judged = self._judged(best)
        for one in _SHARES[1:] if divides else ():
            other = self._add(plan, uses, one)
            if (found := self._judged(other)) >= judged:
                break
            best, judged, share = other, found, one
        unsplit = judged
        for parts in _PARTS if keeps and asked.overlap_reduce and not plan.forward_only else ():
            split = split_trailing(plan, self.stages, parts)
            if split is plan:
                break
            other = self._add(split, self._uses(split), share)
            found = self._judged(other)
            if found >= unsplit:  # then coarser parts are no better
                break
            if found <= judged:
                best, judged = other, found
        return best

    def _uses(self, plan: Plan) -> list[RowUses]:
        overlap = self.residency.overlap_reduce
        units = (RankUnits(rank, plan.placement, self.stages) for rank in range(len(plan.rows)))
        return [RowUses(row, one, overlap_reduce=overlap) for row, one in zip(plan.rows, units, strict=True)]

    def _add(self, plan: Plan, uses: Sequence[RowUses], share: float) -> Plan:
        """With so large a share of the room for gathers ahead alone."""
        made = [_row(one, plan, self.residency, self.costs, self.grouping, share) for one in uses]
        groups = grouping_of(plan.placement, [one.units for one in uses], [groups for _, groups in made])
        note = PlannedResidency.of(self.residency, self.stages, groups)
        return dataclasses.replace(plan, rows=tuple(row for row, _ in made), residency=note)

    def _judged(self, planned: Plan) -> tuple[float, float, float]:
        """Time, time exposed, and time on the wire, which is bytes; the lower the better, one before the
        other."""
        assert self.lanes is not None
        found = simulate(planned, self.costs, Lanes(tuple(self.stages), self.residency, self.lanes))
        wire = sum(lane.busy for lane in found.timeline.lanes)
        return (round(found.cost, 6), round(sum(found.exposed), 6), round(wire, 6))


def _row(
    uses: RowUses,
    plan: Plan,
    residency: Residency,
    costs: CostModel,
    grouping: Grouping | None,
    share: float,
) -> tuple[Row, Groups]:
    """One rank's row, and its groups as in `RowWalk`. share: of the room that nothing is kept in.

    Where the row of a limit in bytes holds too much at a moment it is made again with less room there: how many
    reductions are under way beside what is kept is known once the row is written.
    """
    room = room_to_keep(uses, residency, costs, forward_only=plan.forward_only)
    made = _with_room(uses, residency, grouping, room, share, forward_only=plan.forward_only)
    if residency.limit is None:
        return made
    for attempt in range(_TRIES):
        over = _held_over(made[0], uses, residency, costs, forward_only=plan.forward_only)
        if not any(over):
            break
        for moment, more in enumerate(over):
            if more:  # what is under way there was kept before
                first = max(0, moment - attempt * _BEFORE)
                room[first : moment + 1] = [
                    min(one, room[moment]) - more * 2**attempt for one in room[first : moment + 1]
                ]
        made = _with_room(uses, residency, grouping, room, share, forward_only=plan.forward_only)
    return made


def _held_over(
    row: Row, uses: RowUses, residency: Residency, costs: CostModel, *, forward_only: bool
) -> list[float]:
    """By moment, what a row holds beyond the limit."""
    assert residency.limit is not None, residency
    free = residency.limit[uses.units.rank] - uses.units.shard_bytes
    over = [0.0] * uses.num_moments
    walk = walk_row(row, uses.units, residency, costs, forward_only=forward_only)
    if walk.peak.total <= free:
        return over
    walk = walk_row(row, uses.units, residency, costs, forward_only=forward_only, boundaries=True)
    places = [place for place, op in enumerate(row) if IS_COMPUTE[op[0]]]
    for held in walk.boundaries:
        computation = min(bisect_left(places, held.place), len(places) - 1)
        moment = uses.computations[computation][1] + max(0, held.access)
        over[moment] = max(over[moment], held.total - free)
    return over


def _with_room(
    uses: RowUses,
    residency: Residency,
    grouping: Grouping | None,
    room: Sequence[float],
    share: float,
    *,
    forward_only: bool,
) -> tuple[Row, Groups]:
    """room: by moment, bytes of weights and gradients that may be kept; where it is less than nothing, gathers
    ahead have less than their bound."""
    lanes = LaneRow(uses, residency)
    kept = kept_gaps(uses, residency, [max(0.0, one) * (1 - share) for one in room], grouping)
    gathered = stays(uses.reads, kept, weights=True)
    if residency.weights_cut:
        if residency.policy == "backward":
            room = [float(one) for one in bytes_kept(uses, kept, weights=True)]
        ahead = residency.ahead_of(uses.units)
        if residency.grads_cut and residency.policy == "budget":
            grads = bytes_kept(uses, kept, weights=False)
            room = [one - used for one, used in zip(room, grads, strict=True)]
        bound = [ahead + one for one in room]
        moments = gather_moments(gathered, uses.units.weight_bytes, bound, overlap=residency.overlap_gather)
        for stay, moment in zip(gathered, moments, strict=True):
            lanes.gather(stay, moment)
            lanes.free(stay)
    elif residency.gathers_once and not forward_only:
        for stay in gathered:
            lanes.gather(stay, 0)
    reduced = sorted(stays(uses.adds, kept, weights=False), key=lambda stay: stay.last)
    lanes.reduce(reduced)
    groups: Groups = [[] for _ in uses.adds]
    for stay in reduced:
        groups[stay.unit].append(Counter(use.begin[1] for use in stay.uses))
    return lanes.write(), groups
