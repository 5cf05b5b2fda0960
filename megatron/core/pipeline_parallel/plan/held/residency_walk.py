"""The one walk over a row's weights and gradients: what is held at every boundary, what is moved, what is wrong.

A boundary is behind every operation of data parallelism, behind the beginning of every access, and behind every
computation: bytes change at these only. States at rest are not counted: where a strategy holds weights or gradients
whole at rest, none of them are transient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron.core.pipeline_parallel.plan.costs import CostModel, activations
from megatron.core.pipeline_parallel.plan.held.row_uses import WholeGradients
from megatron.core.pipeline_parallel.plan.held.units import RankUnits, Use
from megatron.core.pipeline_parallel.plan.ir import (
    REDUCE,
    RESHARD,
    UNSHARD,
    Kind,
    RawOp,
    Row,
    op_text,
    wrong_op,
)
from megatron.core.pipeline_parallel.plan.kinds import IS_COMPUTE, IS_DATA_PARALLEL
from megatron.core.pipeline_parallel.plan.placement import Placement
from megatron.core.pipeline_parallel.plan.residency import Grouping, Residency
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
    instances. Gathers that open a row are counted in it, as if weights had changed since the last one."""

    gathers: Moved = NOTHING
    reductions: Moved = NOTHING
    outer_sums: Moved = NOTHING
    outer_gathers: Moved = NOTHING


@dataclass(frozen=True)
class RowWalk:
    """What a rank moves and holds in a row.

    peak: the boundary with the largest total. most: the most of each kind, whenever. most_transient: the most of
    weights and gradients together. groups: by number of the unit, for each REDUCE how many microbatches of each stage
    it summed up. boundaries: all of them, where they were asked for.
    """

    moves: Moves
    peak: Held
    most: Held
    most_transient: int
    groups: tuple[tuple[dict[int, int], ...], ...]
    boundaries: tuple[Held, ...]


def walk_row(
    row: Row,
    units: RankUnits,
    residency: Residency,
    costs: CostModel | None = None,
    *,
    forward_only: bool = False,
    boundaries: bool = False,
) -> RowWalk:
    """Walk one rank's row. costs: of activations, none without. boundaries: list every one of them.

    Raises PlanError naming rank, place and operation where weights are read that are not gathered (V1), gathered twice,
    freed in use or left gathered (V2), where a reduction has nothing to sum, comes too early or is missing (V3), and
    where sums over instances do not follow each unit's last reduction, once (V11).
    """
    held = activations(row, costs, forward_only=forward_only) if costs is not None else iter(())
    walk = _ResidencyWalk(row, units, residency, forward_only=forward_only, boundaries=boundaries)
    for place, op, inside in with_their_computations(units.rank, row):
        if IS_COMPUTE[op[0]]:
            _, during, after = next(held, (place, 0.0, 0.0))
            walk.compute(place, op, inside, during, after)
        elif IS_DATA_PARALLEL[op[0]]:
            walk.lane(place, op, -1)
        elif op[0] == Kind.STEP or (op[0] == Kind.SEND_STATE and op[6] > units.rank):
            walk.all_through(place)
    walk.all_through(len(row) - 1)
    walk.note(len(row) - 1, -1)
    groups = tuple(map(tuple, walk.groups))
    return RowWalk(
        walk.moves, walk.peak, walk.most, walk.most_transient, groups, tuple(walk.boundaries or ())
    )


def with_their_computations(rank: int, row: Row) -> Iterator[tuple[int, RawOp, list[tuple[int, RawOp]]]]:
    """(place, operation, operations within it) of a row: those of data parallelism that belong to accesses of the next
    computation come with it. Raises PlanError where there is none, and where they are out of order."""
    inside: list[tuple[int, RawOp]] = []
    for place, op in enumerate(row):
        if IS_DATA_PARALLEL[op[0]] and (op[3] or inside):
            if inside and op[3] < inside[-1][1][3]:
                raise wrong_op(rank, place, op, "stands behind one of a later moment")
            inside.append((place, op))
            continue
        yield place, op, inside
        if IS_COMPUTE[op[0]]:
            inside = []
    if inside:
        raise wrong_op(rank, *inside[0], "no computation follows whose accesses it could wait for")


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


