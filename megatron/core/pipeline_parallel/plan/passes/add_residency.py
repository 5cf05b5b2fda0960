"""Add gathers, reductions and sums over instances: everything that data parallelism does in a step is in the plan.

Each row is walked as its accesses (see `units`). The policy says which gaps between two uses are kept: `memory` none,
`step` all, `backward` a microbatch's from F to B, `budget` the shortest ones that there is room for (see `keep`). Every
stay then has a gather before it, as early as the room for gathers ahead allows, and what was gathered is freed behind
its last use; a group of microbatches whose gradients stay together has its reduction right behind the last of them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter, defaultdict
from collections.abc import Sequence

from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.held.lane_clock import Lanes
from megatron.core.pipeline_parallel.plan.held.residency_walk import grouping_of
from megatron.core.pipeline_parallel.plan.held.row_uses import Gap, RowUses
from megatron.core.pipeline_parallel.plan.held.units import RankUnits, StageUnits
from megatron.core.pipeline_parallel.plan.ir import (
    REDUCE,
    RESHARD,
    UNSHARD,
    Plan,
    PlanError,
    Row,
    without_collector,
)
from megatron.core.pipeline_parallel.plan.kinds import IS_DATA_PARALLEL
from megatron.core.pipeline_parallel.plan.passes import lane_rows
from megatron.core.pipeline_parallel.plan.passes.keep import Reserve, bytes_kept, fit_limit, kept_gaps
from megatron.core.pipeline_parallel.plan.passes.orders import PARTS, split_trailing
from megatron.core.pipeline_parallel.plan.passes.within_limit import RESERVES, Orders, WithinLimit
from megatron.core.pipeline_parallel.plan.residency import Grouping, LaneCosts, PlannedResidency, Residency
from megatron.core.pipeline_parallel.plan.simulate import Merit, simulate
from megatron.core.pipeline_parallel.plan.verify import verify

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

    plan: with transfers or without, with post-validation or without, of training or evaluation. lanes: what gathers and
    reductions take; with them a budget is divided between units that are kept and gathers ahead as it is fastest, and
    trailing W's come unit by unit where that is faster. grouping: of an earlier plan, to keep its bits. Raises
    PlanError for a policy that the plan cannot have, and where the result is wrong.
    """
    assert not any(IS_DATA_PARALLEL[op[0]] for row in plan.rows for op in row), "add_residency: a second time"
    if residency.policy == "backward" and plan.placement.num_stages > 1:
        raise PlanError(
            "policy backward keeps a microbatch's weights from F to B, and in a pipeline several are under way: use "
            "policy budget"
        )
    if not residency.moves:
        return plan
    maker = _Maker(plan, stages, residency, costs, lanes, grouping)
    best = maker.within_limit() if residency.limit is not None and lanes is not None else maker.fastest()
    verify(best, costs, stages=stages, residency=residency)
    return best


