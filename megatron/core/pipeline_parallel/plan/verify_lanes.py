"""What `verify` holds operations of data parallelism to where it knows no more of units than the plan's own
words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from megatron.core.pipeline_parallel.plan.ir import (
    REDUCE,
    RESHARD,
    UNSHARD,
    Plan,
    PlanError,
    RawOp,
    op_text,
)
from megatron.core.pipeline_parallel.plan.kinds import IS_COMPUTE, IS_DATA_PARALLEL, WRITES_GRADS
from megatron.core.pipeline_parallel.plan.residency import PlannedResidency


def verify_lanes(plan: Plan) -> None:
    """Operations are of units that the plan names, on the rank of their stage, before a computation if they
    belong to an access; units are gathered before they are freed, once each time; every REDUCE comes behind
    the weight gradients that the plan's grouping has it sum up, and none is missing. Which weights a
    computation reads, and how much all that holds, `verify_residency` knows.

    Raises PlanError naming rank, place and operation.
    """
    words = plan.residency
    if words is None:
        raise PlanError("the plan gathers or reduces units, and does not say which: it has no `residency`")
    for what, found in (("units", len(words.units)), ("groups", len(words.grouping))):
        if found != plan.placement.num_stages:
            raise PlanError(f"the plan has {what} of {found} stages, and {plan.placement.num_stages} stages")
    if [len(units) for units in words.units] != [len(groups) for groups in words.grouping]:
        raise PlanError("the plan's units and its groups of microbatches are not of the same units")
    for rank in range(len(plan.rows)):
        _Row(plan, rank, words).check()


class _Row:
    def __init__(self, plan: Plan, rank: int, words: PlannedResidency) -> None:
        self.row, self.rank, self.words = plan.rows[rank], rank, words
        self.mine = {stage for stage, one in enumerate(plan.placement.ranks()) if one == rank}
        self.gathered: set[str] = set()
        self.added: Counter[tuple[int, int]] = Counter()  # (stage, unit) -> microbatches
        self.reductions: Counter[str] = Counter()

    def check(self) -> None:
        waiting: list[int] = []  # places of operations that belong to accesses of the next computation
        for place, op in enumerate(self.row):
            if IS_DATA_PARALLEL[op[0]]:
                if op[3] < max((self.row[one][3] for one in waiting), default=0):
                    raise self._wrong(place, "stands behind one of a later moment")
                if op[3]:
                    waiting.append(place)
                else:
                    self._perform(place, op)
            elif IS_COMPUTE[op[0]]:
                if WRITES_GRADS[op[0]]:
                    first, end = (op[4], op[5]) if op[4] >= 0 else (0, len(self.words.units[op[1]]))
                    self.added.update((op[1], unit) for unit in range(first, end))
                for one in waiting:
                    self._perform(one, self.row[one])
                waiting = []
        if waiting:
            raise self._wrong(waiting[0], "no computation follows whose accesses it could wait for")
        if self.gathered:
            raise PlanError(f"rank {self.rank}: unit {min(self.gathered)} is gathered and never freed")
        for stage in sorted(self.mine):
            for name, groups in zip(self.words.units[stage], self.words.grouping[stage], strict=True):
                if self.reductions[name] != len(groups):
                    raise PlanError(
                        f"rank {self.rank}: unit {name} is reduced {self.reductions[name]} times, its microbatches are "
                        f"in {len(groups)} groups"
                    )

    def _perform(self, place: int, op: RawOp) -> None:
        kind, stage = op[0], op[1]
        if stage not in self.mine:
            raise self._wrong(place, "the stage is not on this rank")
        names = self.words.units[stage]
        if op[5] > len(names) or op[2] >= 0 or op[6] >= 0 or op[7] >= 0:
            raise self._wrong(place, f"stage {stage} has {len(names)} units, and these alone are named here")
        comes_and_goes = self.words.strategy == "optim_grads_params" and self.words.ways > 1
        for name in names if op[4] < 0 else names[op[4] : op[5]]:
            if kind == UNSHARD and comes_and_goes:
                if name in self.gathered:
                    raise self._wrong(place, f"unit {name} is gathered already")
                self.gathered.add(name)
            elif kind == RESHARD:
                if name not in self.gathered:
                    raise self._wrong(place, f"unit {name} is not gathered")
                self.gathered.discard(name)
            elif kind == REDUCE:
                self._reduce(place, name)

    def _reduce(self, place: int, name: str) -> None:
        self.reductions[name] += 1
        for stage, unit in self._homes(name):
            due = sum(self.words.grouping[stage][unit][: self.reductions[name]])
            if self.added[stage, unit] < due:
                raise self._wrong(place, f"comes before {due} microbatches were added to unit {name}")

    def _homes(self, name: str) -> Iterator[tuple[int, int]]:
        for stage in self.mine:
            if name in self.words.units[stage]:
                yield stage, self.words.units[stage].index(name)

    def _wrong(self, place: int, what: str) -> PlanError:
        return PlanError(f"rank {self.rank}, place {place}, {op_text(self.row[place])}: {what}")