class _ResidencyWalk:
    """The state of a walk, and what is noted of it."""

    def __init__(
        self, row: Row, units: RankUnits, residency: Residency, *, forward_only: bool, boundaries: bool
    ) -> None:
        self.row, self.units, self.residency = row, units, residency
        self.moves, self.gathered, self.gradients = Moves(), 0, WholeGradients(units)
        count = len(units)
        self.groups: list[list[dict[int, int]]] = [[] for _ in range(count)]
        self._weights_sharded, self._grads_sharded = residency.weights_sharded, residency.grads_sharded
        self._gathers = residency.weights_sharded or (residency.gathers_once and not forward_only)
        self._readable = [not self._gathers] * count
        self._gathered_before = [False] * count
        self._outer_summed = [False] * count
        self._open: set[int] = set()  # units that the computation under way still contributes to
        self._fresh: list[dict[int, int]] = [{} for _ in range(count)]  # stage -> microbatches to be summed
        self._in_use: tuple[int, ...] = ()
        self.activation = 0.0
        self.most_transient = 0
        self.peak = self.most = Held(-1, -1, 0, 0, 0, 0.0)
        self._peak_total = 0.0
        self.boundaries: list[Held] | None = [] if boundaries else None

    def compute(
        self, place: int, op: RawOp, inside: list[tuple[int, RawOp]], during: float, after: float
    ) -> None:
        """A computation with the operations that belong to its accesses. during, after: activations."""
        uses, every = self.units.uses(op), self.boundaries is not None
        self.activation = during
        at, end = 0, len(inside)
        for access, use in enumerate(uses):
            self._in_use = use.reads
            while at < end and inside[at][1][3] <= access + 1:
                self.lane(*inside[at], access)
                at += 1
            wrong = self._begin(use, op[1])
            if wrong:
                raise wrong_op(self.units.rank, place, op, wrong)
            if every or not access or use.begins or use.completes:  # else nothing more is held
                self.note(place, access)
            if access + 1 < len(uses):
                self._complete(use, op[1])
        if at < end:
            what = f"{op_text(op)} has only {len(uses)} accesses"
            raise wrong_op(self.units.rank, *inside[at], what)
        self._complete(uses[-1], op[1])
        self._in_use, self.activation = (), after
        if every:
            self.note(place, -1)

    def _begin(self, use: Use, stage: int) -> str:
        """An access: its weights are read, its gradients get memory. What is wrong with it, or nothing."""
        for unit in use.reads:
            if not self._readable[unit]:
                return f"needs the weights of {self._name(unit)}, which are not gathered"
        for unit in use.begins:
            if self._outer_summed[unit] or (self.groups[unit] and not self._grads_sharded):
                return f"adds to the gradients of {self._name(unit)} after their last sum"
            self._open.add(unit)
            if self._grads_sharded:
                self.gradients.begin(unit)
        if self._grads_sharded and self.units.extra_bytes:
            for unit in use.completes:
                self.gradients.complete(unit, stage)
        return ""

    def _complete(self, use: Use, stage: int) -> None:
        for unit in use.completes:
            self._open.discard(unit)
            self._fresh[unit][stage] = self._fresh[unit].get(stage, 0) + 1

    def lane(self, place: int, op: RawOp, access: int) -> None:
        """One operation of data parallelism, on each of its units."""
        numbers = self.units.of.get(op[1], ())
        first, end = (op[4], op[5]) if op[4] >= 0 else (0, len(numbers))
        if end > len(numbers):
            raise wrong_op(self.units.rank, place, op, f"stage {op[1]} has {len(numbers)} units on this rank")
        does = {UNSHARD: self._unshard, RESHARD: self._reshard, REDUCE: self._reduce}.get(
            op[0], self._outer_sum
        )
        for unit in numbers[first:end]:
            wrong = does(unit)
            if wrong:
                raise wrong_op(self.units.rank, place, op, f"{self._name(unit)} {wrong}")
        self.note(place, access)

    def _unshard(self, unit: int) -> str:
        if not self._gathers:
            return "is whole at rest"
        if self._readable[unit]:
            return "is gathered already"
        size, moves = self.units.weight_bytes[unit], self.moves
        if not size:
            return "has no weights to gather"
        self._readable[unit] = True
        if self._weights_sharded:
            self.gathered += size
        if self.residency.ways > 1:
            moves.gathers += Moved(1, size)
        if self.residency.outer_optimizer and self.residency.outer > 1 and not self._gathered_before[unit]:
            moves.outer_gathers += Moved(1, self.units.unit(unit).outer_weight_bytes)
        self._gathered_before[unit] = True
        return ""

    def _reshard(self, unit: int) -> str:
        if not self._weights_sharded:
            return "is whole at rest"
        if not self._readable[unit]:
            return "is not gathered"
        if unit in self._in_use:
            return "is in use"
        self._readable[unit] = False
        self.gathered -= self.units.weight_bytes[unit]
        return ""

    def _reduce(self, unit: int) -> str:
        if unit in self._open:
            return "does not have all gradients of the microbatch under way"
        if not self._fresh[unit]:
            return "has no gradients since they were last summed"
        if self._outer_summed[unit]:
            return "was summed over instances already"
        if self.residency.ways > 1:
            self.moves.reductions += Moved(self.units.unit(unit).reduce_calls, self.units.grad_bytes[unit])
        self.groups[unit].append(self._fresh[unit])
        self._fresh[unit] = {}
        if self._grads_sharded:
            self.gradients.reduce(unit)
        return ""

    def _outer_sum(self, unit: int) -> str:
        if self.residency.outer == 1:
            return "has no other instances"
        if not self.groups[unit] or self._fresh[unit] or unit in self._open:
            return "is summed over instances before its last reduction"
        if self._outer_summed[unit]:
            return "is summed over instances twice"
        self._outer_summed[unit] = True
        self.gradients.outer_sum(unit)
        one = self.units.unit(unit)
        self.moves.outer_sums += Moved(one.outer_calls, one.outer_grad_bytes)
        return ""

    def all_through(self, place: int) -> None:
        """What must be so where a step is decided on, and at the row's end."""
        self.gradients.wait_for()
        for unit in range(len(self.units)):
            name, wrong = self._name(unit), ""
            if self._weights_sharded and self._readable[unit]:
                wrong = f"{name} is still gathered here"
            elif self._fresh[unit]:
                wrong = f"gradients of {name} are never reduced"
            elif self.groups[unit] and self.residency.outer > 1 and not self._outer_summed[unit]:
                wrong = f"gradients of {name} are not summed over instances"
            if wrong:
                raise wrong_op(self.units.rank, place, self.row[place], wrong)

    def note(self, place: int, access: int) -> None:
        """A boundary."""
        gathered, activation, most = self.gathered, self.activation, self.most
        gradients, under_way = self.gradients.growing, self.gradients.under_way
        if self.boundaries is not None:
            self.boundaries.append(Held(place, access, gathered, gradients, under_way, activation))
        transient = gathered + gradients + under_way
        if transient + activation > self._peak_total:
            self.peak = Held(place, access, gathered, gradients, under_way, activation)
            self._peak_total = transient + activation
        self.most_transient = max(self.most_transient, transient)
        if gathered > most[2] or gradients > most[3] or under_way > most[4] or activation > most[5]:
            transients = (max(gathered, most[2]), max(gradients, most[3]), max(under_way, most[4]))
            self.most = Held(-1, -1, *transients, max(activation, most[5]))

    def _name(self, unit: int) -> str:
        return f"unit {self.units.unit(unit).name}"
