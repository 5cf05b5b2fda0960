"""When a rank's gathers and reductions run beside its computations: one wire, in the order in which they are
issued.

A computation's access waits for the gathers of what it reads, and for reductions as held_units, [Note: under
way] says. All this waiting is exposed. Messages between stages are timed apart, as if they had a network card
of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core.pipeline_parallel.plan.held_units import MOST_UNDER_WAY
from megatron.core.pipeline_parallel.plan.ir import RawOp
from megatron.core.pipeline_parallel.plan.residency import LaneCosts, Residency
from megatron.core.pipeline_parallel.plan.residency_walk import HSDP_ALL_REDUCE, REDUCE, UNSHARD
from megatron.core.pipeline_parallel.plan.units import RankUnits, StageUnits


@dataclass(frozen=True)
class Lanes:
    """What a plan's operations of data parallelism are about, and what they cost."""

    stages: tuple[StageUnits, ...]
    residency: Residency
    costs: LaneCosts


class LaneClock:
    """One rank's lane. free: when its wire is. busy: its time so far. exposed: what the rank has waited for
    it."""

    def __init__(self, units: RankUnits, lanes: Lanes, begin: float) -> None:
        self.units, self.lanes = units, lanes
        self.free, self.busy, self.exposed = begin, 0.0, 0.0
        self._gathered = [begin] * len(units)
        self._gathered_before = [False] * len(units)
        self._under: list[tuple[int, float]] = []  # reductions and sums over instances: unit, end
        self._shares: dict[tuple[int, int, int, int], tuple[float, ...]] = {}

    def issue(self, op: RawOp, clock: float) -> tuple[float, float, float]:
        """(when the rank goes on, when the operation begins, when it ends), issued at `clock`."""
        kind, numbers = op[0], self.units.of[op[1]]
        start = end = clock
        for unit in numbers if op[4] < 0 else numbers[op[4] : op[5]]:
            costs, residency = self.lanes.costs, self.lanes.residency
            if kind == UNSHARD:
                first = not self._gathered_before[unit]
                self._gathered_before[unit] = True
                start, end = self._run(clock, costs.unshard(self.units.unit(unit), residency, first=first))
                self._gathered[unit] = end
            elif kind in (REDUCE, HSDP_ALL_REDUCE):
                if kind == HSDP_ALL_REDUCE:
                    clock = self._wait_for(unit, clock)
                if len(self._under) == MOST_UNDER_WAY:
                    clock = self._wait_for(self._under[0][0], clock)
                cost = costs.reduce if kind == REDUCE else costs.outer_sum
                start, end = self._run(clock, cost(self.units.unit(unit), residency))
                self._under.append((unit, end))
                if not residency.overlap_reduce:
                    clock = self._wait_for(unit, clock)
        return clock, start, end

    def compute(
        self, op: RawOp, clock: float, duration: float, issued: Sequence[tuple[RawOp, list[float]]]
    ) -> float:
        """When a computation ends that starts at `clock`. issued: operations that belong to its accesses,
        each with a list that gets its beginning and end."""
        if not issued and self.free <= clock:
            return clock + duration
        at = 0
        for access, (use, share) in enumerate(zip(self.units.uses(op), self._shares_of(op), strict=True)):
            while at < len(issued) and issued[at][0][3] <= access + 1:
                clock, *times = self.issue(issued[at][0], clock)
                issued[at][1][:] = times
                at += 1
            for unit in use.reads:
                clock = self._wait(clock, self._gathered[unit])
            for unit in use.begins:
                clock = self._wait_for(unit, clock)
            clock += share * duration
        return clock

    def _shares_of(self, op: RawOp) -> tuple[float, ...]:
        """Of the time of the computation, each access's."""
        key = (op[0], op[1], op[4], op[5])
        shares = self._shares.get(key)
        if shares is None:
            shares = self.units.stages[op[1]].shares(op)
            whole = sum(shares)
            shares = tuple(one / whole for one in shares) if whole else (1.0,)
            self._shares[key] = shares
        return shares

    def _run(self, clock: float, seconds: float) -> tuple[float, float]:
        start = max(clock, self.free)
        self.free = start + seconds
        self.busy += seconds
        return start, self.free

    def _wait_for(self, unit: int, clock: float) -> float:
        """What is under way of a unit."""
        for one in [one for one in self._under if one[0] == unit]:
            self._under.remove(one)
            clock = self._wait(clock, one[1])
        return clock

    def _wait(self, clock: float, end: float) -> float:
        if end <= clock:
            return clock
        self.exposed += end - clock
        return end
