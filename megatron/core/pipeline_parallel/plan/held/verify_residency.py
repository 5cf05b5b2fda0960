"""What `verify` holds operations of data parallelism to.

V1 weights that an access reads are gathered, V2 gathered once and freed once, never in use, none left at the end, two
in one slot of a double buffer never at once. V3 a
reduction sums at least one complete contribution, and every contribution is summed, in the groups that the plan names.
V4, V6 gradients are held from their first contribution to the end of their reduction, of which two are under way at
most: what `walk_row` counts. V5 all that is held is within what the policy allows. V7 no deadlock (`verify`). V8
nothing is gathered or unsummed where a step is decided on. V9 an evaluation reduces nothing. V10 units of one name are
one. V11 one sum over instances behind each unit's last reduction. V12 what is moved is what the policy's closed form
says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from megatron.core.pipeline_parallel.plan import ir
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.held.lanes import Lanes, lane_of
from megatron.core.pipeline_parallel.plan.held.residency_walk import RowWalk, walk_row
from megatron.core.pipeline_parallel.plan.held.row_uses import RowUses, grouping_of
from megatron.core.pipeline_parallel.plan.held.units import (
    RankUnits,
    Share,
    StageUnits,
    UnitCosts,
    are_shared,
    rank_units,
    residency_note,
)
from megatron.core.pipeline_parallel.plan.ir import Plan, PlanError, RawOp, Row
from megatron.core.pipeline_parallel.plan.residency import PlannedResidency, Residency, over_ranks
from megatron.core.words import size_text


def verify_residency(
    plan: Plan, stages: Sequence[StageUnits], residency: Residency, costs: CostModel | None = None
) -> tuple[RowWalk, ...]:
    """Hold a plan to V1-V6 and V8-V12 (see above), for these units and this residency; what each row moves and holds.

    costs: activations in bytes, for a limit. Raises PlanError naming rank, place and operation, or what the plan was
    made for if that is something else.
    """
    shared = are_shared(stages)
    if shared:
        _made_for(plan, residency_note(residency, stages, ()))
    walks, words = [], plan.residency
    of_ranks = rank_units(plan.placement, tuple(stages))
    for rank, (row, units) in enumerate(zip(plan.rows, of_ranks, strict=True)):
        for place, op in enumerate(row if not shared else ()):
            if ir.IS_BESIDE[op[0]]:
                raise ir.wrong_op(rank, place, op, "there are no data parallel peers to share anything with")
        walk = walk_row(row, units, residency, costs, forward_only=plan.forward_only)
        if shared:
            uses = RowUses(row, units)
            _counts(residency, uses, walk, forward_only=plan.forward_only)
            _bytes(residency, uses, walk)
        walks.append(walk)
    if shared and words is not None:
        grouping = grouping_of(plan.placement, of_ranks, [walk.groups for walk in walks])
        if words.grouping != grouping:
            raise PlanError(
                f"the plan names groups of microbatches {words.grouping!r:.200}, its reductions sum {grouping!r:.200}"
            )
    return tuple(walks)


def _made_for(plan: Plan, expected: PlannedResidency) -> None:
    """The plan's own words, where it has any, agree with the units and the residency of this run. Looked at before the
    walk, which would find the same in some operation."""
    found = plan.residency
    if found is None:
        raise PlanError("the plan does not say for which units and sharding its gathers and reductions are")
    for what, mine, theirs in (
        ("units", found.units, expected.units),
        ("strategy", found.strategy, expected.strategy),
        ("ranks", over_ranks(found.groups), over_ranks(expected.groups)),
        ("optimizer over instances", found.outer_optimizer, expected.outer_optimizer),
        ("policy", found.policy, expected.policy),
    ):
        if mine != theirs:
            raise PlanError(f"the plan was made for {what} {mine!r:.200}, here are {theirs!r:.200}")


def _counts(residency: Residency, uses: RowUses, walk: RowWalk, *, forward_only: bool) -> None:
    """V12. A policy that keeps nothing gathers for every use and reduces after every contribution; where all is kept,
    or is whole at rest, once a unit."""
    read, sizes = sum(map(len, uses.reads)), uses.units.grad_bytes
    added = sum(len(spans) if size else bool(spans) for spans, size in zip(uses.adds, sizes, strict=True))
    read_once, added_once = sum(map(bool, uses.reads)), sum(map(bool, uses.adds))
    gathers: int | None = read_once if residency.gathers_once and not forward_only else 0
    if residency.weights_sharded:
        gathers = {"memory": read, "step": read_once}.get(residency.policy)
    reductions: int | None = added_once
    if residency.grads_sharded:
        reductions = {"memory": added, "backward": added, "step": added_once}.get(residency.policy)
    for what, expected, found in (
        ("gathers", gathers, walk.num_gathers),
        ("reductions", reductions, sum(map(len, walk.groups))),
    ):
        if expected is not None and expected != found:
            raise PlanError(
                f"rank {uses.units.rank}: {found} {what} in a row, policy {residency.policy} has {expected}"
            )


def _bytes(residency: Residency, uses: RowUses, walk: RowWalk) -> None:
    """V5."""
    rank, peak, limit = uses.units.rank, walk.peak, residency.limit
    total = uses.units.bytes_at_rest + peak.total
    if limit is not None and total > limit[rank]:
        raise PlanError(
            f"rank {rank}, place {peak.place}: {size_text(total)} are held, the limit is {size_text(limit[rank])}"
        )
    if residency.budget is None and residency.policy != "memory":
        return
    most = 0 if residency.budget is None else residency.budget[rank]
    if residency.weights_sharded:
        most += max(residency.ahead_of(uses.units.weight_bytes), uses.most_read)
    if walk.most.gathered > most:
        raise PlanError(
            f"rank {rank}: {walk.most.gathered} bytes of weights are gathered at once, {most} are allowed"
        )
    if residency.grads_sharded:
        most += uses.most_adding(residency)
        if residency.policy == "budget":  # what has waited longer is under way beside what would be anyway
            most += lane_of(ir.REDUCE).most_under_way * max(uses.units.grad_bytes, default=0)
    if walk.most_transient > most:
        raise PlanError(
            f"rank {rank}: gathered weights and whole gradients take {walk.most_transient} bytes at once, {most} are "
            "allowed"
        )


def verify_lanes(plan: Plan) -> None:
    """Where no more is known of units than the plan's own words: operations are of units that the plan names, on the
    rank of their stage, before a computation if they belong to an access; units are gathered before they are freed,
    once each time; every REDUCE comes behind the weight gradients that the plan's grouping has it sum up, and none is
    missing.

    Raises PlanError naming rank, place and operation.
    """
    words, num_stages = plan.residency, plan.placement.num_stages
    if words is None:
        raise PlanError("the plan gathers or reduces units, and does not say which: it has no `residency`")
    for what, found in (("units", len(words.units)), ("groups", len(words.grouping))):
        if found != num_stages:
            raise PlanError(f"the plan has {what} of {found} stages, and {num_stages} stages")
    counts = [
        (len(set(units)), len(groups)) for units, groups in zip(words.units, words.grouping, strict=True)
    ]
    if counts != [(len(units), len(units)) for units in words.units]:
        raise PlanError("the plan's units and its groups of microbatches are not of the same units")
    stages = []
    groups = [(group, not group.instances or words.outer_optimizer) for group in words.groups]
    shares = tuple(Share(group, int(gathers), 1) for group, gathers in groups)
    for names in words.units:
        together = (tuple(range(len(names))),)
        named = tuple(UnitCosts(name, shares=shares) for name in names)
        stages.append(StageUnits(named, together, together))
    for rank, row in enumerate(plan.rows):
        _WalkByWords(row, RankUnits(rank, plan.placement, stages), words).run()


class _WalkByWords(RowWalk):
    """Which accesses read or complete a unit is not known: gradients count as added when their computation begins."""

    def __init__(self, row: Row, units: RankUnits, words: PlannedResidency) -> None:
        super().__init__(row, units, Lanes(tuple(units.stages), Residency(words.strategy)))
        self._added: Counter[tuple[int, int]] = Counter()  # microbatches by (stage, unit)
        self._reductions: Counter[int] = Counter()
        self._grouping = words.grouping

    def _named(self, unit: int) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Its stages, and the groups that each has named."""
        for stage, numbers in self.units.of.items():
            if unit in numbers:
                yield stage, self._grouping[stage][numbers.index(unit)]

    def _compute(self, place: int, op: RawOp, clock: float) -> float:
        numbers = self.units.of[op[1]]
        if ir.WRITES_GRADS[op[0]]:
            for unit in numbers if op[4] < 0 else numbers[op[4] : op[5]]:
                self._added[op[1], unit] += 1
        for at, inside in self._inside:
            self._beside(at, inside, clock)
        self._inside.clear()
        return clock

    def _effect(self, place: int, op: RawOp, unit: int, in_use: tuple[int, ...]) -> int:
        if op[0] == ir.RESHARD or (op[0] == ir.UNSHARD and self._weights_sharded):
            return super()._effect(place, op, unit, in_use)
        if op[0] == ir.REDUCE:
            self._reductions[unit] += 1
            for stage, groups in self._named(unit):
                due = sum(groups[: self._reductions[unit]])
                if self._added[stage, unit] < due:
                    early = f"comes before {due} microbatches were added to {self._name(unit)}"
                    raise self._wrong(place, op, early)
        return 0

    def _unfinished(self, unit: int) -> str:
        found = self._reductions[unit]
        for _, groups in self._named(unit):
            if found != len(groups):
                return f"{self._name(unit)} is reduced {found} times, its microbatches are in {len(groups)} groups"
        return super()._unfinished(unit)
