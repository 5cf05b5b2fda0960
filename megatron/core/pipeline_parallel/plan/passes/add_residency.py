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
import functools
from collections import Counter
from collections.abc import Sequence

from megatron.core.pipeline_parallel.plan.collector import without_collector
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import Plan, PlanError, Row
from megatron.core.pipeline_parallel.plan.kinds import IS_DATA_PARALLEL
from megatron.core.pipeline_parallel.plan.lane_clock import Lanes
from megatron.core.pipeline_parallel.plan.passes.fit_limit import Left, fit_limit
from megatron.core.pipeline_parallel.plan.passes.lane_rows import LaneRow, gather_moments, stays
from megatron.core.pipeline_parallel.plan.passes.room import bytes_kept, kept_gaps, room_to_keep
from megatron.core.pipeline_parallel.plan.passes.trailing_w import PARTS, split_trailing
from megatron.core.pipeline_parallel.plan.passes.within_limit import LEFTS, Orders, WithinLimit
from megatron.core.pipeline_parallel.plan.residency import Grouping, LaneCosts, PlannedResidency, Residency
from megatron.core.pipeline_parallel.plan.residency_walk import grouping_of
from megatron.core.pipeline_parallel.plan.row_uses import Gap, RowUses
from megatron.core.pipeline_parallel.plan.simulate import Merit, simulate
from megatron.core.pipeline_parallel.plan.units import RankUnits, StageUnits
from megatron.core.pipeline_parallel.plan.verify import verify

# What is left of the room, tried where there is something to choose.
_LEFT = LEFTS[:3]
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
        divides = asked.policy == "budget" and asked.weights_cut and asked.overlap_gather
        keeps = not asked.grads_cut or asked.policy in ("step", "budget")
        if asked.limit is not None and self.lanes is not None:
            return self._within_limit(plan)
        best, left = self._add(plan, uses, _LEFT[0]), _LEFT[0]
        if self.lanes is None or not (divides or keeps):
            return best
        judged = self._merit(best)
        for one in _LEFT[1:] if divides else ():
            other = self._add(plan, uses, one)
            if (found := self._merit(other)) >= judged:
                break
            best, judged, left = other, found, one
        unsplit = judged
        for parts in PARTS if keeps and asked.overlap_reduce and not plan.forward_only else ():
            split = split_trailing(plan, self.stages, parts)
            if split is plan:
                break
            other = self._add(split, self._uses(split), left)
            found = self._merit(other)
            if found >= unsplit:  # then coarser parts are no better
                break
            if found <= judged:
                best, judged = other, found
        return best

    def _within_limit(self, plan: Plan) -> Plan:
        asked = self.residency
        lefts = LEFTS if asked.weights_cut or asked.grads_cut else LEFTS[:1]
        whole = [sum(one.grad_bytes for one in stage.units) * asked.grads_cut for stage in self.stages]
        parts = asked.overlap_reduce and not plan.forward_only
        uses = functools.lru_cache(maxsize=None)(self._uses)
        assert asked.limit is not None
        room = [limit - one.units.shard_bytes for limit, one in zip(asked.limit, uses(plan), strict=True)]
        read = [one.most_read * asked.weights_cut for one in uses(plan)]
        orders = Orders(self.stages, self.costs, room, read, whole, parts, lefts)

        def make(order: Plan, left: Left) -> tuple[Merit, Plan]:
            made = self._add(order, uses(order), left)
            return self._merit(made), made

        return WithinLimit(make, plan).fastest(plan, orders)

    def _uses(self, plan: Plan) -> list[RowUses]:
        overlap = self.residency.overlap_reduce
        units = (RankUnits(rank, plan.placement, self.stages) for rank in range(len(plan.rows)))
        apart = self.residency.limit is not None
        return [
            RowUses(row, one, overlap_reduce=overlap, apart=apart)
            for row, one in zip(plan.rows, units, strict=True)
        ]

    def _add(self, plan: Plan, uses: Sequence[RowUses], left: Left) -> Plan:
        made = [_row(one, plan, self.residency, self.costs, self.grouping, left) for one in uses]
        groups = grouping_of(plan.placement, [one.units for one in uses], [groups for _, groups in made])
        note = PlannedResidency.of(self.residency, self.stages, groups)
        return dataclasses.replace(plan, rows=tuple(row for row, _ in made), residency=note)

    def _merit(self, planned: Plan) -> Merit:
        assert self.lanes is not None
        return simulate(planned, self.costs, Lanes(tuple(self.stages), self.residency, self.lanes)).merit


def _row(
    uses: RowUses,
    plan: Plan,
    residency: Residency,
    costs: CostModel,
    grouping: Grouping | None,
    left: Left,
) -> tuple[Row, Groups]:
    """One rank's row, and its groups as in `RowWalk`."""
    if residency.limit is not None:
        kept, bound = fit_limit(uses, residency, costs, grouping, left, forward_only=plan.forward_only)
    else:
        room = room_to_keep(uses, residency)
        kept = kept_gaps(uses, residency, [one * (1 - left.share) for one in room], grouping)
        bound = _bound(uses, residency, room, kept)
    lanes = LaneRow(uses, residency, reduced_first=left.reduced_first)
    gathered = stays(uses.reads, kept, weights=True)
    if residency.weights_cut:
        moments = gather_moments(gathered, uses.units.weight_bytes, bound, overlap=residency.overlap_gather)
        for stay, moment in zip(gathered, moments, strict=True):
            lanes.gather(stay, moment)
            lanes.free(stay)
    elif residency.gathers_once and not plan.forward_only:
        for stay in gathered:
            lanes.gather(stay, 0)
    reduced = sorted(stays(uses.adds, kept, weights=False), key=lambda stay: stay.last)
    lanes.reduce(reduced)
    groups: Groups = [[] for _ in uses.adds]
    for stay in reduced:
        groups[stay.unit].append(Counter(use.begin[1] for use in stay.uses))
    return lanes.write(), groups


def _bound(uses: RowUses, residency: Residency, room: Sequence[float], kept: set[Gap]) -> list[float]:
    """By moment, bytes that whole weights may take in all where there is no limit."""
    if residency.policy == "backward":
        room = bytes_kept(uses, (gap for gap in kept if gap.weights))
    elif residency.grads_cut and residency.policy == "budget":
        grads = bytes_kept(uses, (gap for gap in kept if not gap.weights))
        room = [one - used for one, used in zip(room, grads, strict=True)]
    ahead = residency.ahead_of(uses.units)
    return [ahead + one for one in room]
