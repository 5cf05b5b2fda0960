"""A lane: the wire of a rank's gathers and reductions, in the order in which they are issued beside its computations.

A computation's access waits for the gathers of what it reads, and for reductions as row_uses, [Note: under way] says.
All this waiting is exposed. Messages between stages are timed apart, as if they had a network card of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core.pipeline_parallel.plan.held.units import RankUnits, StageUnits
from megatron.core.pipeline_parallel.plan.ir import HSDP_ALL_REDUCE, REDUCE, RESHARD, UNSHARD, RawOp
from megatron.core.pipeline_parallel.plan.residency import MOST_UNDER_WAY, LaneCosts, Residency


@dataclass(frozen=True)
class Lanes:
    """What a plan's operations of data parallelism are about, and what they cost."""

    stages: tuple[StageUnits, ...]
    residency: Residency
    costs: LaneCosts


class LaneClock:
    """free: when the wire is. busy: its time so far. exposed: what the rank has waited for it up to the end
    of its last computation: what it waits for behind that ends no later than the wire is free. times: of operations by
    place in the row, when they begin and end on the wire. moments: with `accesses`, by (place, access) when accesses
    begin, by (place, -1) when the rank goes on behind an operation; empty else."""

    def __init__(
        self,
        units: RankUnits,
        lanes: Lanes,
        durations: Sequence[Sequence[float]],
        begin: float,
        *,
        accesses: bool = False,
    ) -> None:
        self.units, self.lanes, self.durations = units, lanes, durations
        self.free, self.busy, self.exposed, self._waited = begin, 0.0, 0.0, 0.0
        self.times: dict[int, tuple[float, float]] = {}
        self.moments: dict[tuple[int, int], float] = {}
        self._notes = accesses
        self._pending: list[tuple[int, RawOp]] = []  # what belongs to accesses of the next computation
        self._gathered: dict[int, float] = {}  # unit -> when its last gather is through
        self._under: list[tuple[int, float]] = []  # reductions and sums over instances: unit, end

    def issue(self, place: int, op: RawOp, clock: float) -> float:
        """When the rank goes on behind an operation that stands at `clock` in its row."""
        if not op[3]:
            return self._perform(place, op, clock)
        self._pending.append((place, op))
        return clock

    def compute(self, place: int, op: RawOp, clock: float) -> float:
        """When a computation ends that starts at `clock`."""
        duration = self.durations[op[0]][op[1]]
        self.exposed = self._waited
        if not self._pending and self.free <= clock:
            self._under.clear()  # all through: else a later reduction of this unit would be waited for with an old one
            if not self._notes:
                return clock + duration * (
                    1.0 if op[4] < 0 else sum(use.share for use in self.units.uses(op))
                )
        pending, at = self._pending, 0
        for access, use in enumerate(self.units.uses(op)):
            while at < len(pending) and pending[at][1][3] <= access + 1:
                clock = self._perform(*pending[at], clock)
                at += 1
            for unit in use.reads:
                clock = self._wait(clock, self._gathered.get(unit, clock))
            for unit in use.begins if self._under else ():
                clock = self._wait_for(unit, clock)
            if self._notes:
                self.moments[place, access] = clock
            clock += use.share * duration
        pending.clear()
        self.exposed = self._waited
        if self._notes:
            self.moments[place, -1] = clock
        return clock

    def through(self, clock: float) -> float:
        """When all that was issued is done."""
        return self._wait(clock, self.free)

    def _perform(self, place: int, op: RawOp, clock: float) -> float:
        kind, numbers = op[0], self.units.of[op[1]]
        costs, residency = self.lanes.costs, self.lanes.residency
        self.times[place] = clock, clock
        if kind == RESHARD:
            numbers = ()
        for unit in numbers if op[4] < 0 else numbers[op[4] : op[5]]:
            of_unit = self.units.unit(unit)
            if kind == UNSHARD:
                cost = costs.unshard(of_unit, first=unit not in self._gathered)
                self._gathered[unit] = self._run(place, clock, cost)
            else:
                if kind == HSDP_ALL_REDUCE:
                    clock = self._wait_for(unit, clock)
                if len(self._under) == MOST_UNDER_WAY:
                    clock = self._wait_for(self._under[0][0], clock)
                cost = costs.reduce(of_unit, residency) if kind == REDUCE else costs.outer_sum(of_unit)
                self._under.append((unit, self._run(place, clock, cost)))
                if not residency.overlap_reduce:
                    clock = self._wait_for(unit, clock)
        if self._notes:
            self.moments[place, -1] = clock
        return clock

    def _run(self, place: int, clock: float, seconds: float) -> float:
        """Put a unit's operation on the wire; its end."""
        start = max(clock, self.free)
        self.free = start + seconds
        self.busy += seconds
        self.times[place] = start, self.free
        return self.free

    def _wait_for(self, unit: int, clock: float) -> float:
        """What is under way of a unit."""
        for one in [one for one in self._under if one[0] == unit]:
            self._under.remove(one)
            clock = self._wait(clock, one[1])
        return clock

    def _wait(self, clock: float, end: float) -> float:
        if end > clock:
            self._waited += end - clock
            clock = end
        return clock
