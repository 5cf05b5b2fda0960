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
from collections import Counter
from collections.abc import Sequence

from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import Plan, PlanError, Row
from megatron.core.pipeline_parallel.plan.passes.lane_rows import LaneRow, gather_moments, stays
from megatron.core.pipeline_parallel.plan.passes.room import bytes_kept, kept_gaps, room_to_keep
from megatron.core.pipeline_parallel.plan.residency import Grouping, PlannedResidency, Residency
from megatron.core.pipeline_parallel.plan.residency_walk import LANE, grouping_of
from megatron.core.pipeline_parallel.plan.row_uses import RowUses
from megatron.core.pipeline_parallel.plan.units import RankUnits, StageUnits


def add_residency(
    plan: Plan,
    stages: Sequence[StageUnits],
    residency: Residency,
    costs: CostModel,
    *,
    grouping: Grouping | None = None,
) -> Plan:
    """The plan with its operations of data parallelism; the plan itself where nothing is shared.

    plan: with transfers or without, with post-validation or without, of training or evaluation. grouping: of
    an earlier plan, to keep its bits. Raises PlanError for a policy that the plan cannot have.
    """
    assert not any(op[0] in LANE for row in plan.rows for op in row), "add_residency: a second time"
    if residency.policy == "backward" and plan.placement.num_stages > 1:
        raise PlanError(
            "policy backward keeps a microbatch's weights from F to B, and in a pipeline several are under way: use "
            "policy budget"
        )
    if not residency.moves:
        return plan
    uses = [
        RowUses(row, RankUnits(rank, plan.placement, stages), overlap_reduce=residency.overlap_reduce)
        for rank, row in enumerate(plan.rows)
    ]
    made = [_row(one, plan, residency, costs, grouping, 0) for one in uses]
    groups = grouping_of(plan.placement, [one.units for one in uses], [groups for _, groups in made])
    note = PlannedResidency.of(residency, stages, groups)
    return dataclasses.replace(plan, rows=tuple(row for row, _ in made), residency=note)


def _row(
    uses: RowUses,
    plan: Plan,
    residency: Residency,
    costs: CostModel,
    grouping: Grouping | None,
    reserved: float,
) -> tuple[Row, list[list[dict[int, int]]]]:
    """One rank's row, and its groups as in `RowWalk`. reserved: bytes of the room that nothing is kept in,
    for gathers ahead alone."""
    lanes = LaneRow(uses, residency)
    room = room_to_keep(uses, residency, costs, forward_only=plan.forward_only)
    kept = kept_gaps(uses, residency, [one - reserved for one in room], grouping)
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
    elif residency.gathers_once and not plan.forward_only:
        for stay in gathered:
            lanes.gather(stay, 0)
    reduced = sorted(stays(uses.adds, kept, weights=False), key=lambda stay: stay.last)
    lanes.reduce(reduced)
    groups: list[list[dict[int, int]]] = [[] for _ in uses.adds]
    for stay in reduced:
        groups[stay.unit].append(Counter(use.begin[1] for use in stay.uses))
    return lanes.write(), groups
