"""The one walk over a row's weights and gradients: what is held at every boundary, what is moved, what is wrong.

A boundary is behind every operation of data parallelism, behind the beginning of every access, and behind every
computation: bytes change at these only. States at rest are not counted: where a strategy holds weights or gradients
whole at rest, none of them are transient.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from megatron.core.pipeline_parallel.plan import ir
from megatron.core.pipeline_parallel.plan.costs import CostModel, activations
from megatron.core.pipeline_parallel.plan.held.lane_clock import LaneClock, Lanes, decides
from megatron.core.pipeline_parallel.plan.held.row_uses import WholeGradients
from megatron.core.pipeline_parallel.plan.held.units import RankUnits, Use
from megatron.core.pipeline_parallel.plan.ir import IS_BESIDE
from megatron.core.pipeline_parallel.plan.placement import Placement
from megatron.core.pipeline_parallel.plan.residency import Grouping, LaneCosts, Residency
from megatron.core.transport.traffic import NOTHING, Moved


class Held(NamedTuple):
    """Bytes at one boundary. place: of the operation in the row, access: the one that has begun, -1 where the operation
    is through. gathered: whole weights. gradients: whole ones that still grow or wait. under_way: being reduced.
    activation: in the cost model's unit."""

    place: int
    access: int
    gathered: int
    gradients: int
    under_way: int
    activation: float

    @property
    def transient(self) -> int:
        """What weights and gradients take beyond their states at rest."""
        return self.gathered + self.gradients + self.under_way

    @property
    def total(self) -> float:
        return self.transient + self.activation


@dataclass
class Moves:
    """What a row's collectives move: gathers and reductions over the ranks that share states, sums and gathers over
    instances."""

    gathers: Moved = NOTHING
    reductions: Moved = NOTHING
    outer_sums: Moved = NOTHING
    outer_gathers: Moved = NOTHING

    def __add__(self, other: Moves) -> Moves:
        names = [field.name for field in fields(self)]
        return Moves(*(getattr(self, name) + getattr(other, name) for name in names))


def walk_row(
    row: ir.Row,
    units: RankUnits,
    residency: Residency,
    costs: CostModel | None = None,
    *,
    forward_only: bool = False,
    boundaries: bool = False,
    weights_changed: bool = True,
) -> RowWalk:
    """Walk one rank's row, on no clock. costs: of activations, none without. boundaries: list every one of them.
    weights_changed: since the last row; else what is gathered once behind each step of the optimizer moves nothing.

    Raises PlanError naming rank, place and operation where weights are read that are not gathered (V1), gathered twice,
    freed in use or left gathered (V2), where a reduction has nothing to sum, comes too early or is missing (V3), and
    where sums over instances do not follow each unit's last reduction, once (V11).
    """
    lanes = Lanes(tuple(units.stages), residency, LaneCosts())
    walk = RowWalk(row, units, lanes, costs=costs, forward_only=forward_only, every=boundaries)
    walk.weights_changed = weights_changed
    return walk.run()


def grouping_of(
    placement: Placement,
    units: Sequence[RankUnits],
    groups: Sequence[Sequence[Sequence[dict[int, int]]]],
) -> Grouping:
    """By stage and unit how many microbatches each REDUCE sums up. units, groups (of `RowWalk`): by rank."""
    return tuple(
        tuple(
            tuple(group.get(stage, 0) for group in groups[rank][number]) for number in units[rank].of[stage]
        )
        for stage, rank in enumerate(placement.ranks())
    )


