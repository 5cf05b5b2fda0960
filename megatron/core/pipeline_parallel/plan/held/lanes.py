"""Lanes: what runs beside a rank's computations, each lane on a wire of its own, in the order in which it is issued.

[Note: under way] What is being summed reads gradients until somebody waits for it: one more of its lane, while as many
as the lane's row allows are under way; new gradients of the unit; its sum over instances; the row's end. All these are
places in the row, so what is held depends on no clock.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from megatron.core.pipeline_parallel.plan import ir
from megatron.core.pipeline_parallel.plan.held.units import Share, StageUnits, UnitCosts
from megatron.core.pipeline_parallel.plan.residency import Residency
from megatron.core.sharding_table import ShardOver
from megatron.core.transport.traffic import NOTHING, Moved

T = TypeVar("T")


@dataclass(frozen=True)
class LaneCosts:
    """What the wire to data parallel peers costs, in the cost model's unit of time: latency of a collective, bytes in a
    unit of time. It is one wire a rank; messages between stages are taken to have another one, which they have not
    where both go over the same network card."""

    latency: float = 0.0
    bandwidth: float = float("inf")

    def unshard(self, unit: UnitCosts, *, first: bool) -> float:
        """A gather, and where instances cut the optimizer the one over them before the row's first one."""
        over = [share for share in unit.repeated if share.gathered] if first else []
        return sum(self.of(share.gathered, share.group.size) for share in (*unit.cut, *over))

    def reduce(self, unit: UnitCosts, residency: Residency) -> float:
        """A reduce-scatter; where nothing is cut an all-reduce, which goes round twice."""
        rounds = 2 if residency.row.optimizer is ShardOver.NONE else 1
        return sum(self.of(rounds * share.reduced, share.group.size) for share in unit.cut)

    def outer_sum(self, unit: UnitCosts) -> float:
        """An all-reduce over instances, or where they cut the optimizer a reduce-scatter."""
        return sum(
            self.of((1 if share.gathered else 2) * share.reduced, share.group.size) for share in unit.repeated
        )

    def of(self, payload_bytes: int, ways: int) -> float:
        """What a collective of so many bytes takes, over so many ranks."""
        return self.latency + payload_bytes * (ways - 1) / (ways * self.bandwidth) if ways > 1 else 0.0


class LaneRow(NamedTuple):
    """kinds: of the operations that ride on it. most_under_way: so many of those that wait their turn. costs: of a call
    and a byte; None: what the run measured or was told."""

    name: str
    kinds: tuple[int, ...]
    most_under_way: int
    costs: LaneCosts | None = None


# By name.
LANES = {
    ir.PEERS: LaneRow(
        ir.PEERS,
        tuple(kind for kind, info in ir.KINDS.items() if info.lane == ir.PEERS),
        most_under_way=2,
    )
}


def lane_of(kind: int) -> LaneRow:
    """That an operation rides on."""
    return next(lane for lane in LANES.values() if kind in lane.kinds)


@dataclass(frozen=True)
class Lanes:
    """What a plan's operations of data parallelism are about, and what they cost where the table of lanes says nothing
    else."""

    stages: tuple[StageUnits, ...]
    residency: Residency
    costs: LaneCosts = LaneCosts()


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
        return Moves(*map(operator.add, vars(self).values(), vars(other).values()))


def gathered(shares: Iterable[Share]) -> Moved:
    """By gathers of a unit."""
    return sum((Moved(1, share.gathered) for share in shares if share.gathered), NOTHING)


def summed(shares: Iterable[Share]) -> Moved:
    """By reductions of a unit, or sums over instances."""
    return sum((Moved(share.calls, share.reduced) for share in shares), NOTHING)


class UnderWay(Generic[T]):
    """What is under way, the oldest first: its lane, its unit, and what its owner keeps of it. Whoever is given some of
    it waits for that, and it is under way no more."""

    def __init__(self) -> None:
        self.entries: list[tuple[LaneRow, object, T]] = []

    def before_one_more(self, lane: LaneRow) -> list[T]:
        """What the next one of a lane waits for."""
        mine = [one for one in self.entries if one[0].name == lane.name]
        return self._through(mine[: max(0, len(mine) + 1 - lane.most_under_way)])

    def of(self, unit: object) -> list[T]:
        return self._through([one for one in self.entries if one[1] == unit])

    def every(self) -> list[T]:
        return self._through(self.entries)

    def begin(self, lane: LaneRow, unit: object, what: T) -> None:
        """Behind what it waits for."""
        self.entries.append((lane, unit, what))

    def _through(self, entries: list[tuple[LaneRow, object, T]]) -> list[T]:
        if not entries:
            return []
        self.entries = [one for one in self.entries if one not in entries]
        return [one[2] for one in entries]
