"""When a rank's lanes are at work, and what its computations wait for meanwhile.

A computation's access waits for the gathers of what it reads, and for sums as lanes, [Note: under way] says. All this
waiting is exposed. Messages between stages are timed apart, as if they had a network card of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core.pipeline_parallel.plan.held.units import RankUnits, StageUnits, Use
from megatron.core.pipeline_parallel.plan.ir import (
    HSDP_ALL_REDUCE,
    IS_BESIDE,
    IS_COMPUTE,
    KINDS,
    REDUCE,
    UNSHARD,
    Kind,
    PlanError,
    RawOp,
    op_text,
    wrong_op,
)
from megatron.core.pipeline_parallel.plan.lanes import LANES, LaneRow, UnderWay
from megatron.core.pipeline_parallel.plan.residency import LaneCosts, Residency


@dataclass(frozen=True)
class Lanes:
    """What a plan's operations of data parallelism are about, and what they cost where the table of lanes says nothing
    else."""

    stages: tuple[StageUnits, ...]
    residency: Residency
    costs: LaneCosts


def decides(op: RawOp, rank: int) -> bool:
    """Whether a step is decided on, or a rank's part of its state sent on: when all that was issued is through."""
    return op[0] == Kind.STEP or (op[0] == Kind.SEND_STATE and op[6] > rank)


class LaneClock:
    """The automaton of a rank's row, as far as time goes: `do` its operations in order, from `begin` on.

    free: when all wires are. busy: their time so far. exposed: what the rank has waited for them up to the end of its
    last computation: what it waits for behind that ends no later than the wires are free. times: of operations by place
    in the row, when they begin and end on the wire.

    Searches run it for thousands of rows. So where nothing is asked of an access, it is not looked at; `RowWalk`, which
    counts bytes too, looks at all, and comes to the same times.
    """

    looks_at_all = False

    def __init__(
        self, units: RankUnits, lanes: Lanes, durations: Sequence[Sequence[float]], begin: float = 0.0
    ) -> None:
        self.units, self.lanes, self.durations = units, lanes, durations
        self.free, self.busy, self.exposed, self._waited = begin, 0.0, 0.0, 0.0
        self.times: dict[int, tuple[float, float]] = {}
        self.under: UnderWay[tuple[int, float]] = UnderWay()  # bytes of gradients, end
        self._wires = dict.fromkeys(LANES, begin)
        self._lane_of = {kind: lane for lane in LANES.values() for kind in lane.kinds}
        self._costs: dict[
            tuple[int, int, bool], float
        ] = {}  # by kind, unit, and whether it is the unit's first
        self._inside: list[tuple[int, RawOp]] = []  # what belongs to accesses of the next computation
        self._gathered: dict[int, float] = {}  # unit -> when its last gather is through

    def do(self, place: int, op: RawOp, clock: float) -> float:
        """When the rank goes on behind an operation that stands at `clock` in its row."""
        kind = op[0]
        if IS_COMPUTE[kind]:
            return self._compute(place, op, clock)
        if IS_BESIDE[kind]:
            if op[3]:
                self._inside.append((place, op))
                return clock
            return self._beside(place, op, clock)
        return self._wait(clock, self.free) if decides(op, self.units.rank) else clock

    def end(self, clock: float) -> None:
        """Behind the row's last operation."""
        if self._inside:
            raise self._wrong(*self._inside[0], "no computation follows whose accesses it could wait for")

    def _compute(self, place: int, op: RawOp, clock: float) -> float:
        duration, inside, at = self.durations[op[0]][op[1]], self._inside, 0
        uses = self.units.uses(op)
        self.exposed = self._waited
        waits = bool(inside) or self.free > clock
        end = clock + duration * (1.0 if op[4] < 0 else sum(use.share for use in uses))
        if not waits and not self.looks_at_all:
            self.under.entries.clear()  # all through
            return end
        for access, use in enumerate(uses):
            while at < len(inside) and inside[at][1][3] <= access + 1:
                clock = self._beside(*inside[at], clock, access, use.reads)
                at += 1
            clock = self._begin(place, op, access, use, clock) + use.share * duration
        if at < len(inside):
            raise self._wrong(*inside[at], f"{op_text(op)} has only {len(uses)} accesses")
        inside.clear()
        self.exposed = self._waited
        return clock if waits else end  # the same, but for rounding

    def _begin(self, place: int, op: RawOp, access: int, use: Use, clock: float) -> float:
        """An access; when it begins."""
        for unit in use.reads:
            clock = self._wait(clock, self._gathered.get(unit, clock))
        if self.under.entries:
            for unit in use.begins:
                clock = self._wait_for(self.under.of(unit), clock)
        return clock

    def _beside(
        self, place: int, op: RawOp, clock: float, access: int = -1, in_use: tuple[int, ...] = ()
    ) -> float:
        """One operation on each of its units. in_use: by the access, if any, that has begun."""
        kind, lane = op[0], self._lane_of[op[0]]
        self.times[place] = clock, clock
        for unit in self.numbers(place, op):
            size = self._effect(place, op, unit, in_use)
            if kind == UNSHARD:
                self._gathered[unit] = self._run(place, op, lane, unit, clock)
            elif KINDS[kind].waits_its_turn:
                if kind == HSDP_ALL_REDUCE:
                    clock = self._wait_for(self.under.of(unit), clock)
                clock = self._wait_for(self.under.before_one_more(lane), clock)
                end = self._run(place, op, lane, unit, clock)
                self.under.begin(lane, unit, (size, end))
                if not self.lanes.residency.overlap_reduce:
                    clock = self._wait(clock, end)
        return clock

    def numbers(self, place: int, op: RawOp) -> tuple[int, ...]:
        """Of an operation's units."""
        numbers = self.units.of[op[1]]
        return numbers if op[4] < 0 else numbers[op[4] : op[5]]

    def _effect(self, place: int, op: RawOp, unit: int, in_use: tuple[int, ...]) -> int:
        """What it does to a unit's bytes; those of the gradients that it reads until it is through."""
        return 0

    def _run(self, place: int, op: RawOp, lane: LaneRow, unit: int, clock: float) -> float:
        """Put a unit's operation on its lane's wire; its end."""
        key = op[0], unit, unit in self._gathered
        seconds = self._costs.get(key)
        if seconds is None:
            costs, residency, of_unit = (
                lane.costs or self.lanes.costs,
                self.lanes.residency,
                self.units.unit(unit),
            )
            if op[0] == UNSHARD:
                seconds = costs.unshard(of_unit, first=not key[2])
            else:
                reduces = op[0] == REDUCE
                seconds = costs.reduce(of_unit, residency) if reduces else costs.outer_sum(of_unit)
            self._costs[key] = seconds
        start = max(clock, self._wires[lane.name])
        self._wires[lane.name] = end = start + seconds
        self.free = max(self.free, end)
        self.busy += seconds
        self.times[place] = start, end
        return end

    def _wait_for(self, through: list[tuple[int, float]], clock: float) -> float:
        for _, end in through:
            clock = self._wait(clock, end)
        return clock

    def _wait(self, clock: float, end: float) -> float:
        if end > clock:
            self._waited += end - clock
            clock = end
        return clock

    def _wrong(self, place: int, op: RawOp, what: str) -> PlanError:
        return wrong_op(self.units.rank, place, op, what)