@dataclasses.dataclass(frozen=True)
class _Maker:
    """Plans that differ in what add_residency chooses."""

    plan: Plan
    stages: Sequence[StageUnits]
    residency: Residency
    costs: CostModel
    lanes: LaneCosts | None
    grouping: Grouping | None

    def fastest(self) -> Plan:
        """Without a limit, the best of a few; the first of them where nothing tells what gathers and reductions take.
        Each choice is made more of until that is no better."""
        asked, plan, reserve = self.residency, self.plan, RESERVES[0]
        best = self._made(plan, self._uses(plan), reserve)
        if self.lanes is None:
            return best
        judged = self._merit(best)
        divides = asked.policy == "budget" and asked.weights_sharded and asked.overlap_gather
        for one in RESERVES[1:3] if divides else ():  # shares
            other = self._made(plan, self._uses(plan), one)
            found = self._merit(other)
            if found >= judged:
                break
            best, judged, reserve = other, found, one
        unsplit = judged
        keeps = not asked.grads_sharded or asked.policy in ("step", "budget")
        for parts in PARTS if keeps and asked.overlap_reduce and not plan.forward_only else ():
            split = split_trailing(plan, self.stages, parts)
            if split is plan:
                break
            other = self._made(split, self._uses(split), reserve)
            found = self._merit(other)
            if found >= unsplit:  # then coarser parts are no better
                break
            if found <= judged:
                best, judged = other, found
        return best

    def within_limit(self) -> Plan:
        asked, plan = self.residency, self.plan
        uses = functools.lru_cache(maxsize=None)(self._uses)
        assert asked.limit is not None
        orders = Orders(
            plan,
            self.stages,
            self.costs,
            room=[limit - one.units.shard_bytes for limit, one in zip(asked.limit, uses(plan), strict=True)],
            most_read=[one.most_read * asked.weights_sharded for one in uses(plan)],
            whole_grads=[
                sum(one.grad_bytes for one in stage.units) * asked.grads_sharded for stage in self.stages
            ],
            parts=asked.overlap_reduce and not plan.forward_only,
            reserves=RESERVES if asked.weights_sharded or asked.grads_sharded else RESERVES[:1],
        )

        def make(order: Plan, reserve: Reserve) -> tuple[Merit, Plan]:
            made = self._made(order, uses(order), reserve)
            return self._merit(made), made

        return WithinLimit(make, orders).fastest()

    def _uses(self, plan: Plan) -> list[RowUses]:
        units = (RankUnits(rank, plan.placement, self.stages) for rank in range(len(plan.rows)))
        overlap, apart = self.residency.overlap_reduce, self.residency.limit is not None
        return [
            RowUses(row, one, overlap_reduce=overlap, apart=apart)
            for row, one in zip(plan.rows, units, strict=True)
        ]

    def _made(self, plan: Plan, uses: Sequence[RowUses], reserve: Reserve) -> Plan:
        made = [self._row(one, reserve) for one in uses]
        groups = grouping_of(plan.placement, [one.units for one in uses], [groups for _, groups in made])
        note = PlannedResidency.of(self.residency, self.stages, groups)
        return dataclasses.replace(plan, rows=tuple(row for row, _ in made), residency=note)

    def _merit(self, planned: Plan) -> Merit:
        assert self.lanes is not None
        return simulate(planned, self.costs, Lanes(tuple(self.stages), self.residency, self.lanes)).merit

    def _row(self, uses: RowUses, reserve: Reserve) -> tuple[Row, Groups]:
        """One rank's row, and its groups as in `RowWalk`."""
        asked, forward_only = self.residency, self.plan.forward_only
        if asked.limit is not None:
            kept, bound = fit_limit(
                uses, asked, self.costs, self.grouping, reserve, forward_only=forward_only
            )
        else:
            kept, bound = self._kept(uses, reserve)
        gathered = lane_rows.stays(uses.reads, kept, weights=True)
        gathers: defaultdict[int, list[lane_rows.Issue]] = defaultdict(list)
        frees: defaultdict[int, list[lane_rows.Issue]] = defaultdict(list)
        moments = [0] * len(gathered)
        if asked.weights_sharded:
            moments = lane_rows.gather_moments(
                gathered, uses.units.weight_bytes, bound, overlap=asked.overlap_gather
            )
        if asked.weights_sharded or (asked.gathers_once and not forward_only):
            for stay, moment in zip(gathered, moments, strict=True):
                gathers[moment].append((UNSHARD, stay))
        for stay in gathered if asked.weights_sharded else ():
            frees[stay.last + 1].append((RESHARD, stay))
        reduced = lane_rows.reductions(uses, asked, kept)
        groups: Groups = [[] for _ in uses.adds]
        for kind, stay in (one for moment in sorted(reduced) for one in reduced[moment]):
            if kind == REDUCE:
                groups[stay.unit].append(Counter(use.begin[1] for use in stay.uses))
        behind = (reduced, gathers) if reserve.reduced_first else (gathers, reduced)
        return lane_rows.written(uses, (frees, *behind)), groups

    def _kept(self, uses: RowUses, reserve: Reserve) -> tuple[set[Gap], list[float]]:
        """Where there is no limit: the gaps that are kept, and by moment the bytes that whole weights may take."""
        asked, count = self.residency, uses.num_moments
        budget = 0.0 if asked.budget is None else float(asked.budget[uses.units.rank])
        room = math.inf if asked.policy == "step" else budget
        kept = kept_gaps(uses, asked, [room * (1 - reserve.share)] * count, self.grouping)
        beyond: Sequence[float] = [room] * count
        if asked.policy == "backward":
            beyond = bytes_kept(count, kept, weights=True)
        elif asked.grads_sharded and asked.policy == "budget":
            beyond = [room - used for used in bytes_kept(count, kept, weights=False)]
        ahead = asked.ahead_of(uses.units)
        return kept, [ahead + one for one in beyond]