class RowWalk(LaneClock):
    """The automaton of a rank's row: what it moves and holds at every boundary, when that is, and what is wrong.

    `do` the operations of the row in order, then `end`; or `run` all. peak: the boundary with the largest total.
    fullest: that with the most weights and gradients together. most: the most of each kind, whenever. boundaries,
    clocks: all of them and when they are, where `every` one is asked for. repeated: the moves that are made once more
    where the step before is taken back. `groups` see below. durations: without, nothing takes any time. costs: of
    activations, none without.
    """

    looks_at_all = True

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
    ) -> None:
        super().__init__(units, lanes, durations or [[0.0] * len(units.stages)] * 4, begin)
        self.row, self.residency, self.forward_only = row, lanes.residency, forward_only
        self.moves, self.repeated = Moves(), Moves()
        self.num_gathers = 0
        self.boundaries, self.clocks = list[Held](), list[float]()
        self.weights_changed = True
        self.peak = self.fullest = self.most = Held(-1, -1, 0, 0, 0, 0.0)
        self._every, self._peak_total = every, 0.0
        held = () if costs is None else activations(row, costs, forward_only=forward_only)
        self._activations = {place: (during, after) for place, during, after in held}
        self._activation, self._whole_bytes = 0.0, 0
        self._gradients = WholeGradients(units, self.under)
        self._groups: list[list[dict[int, int]]] = [[] for _ in range(len(units))]
        self._weights_sharded, self._grads_sharded = (
            self.residency.weights_sharded,
            self.residency.grads_sharded,
        )
        self._gathers = self._weights_sharded or (self.residency.gathers_once and not forward_only)
        self._readable = set() if self._gathers else set(range(len(units)))
        self._outer_summed = set[int]()
        self._open = set[int]()  # units that the computation under way still contributes to
        # By unit: stage -> microbatches to be summed
        self._fresh: list[dict[int, int]] = [{} for _ in range(len(units))]

    @property
    def groups(self) -> tuple[tuple[dict[int, int], ...], ...]:
        """By number of the unit, for each REDUCE how many microbatches of each stage it summed up."""
        return tuple(map(tuple, self._groups))

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

    def copied(self) -> RowWalk:
        """The state at this moment, to try something from here on, or to go back to."""
        given = (self.row, self.units, self.lanes, self.durations, self._activations)
        return copy.deepcopy(self, {id(fixed): fixed for fixed in given})

    def do(self, place: int, op: ir.RawOp, clock: float) -> float:
        if self._inside and IS_BESIDE[op[0]] and op[3] < self._inside[-1][1][3]:
            raise self._wrong(place, op, "stands behind one of a later moment")
        clock = super().do(place, op, clock)
        if op[0] == ir.Kind.VALIDATE:
            self.repeated = self._gathers_before(place)
        elif decides(op, self.units.rank):
            self._all_through(place)
        return clock

    def end(self, clock: float) -> None:
        super().end(clock)
        self._all_through(len(self.row) - 1)
        self._note(len(self.row) - 1, -1, clock)

    def _compute(self, place: int, op: ir.RawOp, clock: float) -> float:
        self._activation, after = self._activations.get(place, (0.0, 0.0))
        clock = super()._compute(place, op, clock)
        self._activation = after
        if self._every:
            self._note(place, -1, clock)
        return clock

    def _begin(self, place: int, op: ir.RawOp, access: int, use: Use, clock: float) -> float:
        """An access: its weights are read, its gradients get memory."""
        clock = super()._begin(place, op, access, use, clock)
        for unit in use.reads:
            if unit not in self._readable:
                raise self._wrong(
                    place, op, f"needs the weights of {self._name(unit)}, which are not gathered"
                )
        for unit in use.begins:
            if unit in self._outer_summed or (self._groups[unit] and not self._grads_sharded):
                raise self._wrong(
                    place, op, f"adds to the gradients of {self._name(unit)} after their last sum"
                )
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
        self, place: int, op: ir.RawOp, clock: float, access: int = -1, in_use: tuple[int, ...] = ()
    ) -> float:
        clock = super()._beside(place, op, clock, access, in_use)
        self._note(place, access, clock)
        return clock

    def numbers(self, place: int, op: ir.RawOp) -> tuple[int, ...]:
        numbers = self.units.of.get(op[1])
        if numbers is None:
            raise self._wrong(place, op, "the stage is not on this rank")
        if op[5] > len(numbers) or op[2] >= 0 or op[6] >= 0 or op[7] >= 0:
            alone = f"stage {op[1]} has {len(numbers)} units on this rank, and these alone are named here"
            raise self._wrong(place, op, alone)
        return super().numbers(place, op)

    def _effect(self, place: int, op: ir.RawOp, unit: int, in_use: tuple[int, ...]) -> int:
        wrong = self.wrong_with(op[0], unit, in_use)
        if wrong:
            raise self._wrong(place, op, f"{self._name(unit)} {wrong}")
        if op[0] == ir.UNSHARD:
            self._readable.add(unit)
            self.num_gathers += 1
            self._whole_bytes += self.units.weight_bytes[unit] * self._weights_sharded
            self._gather(self.moves, unit, first=unit not in self._gathered, changed=self.weights_changed)
        elif op[0] == ir.RESHARD:
            self._readable.discard(unit)
            self._whole_bytes -= self.units.weight_bytes[unit]
        elif op[0] == ir.REDUCE:
            for share in self.units.unit(unit).cut:
                self.moves.reductions += Moved(share.calls, share.reduced)
            self._groups[unit].append(self._fresh[unit])
            self._fresh[unit] = {}
            return self._gradients.taken(unit) if self._grads_sharded else 0
        else:
            self._outer_summed.add(unit)
            for share in self.units.unit(unit).repeated:
                self.moves.outer_sums += Moved(share.calls, share.reduced)
        return 0

    def wrong_with(self, kind: int, unit: int, in_use: tuple[int, ...]) -> str:
        """What is wrong with an operation on a unit, or nothing."""
        if kind == ir.UNSHARD:
            if not self._gathers:
                return "is whole at rest"
            if unit in self._readable:
                return "is gathered already"
            return "" if self.units.weight_bytes[unit] else "has no weights to gather"
        if kind == ir.RESHARD:
            if not self._weights_sharded:
                return "is whole at rest"
            if unit not in self._readable:
                return "is not gathered"
            return "is in use" if unit in in_use else ""
        if kind == ir.REDUCE:
            if unit in self._open:
                return "does not have all gradients of the microbatch under way"
            if not self._fresh[unit]:
                return "has no gradients since they were last summed"
            return "was summed over instances already" if unit in self._outer_summed else ""
        if not self.units.unit(unit).repeated:
            return "has no other instances"
        if not self._groups[unit] or self._fresh[unit] or unit in self._open:
            return "is summed over instances before its last reduction"
        return "is summed over instances twice" if unit in self._outer_summed else ""

    def _gather(self, moves: Moves, unit: int, *, first: bool, changed: bool) -> None:
        """first: of the row. changed: the weights, since the last row."""
        its = self.units.unit(unit)
        for share in its.cut if self._weights_sharded or changed else ():
            if share.gathered:
                moves.gathers += Moved(1, share.gathered)
        for share in its.repeated if first and changed else ():
            if share.gathered:
                moves.outer_gathers += Moved(1, share.gathered)

    def _gathers_before(self, place: int) -> Moves:
        """Of the new weights."""
        moves, seen = Moves(), set[int]()
        for op in (op for op in self.row[:place] if op[0] == ir.UNSHARD):
            for unit in self.numbers(place, op):
                self._gather(moves, unit, first=unit not in seen, changed=True)
                seen.add(unit)
        return moves

    def _all_through(self, place: int) -> None:
        """What must be so where a step is decided on, and at the row's end."""
        self.under.every()
        for unit in range(len(self.units)):
            if wrong := self._unfinished(unit):
                raise self._wrong(place, self.row[place], wrong)

    def _unfinished(self, unit: int) -> str:
        if self._weights_sharded and unit in self._readable:
            return f"{self._name(unit)} is still gathered here"
        if self._fresh[unit]:
            return f"gradients of {self._name(unit)} are never reduced"
        if self._groups[unit] and self.units.unit(unit).repeated and unit not in self._outer_summed:
            return f"gradients of {self._name(unit)} are not summed over instances"
        return ""

    def _note(self, place: int, access: int, clock: float) -> None:
        """A boundary."""
        gathered, activation, most = self._whole_bytes, self._activation, self.most
        gradients, under_way = self._gradients.growing, self._gradients.under_way
        if self._every:
            self.boundaries.append(Held(place, access, gathered, gradients, under_way, activation))
            self.clocks.append(clock)
        transient = gathered + gradients + under_way
        if transient + activation > self._peak_total:
            self.peak = Held(place, access, gathered, gradients, under_way, activation)
            self._peak_total = transient + activation
        if transient > self.fullest.transient:
            self.fullest = Held(place, access, gathered, gradients, under_way, activation)
        if gathered > most[2] or gradients > most[3] or under_way > most[4] or activation > most[5]:
            transients = (max(gathered, most[2]), max(gradients, most[3]), max(under_way, most[4]))
            self.most = Held(-1, -1, *transients, max(activation, most[5]))

    def _name(self, unit: int) -> str:
        return f"unit {self.units.unit(unit).name}"
