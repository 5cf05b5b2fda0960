"""The automaton of a rank's row: its weights and gradients, what is held and moved and what is wrong, and when its
lanes are at work.

A computation's access waits for the gathers of what it reads, and for sums as lanes, [Note: under way] says. All this
waiting is exposed. Messages between stages are timed apart, as if they had a network card of their own.

A boundary is behind every operation of data parallelism, behind the beginning of every access, and behind every
computation: bytes change at these only. States at rest are not counted: where a strategy holds weights or gradients
whole at rest, none of them are transient.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from megatron.core.pipeline_parallel.plan import ir
from megatron.core.pipeline_parallel.plan.costs import CostModel, activations
from megatron.core.pipeline_parallel.plan.held.lanes import (
    LANES,
    Held,
    LaneRow,
    Lanes,
    Moves,
    UnderWay,
    gathered,
    summed,
)
from megatron.core.pipeline_parallel.plan.held.row_uses import WholeGradients
from megatron.core.pipeline_parallel.plan.held.units import RankUnits, Use
from megatron.core.pipeline_parallel.plan.ir import IS_BESIDE, IS_COMPUTE, RawOp
from megatron.core.pipeline_parallel.plan.residency import Residency


def walk_row(
    row: ir.Row,
    units: RankUnits,
    residency: Residency,
    costs: CostModel | None = None,
    *,
    forward_only: bool = False,
    boundaries: bool = False,
) -> RowWalk:
    """Walk one rank's row, on no clock. costs: of activations, none without. boundaries: list every one of them.

    Raises PlanError naming rank, place and operation where weights are read that are not gathered (V1), gathered twice,
    freed in use or left gathered (V2), where a reduction has nothing to sum, comes too early or is missing (V3), and
    where sums over instances do not follow each unit's last reduction, once (V11).
    """
    lanes = Lanes(tuple(units.stages), residency)
    return RowWalk(row, units, lanes, costs=costs, forward_only=forward_only, every=boundaries).run()


class RowWalk:
    """`do` the operations of the row in order, then `end`; or `run` all.

    free: when all wires are. busy: their time so far. exposed: what the rank has waited for them up to the end of its
    last computation: what it waits for behind that ends no later than the wires are free. times: of operations by place
    in the row, when they begin and end on the wire. durations: without, nothing takes any time.

    moves: where weights have changed since the last row. repeated: those of them that are made once more where the step
    before is taken back. boundaries, clocks: what is held, costs saying of activations, and when: all of them where
    `every` one is asked for, else those at which something grows. `copy.deepcopy` keeps a state to go back to.

    quick: searches run thousands of rows for their times alone. A computation of which no lane asks anything is passed
    over, and nothing is held, moved or wrong. The times are the same.
    """

    def __init__(
        self,
        row: ir.Row,
        units: RankUnits,
        lanes: Lanes,
        durations: Sequence[Sequence[float]] | None = None,
        begin: float = 0.0,
        *,
        costs: CostModel | None = None,
        forward_only: bool = False,
        every: bool = False,
        quick: bool = False,
    ) -> None:
        self.row, self.units, self.lanes = row, units, lanes
        self.durations = durations or [[0.0] * len(units.stages)] * 4
        self._every, self._quick = every, quick
        # Time
        self.free, self.busy, self.exposed, self._waited = begin, 0.0, 0.0, 0.0
        self.times: dict[int, tuple[float, float]] = {}
        self.under: UnderWay[tuple[int, float]] = UnderWay()  # bytes of gradients, end
        self._wires = dict.fromkeys(LANES, begin)
        self._lane_of = {kind: lane for lane in LANES.values() for kind in lane.kinds}
        self._seconds: dict[
            tuple[int, int, bool], float
        ] = {}  # of a kind, a unit, whether it was gathered before
        self._gathered: dict[int, float] = {}  # unit -> when its last gather is through
        self._inside: list[tuple[int, RawOp]] = []  # what belongs to accesses of the next computation
        # Bytes
        self.moves, self.repeated, self.num_gathers = Moves(), Moves(), 0
        self.boundaries, self.clocks = list[Held](), list[float]()
        held = () if costs is None else activations(row, costs, forward_only=forward_only)
        self._activations = {place: (during, after) for place, during, after in held}
        self._activation, self._whole_weights = 0.0, 0
        self._gradients = WholeGradients(units, self.under)
        # Units: whose weights can be read, to whose gradients the computation under way still contributes, which are
        # summed over instances; by unit, microbatches of each stage that are to be summed, and those that were.
        asked = lanes.residency
        self._weights_sharded, self._grads_sharded = asked.weights_sharded, asked.grads_sharded
        self._gathers = asked.weights_sharded or (asked.gathers_once and not forward_only)
        self._readable = set() if self._gathers else set(range(len(units)))
        self._open, self._outer_summed = set[int](), set[int]()
        self._fresh: list[dict[int, int]] = [{} for _ in range(len(units))]
        self._groups: list[list[dict[int, int]]] = [[] for _ in range(len(units))]

    @property
    def groups(self) -> tuple[tuple[dict[int, int], ...], ...]:
        """By number of the unit, for each REDUCE how many microbatches of each stage it summed up."""
        return tuple(map(tuple, self._groups))

    @property
    def peak(self) -> Held:
        """The boundary with the largest total."""
        return max(self.boundaries, key=lambda held: held.total)

    @property
    def fullest(self) -> Held:
        """That with the most weights and gradients together."""
        return max(self.boundaries, key=lambda held: held.transient)

    @property
    def most(self) -> Held:
        """The most of each kind, whenever."""
        return Held(-1, -1, *(max(column) for column in list(zip(*self.boundaries, strict=True))[2:]))

    @property
    def most_transient(self) -> int:
        """The most of weights and gradients together."""
        return self.fullest.transient

    def run(self) -> RowWalk:
        """Through the whole row, with nobody else to wait for."""
        clock = 0.0
        for place, op in enumerate(self.row):
            clock = self.do(place, op, clock)
        self.end(clock)
        return self

    def do(self, place: int, op: RawOp, clock: float) -> float:
        """When the rank goes on behind an operation that stands at `clock` in its row."""
        kind = op[0]
        if IS_COMPUTE[kind]:
            return self._compute(place, op, clock)
        if IS_BESIDE[kind]:
            if self._inside and op[3] < self._inside[-1][1][3]:
                raise self._wrong(place, op, "stands behind one of a later moment")
            if not op[3]:
                return self._beside(place, op, clock)
            self._inside.append((place, op))
        elif kind == ir.VALIDATE:
            self.repeated = dataclasses.replace(self.moves)
        elif kind == ir.STEP or (kind == ir.SEND_STATE and op[6] > self.units.rank):
            # A step is decided on, or the rank's part of its state sent on: all that was issued is through.
            clock = self._wait(clock, self.free)
            self._all_through(place)
        return clock

    def end(self, clock: float) -> None:
        """Behind the row's last operation."""
        if self._inside:
            raise self._wrong(*self._inside[0], "no computation follows whose accesses it could wait for")
        self._all_through(len(self.row) - 1)
        self._note(len(self.row) - 1, -1, clock)

    def _compute(self, place: int, op: RawOp, clock: float) -> float:
        duration, inside, at = self.durations[op[0]][op[1]], self._inside, 0
        uses = self.units.uses(op)
        self.exposed = self._waited
        waits = bool(inside) or self.free > clock
        end = clock + duration * (1.0 if op[4] < 0 else sum(use.share for use in uses))
        if self._quick and not waits:
            self.under.entries.clear()  # all through
            return end
        self._activation, after = self._activations.get(place, (0.0, 0.0))
        for access, use in enumerate(uses):
            while at < len(inside) and inside[at][1][3] <= access + 1:
                clock = self._beside(*inside[at], clock, access, use.reads)
                at += 1
            clock = self._begin(place, op, access, use, clock) + use.share * duration
        if at < len(inside):
            raise self._wrong(*inside[at], f"{ir.op_text(op)} has only {len(uses)} accesses")
        inside.clear()
        self.exposed, self._activation = self._waited, after
        clock = clock if waits else end  # the same, but for rounding
        if self._every:
            self._note(place, -1, clock)
        return clock

    def _begin(self, place: int, op: RawOp, access: int, use: Use, clock: float) -> float:
        """An access: its weights are read, its gradients get memory; when that is."""
        for unit in use.reads:
            clock = self._wait(clock, self._gathered.get(unit, clock))
        if self.under.entries:
            for unit in use.begins:
                clock = self._wait_for(self.under.of(unit), clock)
        if self._quick:
            return clock
        for unit in use.reads:
            if unit not in self._readable:
                needs = f"needs the weights of {self._name(unit)}, which are not gathered"
                raise self._wrong(place, op, needs)
        for unit in use.begins:
            if unit in self._outer_summed or (self._groups[unit] and not self._grads_sharded):
                late = f"adds to the gradients of {self._name(unit)} after their last sum"
                raise self._wrong(place, op, late)
            self._open.add(unit)
            if self._grads_sharded:
                self._gradients.begin(unit)
        for unit in use.completes if self._grads_sharded and self.units.extra_bytes else ():
            self._gradients.complete(unit, op[1])
        if self._every or not access or use.begins or use.completes:  # else nothing more is held
            self._note(place, access, clock)
        for unit in use.completes:  # by the next access
            self._open.discard(unit)
            self._fresh[unit][op[1]] = self._fresh[unit].get(op[1], 0) + 1
        return clock

    def _beside(
        self, place: int, op: RawOp, clock: float, access: int = -1, in_use: tuple[int, ...] = ()
    ) -> float:
        """One operation on each of its units. in_use: by the access, if any, that has begun."""
        kind, lane, numbers = op[0], self._lane_of[op[0]], self.units.of.get(op[1])
        if numbers is None:
            raise self._wrong(place, op, "the stage is not on this rank")
        if op[5] > len(numbers) or op[2] >= 0 or op[6] >= 0 or op[7] >= 0:
            alone = f"stage {op[1]} has {len(numbers)} units on this rank, and these alone are named here"
            raise self._wrong(place, op, alone)
        self.times[place] = clock, clock
        for unit in numbers if op[4] < 0 else numbers[op[4] : op[5]]:
            size = 0 if self._quick else self._effect(place, op, unit, in_use)
            if kind == ir.UNSHARD:
                self._gathered[unit] = self._on_wire(place, op, lane, unit, clock)
            elif ir.KINDS[kind].waits_its_turn:
                if kind == ir.HSDP_ALL_REDUCE:
                    clock = self._wait_for(self.under.of(unit), clock)
                clock = self._wait_for(self.under.before_one_more(lane), clock)
                end = self._on_wire(place, op, lane, unit, clock)
                self.under.begin(lane, unit, (size, end))
                if not self.lanes.residency.overlap_reduce:
                    clock = self._wait(clock, end)
        self._note(place, access, clock)
        return clock

    def _effect(self, place: int, op: RawOp, unit: int, in_use: tuple[int, ...]) -> int:
        """What it does to a unit's weights or gradients; bytes of the gradients that it reads until it is through."""
        kind, its, moves, wrong, taken = op[0], self.units.units[unit], self.moves, "", 0
        if kind == ir.UNSHARD:
            if not self._gathers:
                wrong = "is whole at rest"
            elif unit in self._readable:
                wrong = "is gathered already"
            elif not its.weight_bytes:
                wrong = "has no weights to gather"
            elif its.slot is not None and its.slot in (self.units.units[one].slot for one in self._readable):
                wrong = f"is gathered into slot {its.slot}, which another unit still uses"
            self.num_gathers += 1
            self._readable.add(unit)
            self._whole_weights += its.weight_bytes * self._weights_sharded
            moves.gathers += gathered(its.cut)
            if unit not in self._gathered:
                moves.outer_gathers += gathered(its.repeated)
        elif kind == ir.RESHARD:
            if not self._weights_sharded:
                wrong = "is whole at rest"
            elif unit not in self._readable:
                wrong = "is not gathered"
            elif unit in in_use:
                wrong = "is in use"
            self._readable.discard(unit)
            self._whole_weights -= its.weight_bytes
        elif kind == ir.REDUCE:
            if unit in self._open:
                wrong = "does not have all gradients of the microbatch under way"
            elif not self._fresh[unit]:
                wrong = "has no gradients since they were last summed"
            elif unit in self._outer_summed:
                wrong = "was summed over instances already"
            elif self._grads_sharded:
                taken = self._gradients.taken(unit)
            moves.reductions += summed(its.cut)
            self._groups[unit].append(self._fresh[unit])
            self._fresh[unit] = {}
        else:
            if not its.repeated:
                wrong = "has no other instances"
            elif not self._groups[unit] or self._fresh[unit] or unit in self._open:
                wrong = "is summed over instances before its last reduction"
            elif unit in self._outer_summed:
                wrong = "is summed over instances twice"
            moves.outer_sums += summed(its.repeated)
            self._outer_summed.add(unit)
        if wrong:
            raise self._wrong(place, op, f"{self._name(unit)} {wrong}")
        return taken

    def _all_through(self, place: int) -> None:
        """What must be so where a step is decided on, and at the row's end."""
        self.under.every()
        for unit in range(0 if self._quick else len(self.units)):
            if wrong := self._unfinished(unit):
                raise self._wrong(place, self.row[place], wrong)

    def _unfinished(self, unit: int) -> str:
        if self._weights_sharded and unit in self._readable:
            return f"{self._name(unit)} is still gathered here"
        if self._fresh[unit]:
            return f"gradients of {self._name(unit)} are never reduced"
        if self._groups[unit] and self.units.units[unit].repeated and unit not in self._outer_summed:
            return f"gradients of {self._name(unit)} are not summed over instances"
        return ""

    def _note(self, place: int, access: int, clock: float) -> None:
        """A boundary."""
        if not self._quick:
            grads = self._gradients
            held = (self._whole_weights, grads.growing, grads.under_way, self._activation)
            self.boundaries.append(Held(place, access, *held))
            self.clocks.append(clock)

    def _on_wire(self, place: int, op: RawOp, lane: LaneRow, unit: int, clock: float) -> float:
        """Put a unit's operation on its lane's wire; its end."""
        key = op[0], unit, unit in self._gathered
        if key not in self._seconds:
            costs, its = lane.costs or self.lanes.costs, self.units.units[unit]
            if op[0] == ir.UNSHARD:
                self._seconds[key] = costs.unshard(its, first=not key[2])
            elif op[0] == ir.REDUCE:
                self._seconds[key] = costs.reduce(its, self.lanes.residency)
            else:
                self._seconds[key] = costs.outer_sum(its)
        seconds, start = self._seconds[key], max(clock, self._wires[lane.name])
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

    def _wrong(self, place: int, op: RawOp, what: str) -> ir.PlanError:
        return ir.wrong_op(self.units.rank, place, op, what)

    def _name(self, unit: int) -> str:
        return f"unit {self.units.units[unit].name}"
