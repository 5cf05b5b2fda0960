"""Operations of data parallelism held to what a plan itself says, where no more is known of units than that."""

from __future__ import annotations

from collections import Counter

from megatron.core.pipeline_parallel.plan.held.residency_walk import Placed, RowWalk
from megatron.core.pipeline_parallel.plan.held.units import RankUnits, StageUnits, UnitCosts
from megatron.core.pipeline_parallel.plan.ir import Plan, PlanError, RawOp, Row
from megatron.core.pipeline_parallel.plan.kinds import WRITES_GRADS
from megatron.core.pipeline_parallel.plan.residency import PlannedResidency, Residency


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
    for names in words.units:
        together = (tuple(range(len(names))),)
        named = tuple(UnitCosts(name, weight_bytes=1, grad_bytes=1) for name in names)
        stages.append(StageUnits(named, together, together))
    for rank, row in enumerate(plan.rows):
        _WalkByWords(row, RankUnits(rank, plan.placement, stages), words).run()


class _WalkByWords(RowWalk):
    """Which accesses read or complete a unit is not known: gradients count as added when their computation begins."""

    def __init__(self, row: Row, units: RankUnits, words: PlannedResidency) -> None:
        asked = Residency(words.strategy, words.ways, words.outer, words.outer_optimizer)
        super().__init__(row, units, asked)
        self._added: Counter[tuple[int, int]] = Counter()  # microbatches by (stage, unit)
        self._reductions: Counter[int] = Counter()
        # By unit: its stages, and the groups that each has named.
        self._named: list[list[tuple[int, tuple[int, ...]]]] = [[] for _ in range(len(units))]
        for stage, numbers in units.of.items():
            for unit, groups in zip(numbers, words.grouping[stage], strict=True):
                self._named[unit].append((stage, groups))

    def _compute(self, place: int, op: RawOp, inside: list[Placed], during: float, after: float) -> None:
        numbers = self.units.of[op[1]]
        if WRITES_GRADS[op[0]]:
            for unit in numbers if op[4] < 0 else numbers[op[4] : op[5]]:
                self._added[op[1], unit] += 1
        for at, one in inside:
            self._lane(at, one, -1)

    def _unshard(self, unit: int) -> str:
        return super()._unshard(unit) if self._weights_sharded else ""

    def _reduce(self, unit: int) -> str:
        self._reductions[unit] += 1
        for stage, groups in self._named[unit]:
            due = sum(groups[: self._reductions[unit]])
            if self._added[stage, unit] < due:
                return f"comes before {due} microbatches were added to {self._name(unit)}"
        return ""

    def _outer_sum(self, unit: int) -> str:
        return ""

    def _unfinished(self, unit: int) -> str:
        found = self._reductions[unit]
        for _, groups in self._named[unit]:
            if found != len(groups):
                return f"{self._name(unit)} is reduced {found} times, its microbatches are in {len(groups)} groups"
        return super()._unfinished(unit)
