"""The one walk over a row's weights and gradients: what is held at every boundary, what is moved, and what is wrong.

[Note: boundaries] Bytes change when an operation of data parallelism is issued, when an access adds its first gradient,
and with the activations of computations. Gradients are under way from their REDUCE until the second REDUCE behind it is
issued, which waits for memory; until their unit gets new gradients, which wait for it too; or until the row's end. Both
are moments of the row, so what is held does not depend on any clock. States at rest are not counted: where a strategy
holds weights or gradients whole at rest, none of them are transient.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron.core.pipeline_parallel.plan.activations import activations
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import BW, Kind, PlanError, RawOp, Row, op_text
from megatron.core.pipeline_parallel.plan.placement import Placement
from megatron.core.pipeline_parallel.plan.residency import Grouping, Residency
from megatron.core.pipeline_parallel.plan.units import RankUnits, Use

UNSHARD, RESHARD, REDUCE = int(Kind.UNSHARD), int(Kind.RESHARD), int(Kind.REDUCE)
HSDP_ALL_REDUCE = int(Kind.HSDP_ALL_REDUCE)
LANE = frozenset((UNSHARD, RESHARD, REDUCE, HSDP_ALL_REDUCE))
_STEP, _SEND_STATE = int(Kind.STEP), int(Kind.SEND_STATE)
MOST_UNDER_WAY = 2


@dataclass(frozen=True)
class Moved:
    """Calls of one collective, and the bytes of what they gathered or summed, padding included."""

    calls: int = 0
    payload_bytes: int = 0


@dataclass(frozen=True)
class Moves:
    """What a row's collectives move: gathers and reductions over the ranks that share states, sums and gathers over
    instances. Gathers that open a row are counted in it, as if the weights had changed since the last one."""

    gathers: Moved = Moved()
    reductions: Moved = Moved()
    outer_sums: Moved = Moved()
    outer_gathers: Moved = Moved()


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


@dataclass(frozen=True)
class RowWalk:
    """What a rank moves and holds in a row.

    peak: the boundary with the largest total. most: the most of each kind, whenever. most_transient: the most of
    weights and gradients together. groups: by number of the unit, for
    each REDUCE how many microbatches of each stage it summed up. boundaries: all of them, where they were asked for.
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
    where sums over instances do not follow each unit's last reduction, once (V11); see verify_residency.
    """
    walk = _Walk(row, units, residency, costs, forward_only, boundaries)
    walk.run()
    return walk.result()


def grouping_of(
    placement: Placement, units: Sequence[RankUnits], groups: Sequence[Sequence[Sequence[dict[int, int]]]]
) -> Grouping:
    """By stage and unit how many microbatches each REDUCE sums up. units, groups (as in `RowWalk`): by rank."""
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
        self.row, self.units, self.residency = row, units, residency
        self.forward_only = forward_only
        count = len(units)
        self.cut, self.grads_cut = residency.weights_cut, residency.grads_cut
        # Whether weights can be read: always where they are whole and nobody else changes them.
        self.readable = [not self.cut and (forward_only or not residency.gathers_once)] * count
        self.gathered_before = [False] * count
        self.outer_summed = [False] * count
        self.whole = [False] * count  # has whole gradients
        self.open: set[int] = set()  # units that the computation under way still contributes to
        self.fresh: list[dict[int, int]] = [{} for _ in range(count)]  # stage -> microbatches to be summed
        self.extra: list[dict[int, int]] = [{} for _ in range(count)]  # stage -> bytes of extra accumulators
        self.groups: list[list[dict[int, int]]] = [[] for _ in range(count)]
        self.under: deque[int] = deque()
        self.in_use: tuple[int, ...] = ()
        self.calls = dict.fromkeys((UNSHARD, REDUCE, HSDP_ALL_REDUCE, -1), 0)
        self.payload = dict.fromkeys(self.calls, 0)
        self.gathered = self.gradients = self.under_way = 0
        self.activation = 0.0
        self.activations = None if costs is None else activations(row, costs, forward_only=forward_only)
        self.peak = self.most = Held(-1, -1, 0, 0, 0, 0.0)
        self.most_transient = 0
        self.boundaries: list[Held] | None = [] if boundaries else None

    def run(self) -> None:
        row, pending = self.row, []
        for place, op in enumerate(row):
            kind = op[0]
            if kind <= BW:
                self._compute(place, op, pending)
                pending = []
            elif kind in LANE:
                if op[3]:
                    pending.append((place, op))
                    continue
                if pending:
                    raise self._wrong(place, "begins before the ones in front of it, of the same computation")
                self._lane(place, op)
                self._note(place, -1)
            elif kind == _STEP or (kind == _SEND_STATE and op[6] > self.units.rank):
                self._through(place)
        if pending:
            raise self._wrong(pending[0][0], "no computation follows whose accesses it could wait for")
        self._through(len(row) - 1)
        self._note(len(row) - 1, -1)

    def result(self) -> RowWalk:
        unshard, reduce, outer_sum, outer_gather = (
            Moved(self.calls[kind], self.payload[kind]) for kind in self.calls
        )
        return RowWalk(
            Moves(unshard, reduce, outer_sum, outer_gather),
            self.peak,
            self.most,
            self.most_transient,
            tuple(map(tuple, self.groups)),
            tuple(self.boundaries or ()),
        )

    # Computations ----------------------------------------------------------------------------------

    def _compute(self, place: int, op: RawOp, pending: list[tuple[int, RawOp]]) -> None:
        uses = self.units.uses(op)
        after = 0.0
        if self.activations is not None:
            _, self.activation, after = next(self.activations)
        at, end, before = 0, len(pending), 1
        for access, use in enumerate(uses):
            if access:
                self._end_access(op, uses[access - 1])
            self.in_use = use.reads
            while at < end and pending[at][1][3] <= access + 1:
                if pending[at][1][3] < before:
                    raise self._wrong(pending[at][0], "its moment is before that of the one in front of it")
                before = pending[at][1][3]
                self._lane(*pending[at])
                self._note(place, access)
                at += 1
            self._begin_access(place, op, use)
            self._note(place, access)
        if at < end:
            raise self._wrong(
                pending[at][0], f"{op_text(op)} has {len(uses)} accesses, and never comes to this one"
            )
        self._end_access(op, uses[-1])
        self.in_use = ()
        self.activation = after
        self._note(place, -1)

    def _begin_access(self, place: int, op: RawOp, use: Use) -> None:
        self.in_use = use.reads
        for unit in use.reads:
            if not self.readable[unit]:
                raise self._wrong(place, f"needs the weights of {self._name(unit)}, which are not gathered")
        for unit in use.begins:
            if self.outer_summed[unit] or (self.groups[unit] and not self.grads_cut):
                raise self._wrong(place, f"adds to the gradients of {self._name(unit)} after their last sum")
            self.open.add(unit)
            if self.grads_cut and not self.whole[unit]:
                while unit in self.under:
                    self._end_oldest()
                self.whole[unit] = True
                self.gradients += self.units.grad_bytes[unit]
        if self.grads_cut:
            for unit in use.completes:
                more = self.units.extra_bytes(unit, op[1])
                if more and op[1] not in self.extra[unit]:
                    self.extra[unit][op[1]] = more
                    self.gradients += more

    def _end_access(self, op: RawOp, use: Use) -> None:
        for unit in use.completes:
            self.open.discard(unit)
            fresh = self.fresh[unit]
            fresh[op[1]] = fresh.get(op[1], 0) + 1

    # Operations of data parallelism ----------------------------------------------------------------

    def _lane(self, place: int, op: RawOp) -> None:
        kind, numbers = op[0], self.units.of.get(op[1], ())
        first, end = (op[4], op[5]) if op[4] >= 0 else (0, len(numbers))
        if end > len(numbers):
            raise self._wrong(place, f"stage {op[1]} has {len(numbers)} units on this rank")
        act = {UNSHARD: self._unshard, RESHARD: self._reshard, REDUCE: self._reduce}.get(
            kind, self._outer_sum
        )
        for unit in numbers[first:end]:
            wrong = act(unit)
            if wrong:
                raise self._wrong(place, f"{self._name(unit)} {wrong}")

    def _unshard(self, unit: int) -> str:
        if not (self.cut or self.residency.gathers_once) or (self.forward_only and not self.cut):
            return "is whole at rest"
        if self.readable[unit]:
            return "is gathered already"
        size = self.units.weight_bytes[unit]
        if not size:
            return "has no weights to gather"
        self.readable[unit] = True
        if self.cut:
            self.gathered += size
        if self.residency.ways > 1:
            self._count(UNSHARD, size)
        if self.residency.outer_optimizer and self.residency.outer > 1 and not self.gathered_before[unit]:
            self._count(-1, self.units.unit(unit).outer_weight_bytes)
        self.gathered_before[unit] = True
        return ""

    def _reshard(self, unit: int) -> str:
        if not self.cut:
            return "is whole at rest"
        if not self.readable[unit]:
            return "is not gathered"
        if unit in self.in_use:
            return "is in use"
        self.readable[unit] = False
        self.gathered -= self.units.weight_bytes[unit]
        return ""

    def _reduce(self, unit: int) -> str:
        if unit in self.open:
            return "does not have all gradients of the microbatch under way"
        if not self.fresh[unit]:
            return "has no gradients since they were last summed"
        if self.outer_summed[unit]:
            return "was summed over instances already"
        size = self.units.grad_bytes[unit]
        if self.residency.ways > 1:
            self._count(REDUCE, size)
        self.groups[unit].append(self.fresh[unit])
        self.fresh[unit] = {}
        if self.grads_cut:
            if len(self.under) == MOST_UNDER_WAY:
                self._end_oldest()
            self.under.append(unit)
            self.whole[unit] = False
            self.under_way += size
            self.gradients -= size + sum(self.extra[unit].values())
            self.extra[unit].clear()
        return ""

    def _outer_sum(self, unit: int) -> str:
        if self.residency.outer == 1:
            return "has no other instances"
        if not self.groups[unit] or self.fresh[unit] or unit in self.open:
            return "is summed over instances before its last reduction"
        if self.outer_summed[unit]:
            return "is summed over instances twice"
        self.outer_summed[unit] = True
        self._count(HSDP_ALL_REDUCE, self.units.unit(unit).outer_grad_bytes)
        return ""

    def _count(self, kind: int, payload: int) -> None:
        self.calls[kind] += 1
        self.payload[kind] += payload

    def _end_oldest(self) -> None:
        self.under_way -= self.units.grad_bytes[self.under.popleft()]

    def _through(self, place: int) -> None:
        """What must be so where a step is decided on, and at the row's end."""
        for unit in range(len(self.units)):
            if self.cut and self.readable[unit]:
                raise self._wrong(place, f"{self._name(unit)} is still gathered here")
            if self.fresh[unit]:
                raise self._wrong(place, f"gradients of {self._name(unit)} are never reduced")
            if self.groups[unit] and self.residency.outer > 1 and not self.outer_summed[unit]:
                raise self._wrong(place, f"gradients of {self._name(unit)} are not summed over instances")
        while self.under:
            self._end_oldest()

    # ---

    def _note(self, place: int, access: int) -> None:
        held = Held(place, access, self.gathered, self.gradients, self.under_way, self.activation)
        if self.boundaries is not None:
            self.boundaries.append(held)
        if held.total > self.peak.total:
            self.peak = held
        self.most_transient = max(self.most_transient, held.transient)
        most = self.most
        if (
            held.gathered > most.gathered
            or held.gradients > most.gradients
            or held.under_way > most.under_way
            or held.activation > most.activation
        ):
            self.most = Held(-1, -1, *map(max, held[2:], most[2:]))

    def _name(self, unit: int) -> str:
        return f"unit {self.units.unit(unit).name}"

    def _wrong(self, place: int, what: str) -> PlanError:
        op = self.row[place] if self.row else None
        return PlanError(f"rank {self.units.rank}, place {place}, {op_text(op) if op else 'nothing'}: {what}")
