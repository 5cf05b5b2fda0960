"""The one walk over a row's weights and gradients: what is held at every boundary, what is moved, what is wrong.

A boundary is behind every operation of data parallelism, behind the beginning of every access, and behind every
computation: bytes change at these only. States at rest are not counted: where a strategy holds weights or gradients
whole at rest, none of them are transient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from megatron.core.pipeline_parallel.plan import ir
from megatron.core.pipeline_parallel.plan.costs import CostModel, activations
from megatron.core.pipeline_parallel.plan.held.row_uses import WholeGradients
from megatron.core.pipeline_parallel.plan.held.units import RankUnits, Use
from megatron.core.pipeline_parallel.plan.ir import IS_COMPUTE, IS_DATA_PARALLEL
from megatron.core.pipeline_parallel.plan.placement import Placement
from megatron.core.pipeline_parallel.plan.residency import Grouping, Residency
from megatron.core.transport.traffic import NOTHING, Moved

Placed = tuple[int, ir.RawOp]  # an operation and its place in the row


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
    """Walk one rank's row. costs: of activations, none without. boundaries: list every one of them. weights_changed:
    since the last row; else what is gathered once behind each step of the optimizer moves nothing.

    Raises PlanError naming rank, place and operation where weights are read that are not gathered (V1), gathered twice,
    freed in use or left gathered (V2), where a reduction has nothing to sum, comes too early or is missing (V3), and
    where sums over instances do not follow each unit's last reduction, once (V11).
    """
    walk = RowWalk(row, units, residency, forward_only=forward_only, every=boundaries)
    walk.weights_changed = weights_changed
    walk.run(costs)
    return walk


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


class RowWalk:
    """What a rank moves and holds in a row, once it was walked.

    peak: the boundary with the largest total. fullest: that with the most weights and gradients together. most: the
    most of each kind, whenever. boundaries: all of them, where `every` one is asked for. repeated: the moves that are
    made once more where the step before is taken back. `groups` see below. Methods of single units say what is wrong,
    or nothing.
    """

    def __init__(
        self,
        row: ir.Row,
        units: RankUnits,
        residency: Residency,
        *,
        forward_only: bool = False,
        every: bool = False,
    ) -> None:
        self.row, self.units, self.residency, self.forward_only = row, units, residency, forward_only
        self.moves, self.repeated, self.boundaries = Moves(), Moves(), list[Held]()
        self.num_gathers = 0
        self.weights_changed = True
        self.peak = self.fullest = self.most = Held(-1, -1, 0, 0, 0, 0.0)
        self._every, self._peak_total = every, 0.0
        self._activation, self._gathered, self._gradients = 0.0, 0, WholeGradients(units)
        self._groups: list[list[dict[int, int]]] = [[] for _ in range(len(units))]
        self._weights_sharded, self._grads_sharded = residency.weights_sharded, residency.grads_sharded
        self._gathers = residency.weights_sharded or (residency.gathers_once and not forward_only)
        self._readable = set() if self._gathers else set(range(len(units)))
        self._gathered_before = set[int]()
        self._outer_summed = set[int]()
        self._open = set[int]()  # units that the computation under way still contributes to
        self._fresh: list[dict[int, int]] = [
            {} for _ in range(len(units))
        ]  # stage -> microbatches to be summed
        self._in_use: tuple[int, ...] = ()
        own = (self._unshard, self._reshard, self._reduce, self._outer_sum)
        self._does = dict(zip((ir.UNSHARD, ir.RESHARD, ir.REDUCE, ir.HSDP_ALL_REDUCE), own, strict=True))

    @property
    def groups(self) -> tuple[tuple[dict[int, int], ...], ...]:
        """By number of the unit, for each REDUCE how many microbatches of each stage it summed up."""
        return tuple(map(tuple, self._groups))

    @property
    def most_transient(self) -> int:
        """The most of weights and gradients together."""
        return self.fullest.transient

    def run(self, costs: CostModel | None = None) -> None:
        """Walk the row. costs: of activations."""
        forward_only, last = self.forward_only, len(self.row) - 1
        held = iter(()) if costs is None else activations(self.row, costs, forward_only=forward_only)
        for place, op, inside in self._with_what_is_inside():
            if IS_COMPUTE[op[0]]:
                _, during, after = next(held, (place, 0.0, 0.0))
                self._compute(place, op, inside, during, after)
            elif IS_DATA_PARALLEL[op[0]]:
                self._lane(place, op, -1)
            elif op[0] == ir.Kind.VALIDATE:
                self.repeated = self._gathers_before(place)
            elif op[0] == ir.Kind.STEP or (op[0] == ir.Kind.SEND_STATE and op[6] > self.units.rank):
                self._all_through(place)
        self._all_through(last)
        self._note(last, -1)

    def _with_what_is_inside(self) -> Iterator[tuple[int, ir.RawOp, list[Placed]]]:
        """(place, operation, operations within it): those of data parallelism that belong to accesses of the next
        computation come with it."""
        inside: list[Placed] = []
        for place, op in enumerate(self.row):
            if IS_DATA_PARALLEL[op[0]] and (op[3] or inside):
                if inside and op[3] < inside[-1][1][3]:
                    raise self._wrong(place, "stands behind one of a later moment")
                inside.append((place, op))
                continue
            yield place, op, inside
            if IS_COMPUTE[op[0]]:
                inside = []
        if inside:
            raise self._wrong(inside[0][0], "no computation follows whose accesses it could wait for")

    def _compute(self, place: int, op: ir.RawOp, inside: list[Placed], during: float, after: float) -> None:
        """A computation with the operations that belong to its accesses. during, after: activations."""
        uses = self.units.uses(op)
        self._activation = during
        at, end = 0, len(inside)
        for access, use in enumerate(uses):
            self._in_use = use.reads
            while at < end and inside[at][1][3] <= access + 1:
                self._lane(*inside[at], access)
                at += 1
            if wrong := self._begin(use, op[1]):
                raise self._wrong(place, wrong)
            if self._every or not access or use.begins or use.completes:  # else nothing more is held
                self._note(place, access)
            if access + 1 < len(uses):
                self._complete(use, op[1])
        if at < end:
            raise self._wrong(inside[at][0], f"{ir.op_text(op)} has only {len(uses)} accesses")
        self._complete(uses[-1], op[1])
        self._in_use, self._activation = (), after
        if self._every:
            self._note(place, -1)

    def _begin(self, use: Use, stage: int) -> str:
        """An access: its weights are read, its gradients get memory."""
        for unit in use.reads:
            if unit not in self._readable:
                return f"needs the weights of {self._name(unit)}, which are not gathered"
        for unit in use.begins:
            if unit in self._outer_summed or (self._groups[unit] and not self._grads_sharded):
                return f"adds to the gradients of {self._name(unit)} after their last sum"
            self._open.add(unit)
            if self._grads_sharded:
                self._gradients.begin(unit)
        if self._grads_sharded and self.units.extra_bytes:
            for unit in use.completes:
                self._gradients.complete(unit, stage)
        return ""

    def _complete(self, use: Use, stage: int) -> None:
        for unit in use.completes:
            self._open.discard(unit)
            self._fresh[unit][stage] = self._fresh[unit].get(stage, 0) + 1

    def _lane(self, place: int, op: ir.RawOp, access: int) -> None:
        """One operation of data parallelism, on each of its units."""
        numbers = self.units.of.get(op[1])
        if numbers is None:
            raise self._wrong(place, "the stage is not on this rank")
        if op[5] > len(numbers) or op[2] >= 0 or op[6] >= 0 or op[7] >= 0:
            alone = f"stage {op[1]} has {len(numbers)} units on this rank, and these alone are named here"
            raise self._wrong(place, alone)
        does = self._does[op[0]]
        for unit in numbers if op[4] < 0 else numbers[op[4] : op[5]]:
            if wrong := does(unit):
                raise self._wrong(place, wrong)
        self._note(place, access)

    def _gathers_before(self, place: int) -> Moves:
        """Of the new weights."""
        before = RowWalk((), self.units, self.residency)
        for op in (one for one in self.row[:place] if one[0] == ir.UNSHARD):
            numbers = self.units.of[op[1]]
            for unit in numbers if op[4] < 0 else numbers[op[4] : op[5]]:
                before._readable.discard(unit)
                before._unshard(unit)
        return before.moves

    def _unshard(self, unit: int) -> str:
        size, moves, one = self.units.weight_bytes[unit], self.moves, self.units.unit(unit)
        if not self._gathers:
            return f"{self._name(unit)} is whole at rest"
        if unit in self._readable:
            return f"{self._name(unit)} is gathered already"
        if not size:
            return f"{self._name(unit)} has no weights to gather"
        self._readable.add(unit)
        self.num_gathers += 1
        if self._weights_sharded:
            self._gathered += size
        for share in one.cut if self._weights_sharded or self.weights_changed else ():
            if share.gathered:
                moves.gathers += Moved(1, share.gathered)
        for share in one.repeated if self.weights_changed and unit not in self._gathered_before else ():
            if share.gathered:
                moves.outer_gathers += Moved(1, share.gathered)
        self._gathered_before.add(unit)
        return ""

    def _reshard(self, unit: int) -> str:
        if not self._weights_sharded:
            return f"{self._name(unit)} is whole at rest"
        if unit not in self._readable:
            return f"{self._name(unit)} is not gathered"
        if unit in self._in_use:
            return f"{self._name(unit)} is in use"
        self._readable.discard(unit)
        self._gathered -= self.units.weight_bytes[unit]
        return ""

    def _reduce(self, unit: int) -> str:
        if unit in self._open:
            return f"{self._name(unit)} does not have all gradients of the microbatch under way"
        if not self._fresh[unit]:
            return f"{self._name(unit)} has no gradients since they were last summed"
        if unit in self._outer_summed:
            return f"{self._name(unit)} was summed over instances already"
        for share in self.units.unit(unit).cut:
            self.moves.reductions += Moved(share.calls, share.reduced)
        self._groups[unit].append(self._fresh[unit])
        self._fresh[unit] = {}
        if self._grads_sharded:
            self._gradients.reduce(unit)
        return ""

    def _outer_sum(self, unit: int) -> str:
        one = self.units.unit(unit)
        if not one.repeated:
            return f"{self._name(unit)} has no other instances"
        if not self._groups[unit] or self._fresh[unit] or unit in self._open:
            return f"{self._name(unit)} is summed over instances before its last reduction"
        if unit in self._outer_summed:
            return f"{self._name(unit)} is summed over instances twice"
        self._outer_summed.add(unit)
        self._gradients.outer_sum(unit)
        for share in one.repeated:
            self.moves.outer_sums += Moved(share.calls, share.reduced)
        return ""

    def _all_through(self, place: int) -> None:
        """What must be so where a step is decided on, and at the row's end."""
        self._gradients.wait_for()
        for unit in range(len(self.units)):
            if wrong := self._unfinished(unit):
                raise self._wrong(place, wrong)

    def _unfinished(self, unit: int) -> str:
        if self._weights_sharded and unit in self._readable:
            return f"{self._name(unit)} is still gathered here"
        if self._fresh[unit]:
            return f"gradients of {self._name(unit)} are never reduced"
        if self._groups[unit] and self.units.unit(unit).repeated and unit not in self._outer_summed:
            return f"gradients of {self._name(unit)} are not summed over instances"
        return ""

    def _note(self, place: int, access: int) -> None:
        """A boundary."""
        gathered, activation, most = self._gathered, self._activation, self.most
        gradients, under_way = self._gradients.growing, self._gradients.under_way
        if self._every:
            self.boundaries.append(Held(place, access, gathered, gradients, under_way, activation))
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

    def _wrong(self, place: int, what: str) -> ir.PlanError:
        return ir.wrong_op(self.units.rank, place, self.row[place], what)
