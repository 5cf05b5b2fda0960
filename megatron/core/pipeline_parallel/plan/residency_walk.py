"""The one walk over a row's weights and gradients: what is held at every boundary, what is moved, what is
wrong.

A boundary is behind every operation of data parallelism, behind the beginning of every access, and behind
every computation: bytes change at these only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron.core.pipeline_parallel.plan.activations import activations
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.held_units import HeldUnits, Moves
from megatron.core.pipeline_parallel.plan.ir import Kind, PlanError, RawOp, Row, op_text
from megatron.core.pipeline_parallel.plan.kinds import IS_COMPUTE, IS_DATA_PARALLEL
from megatron.core.pipeline_parallel.plan.placement import Placement
from megatron.core.pipeline_parallel.plan.residency import Grouping, Residency
from megatron.core.pipeline_parallel.plan.units import RankUnits


class Held(NamedTuple):
    """Bytes at one boundary. place: of the operation in the row, access: the one that has begun, -1 where the
    operation is through. gathered: whole weights. gradients: whole ones that still grow or wait. under_way:
    being reduced. activation: in the cost model's unit."""

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


@dataclass(frozen=True)
class RowWalk:
    """What a rank moves and holds in a row.

    peak: the boundary with the largest total. most: the most of each kind, whenever. most_transient: the most
    of weights and gradients together. groups: by number of the unit, for each REDUCE how many microbatches of
    each stage it summed up. boundaries: all of them, where they were asked for.
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

    Raises PlanError naming rank, place and operation where weights are read that are not gathered (V1),
    gathered twice, freed in use or left gathered (V2), where a reduction has nothing to sum, comes too early
    or is missing (V3), and where sums over instances do not follow each unit's last reduction, once (V11).
    """
    walk = _Walk(row, units, residency, costs, forward_only, boundaries)
    walk.run()
    return walk.result()


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


class _Walk:
    def __init__(
        self,
        row: Row,
        units: RankUnits,
        residency: Residency,
        costs: CostModel | None,
        forward_only: bool,
        boundaries: bool,
    ) -> None:
        self.row, self.units = row, units
        self.held = HeldUnits(units, residency, forward_only=forward_only)
        self.activations = None if costs is None else activations(row, costs, forward_only=forward_only)
        self.activation = 0.0
        self.most_transient = 0
        self.peak = self.most = Held(-1, -1, 0, 0, 0, 0.0)
        self.peak_total = 0.0
        self.boundaries: list[Held] | None = [] if boundaries else None

    def run(self) -> None:
        row = self.row
        pending: list[tuple[int, RawOp]] = []  # operations that belong to accesses of the next computation
        for place, op in enumerate(row):
            kind = op[0]
            if IS_COMPUTE[kind]:
                self._compute(place, op, pending)
                pending = []
            elif IS_DATA_PARALLEL[kind] and op[3]:
                pending.append((place, op))
            elif IS_DATA_PARALLEL[kind]:
                if pending:
                    raise self._wrong(place, "stands behind one of a later moment")
                self._lane(place, op, -1)
            elif kind == Kind.STEP or (kind == Kind.SEND_STATE and op[6] > self.units.rank):
                self._refuse(place, self.held.all_through())
        if pending:
            raise self._wrong(pending[0][0], "no computation follows whose accesses it could wait for")
        self._refuse(len(row) - 1, self.held.all_through())
        self._note(len(row) - 1, -1)

    def result(self) -> RowWalk:
        held = self.held
        groups = tuple(map(tuple, held.groups))
        return RowWalk(
            held.moves, self.peak, self.most, self.most_transient, groups, tuple(self.boundaries or ())
        )

    def _compute(self, place: int, op: RawOp, pending: list[tuple[int, RawOp]]) -> None:
        held, stage, uses = self.held, op[1], self.units.uses(op)
        after = 0.0
        if self.activations is not None:
            _, self.activation, after = next(self.activations)
        at, end, before, every = 0, len(pending), 1, self.boundaries is not None
        for access, use in enumerate(uses):
            if access and uses[access - 1].completes:
                held.access_ends(uses[access - 1], stage)
            held.access_starts(use)
            while at < end and pending[at][1][3] <= access + 1:
                if pending[at][1][3] < before:
                    raise self._wrong(pending[at][0], "stands behind one of a later moment")
                before = pending[at][1][3]
                self._lane(*pending[at], access)
                at += 1
            wrong = held.access_needs(use, stage)
            if wrong:
                raise self._wrong(place, wrong)
            if every or not access or use.begins or use.completes:  # else nothing more is held
                self._note(place, access)
        if at < end:
            raise self._wrong(pending[at][0], f"{op_text(op)} has only {len(uses)} accesses")
        held.access_ends(uses[-1], stage)
        held.computation_ends()
        self.activation = after
        if every:
            self._note(place, -1)

    def _lane(self, place: int, op: RawOp, access: int) -> None:
        numbers = self.units.of.get(op[1], ())
        first, end = (op[4], op[5]) if op[4] >= 0 else (0, len(numbers))
        if end > len(numbers):
            raise self._wrong(place, f"stage {op[1]} has {len(numbers)} units on this rank")
        for unit in numbers[first:end]:
            wrong = self.held.perform(op[0], unit)
            if wrong:
                raise self._wrong(place, f"{self.held.name(unit)} {wrong}")
        self._note(place, access)

    def _note(self, place: int, access: int) -> None:
        units, activation, most = self.held, self.activation, self.most
        gathered, gradients, under_way = units.gathered, units.gradients, units.under_way
        if self.boundaries is not None:
            self.boundaries.append(Held(place, access, gathered, gradients, under_way, activation))
        transient = gathered + gradients + under_way
        if transient + activation > self.peak_total:
            self.peak = Held(place, access, gathered, gradients, under_way, activation)
            self.peak_total = transient + activation
        if transient > self.most_transient:
            self.most_transient = transient
        if gathered > most[2] or gradients > most[3] or under_way > most[4] or activation > most[5]:
            self.most = Held(
                -1,
                -1,
                max(gathered, most[2]),
                max(gradients, most[3]),
                max(under_way, most[4]),
                max(activation, most[5]),
            )

    def _refuse(self, place: int, wrong: str) -> None:
        if wrong:
            raise self._wrong(place, wrong)

    def _wrong(self, place: int, what: str) -> PlanError:
        return PlanError(f"rank {self.units.rank}, place {place}, {op_text(self.row[place])}: {what}")
