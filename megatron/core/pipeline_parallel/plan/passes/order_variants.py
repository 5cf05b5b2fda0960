"""Other orders of a plan's computations: weight gradients at another time, in parts, or in one with their input
gradients, forwards held back. The order of microbatches in a unit stays, and with it every bit.

A search that knows no gathers places a W where a rank would wait. Under a limit in bytes W's that come later, one
behind the other, leave room for weights until then and have one reduction; and a BW has a unit's gradients complete
while units before it are still computed, so that they are reduced beside that.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.held.units import StageUnits
from megatron.core.pipeline_parallel.plan.ir import BW, IS_COMPUTE, IS_TRANSFER, B, F, Plan, RawOp, Row, W

_SLACK = 1e-9
PARTS = (1 << 20, 4, 1)  # of trailing W's: all, some, none: whole chunks one after the other


class Room(NamedTuple):
    """What orders have to fit into. free: by rank, bytes for activations, gradients and what is read. most_read: by
    rank, the most that one access reads. whole_grads: by stage, bytes of gradients from its first W on, 0 where they
    are whole at rest."""

    free: Sequence[float]
    most_read: Sequence[float]
    whole_grads: Sequence[float]


def _by_row(plan: Plan, change: Callable[[Row], Row]) -> Plan:
    """The plan with every row changed; the same plan where none is."""
    rows = tuple(map(change, plan.rows))
    return plan if rows == plan.rows else dataclasses.replace(plan, rows=rows)


def with_row(plan: Plan, rank: int, row: Row) -> Plan:
    """The plan with another row of one rank."""
    return dataclasses.replace(plan, rows=(*plan.rows[:rank], row, *plan.rows[rank + 1 :]))


def delay_w(
    plan: Plan, by: int, costs: CostModel, room: Room, *, together: bool = False, before_last: bool = False
) -> Plan:
    """Each W behind so many more F's and B's of its row, as far as there are any, and before what there is no room for
    without it. together: with one W come all that wait. before_last: all that wait come before the last B."""

    def delayed(row: Row, room: float, grads: Sequence[float]) -> Row:
        last = {op[0]: place for place, op in enumerate(row)}
        written: list[RawOp] = []
        waiting: list[tuple[RawOp, int]] = []  # until so many F's and B's stand before it
        count, held = 0, 0.0
        for place, op in enumerate(row):
            kind, stage = op[0], op[1]
            if kind == W:
                waiting.append((op, count + by))
            elif IS_COMPUTE[kind]:
                more = costs.activation[stage] if kind == F else -costs.released(kind, stage)
                flush = before_last and place == last.get(B)
                while waiting and (held + more > room or flush or waiting[0][1] <= count):
                    flush = flush or together
                    one = waiting.pop(0)[0]
                    written.append(one)
                    held += (0 if one[2] else grads[one[1]]) - costs.released(W, one[1])
                held += more + (grads[stage] if kind == BW and not op[2] else 0)
                count += 1
            if kind != W:
                written.append(op)
            if place == last.get(W):
                written += [one for one, _ in waiting]
                waiting = []
        return tuple(written)

    every = zip(plan.rows, room.free, room.most_read, strict=True)
    rows = (delayed(row, free - read, room.whole_grads) for row, free, read in every)
    return dataclasses.replace(plan, rows=tuple(rows))


def w_behind_b(plan: Plan) -> Plan:
    """Each W right behind its B."""

    def behind(row: Row) -> Row:
        written: list[RawOp] = []
        for op in row:
            if op[0] != W:
                written.append(op)
            if op[0] == B:
                written.append((W, *op[1:]))
        return tuple(written)

    return _by_row(plan, behind)


def fuse_bw(plan: Plan, first: int, *, everywhere: bool) -> Plan:
    """A W right behind its B is one with it, of microbatches from `first` on: on all stages, or on the first one, where
    nobody waits for a B's end."""

    def fused(row: Row) -> Row:
        written = list(row)
        before = None  # the place of a B with transfers alone behind it
        gone = set()
        for place, op in enumerate(row):
            if op[0] == B and (everywhere or not op[1]) and op[2] >= first and op[7] < 0:
                before = place
            elif before is not None and op[0] == W and op[1:] == row[before][1:]:
                written[before] = (BW, *op[1:])
                gone.add(place)
            if op[0] != B and not IS_TRANSFER[op[0]]:
                before = None
        return tuple(op for place, op in enumerate(written) if place not in gone)

    return _by_row(plan, fused)


def one_w_moved(plan: Plan) -> Iterator[Plan]:
    """With one W a computation earlier or later, in one with its B, or a BW in two."""
    for rank, row in enumerate(plan.rows):
        for changed in _one_w_moved(row):
            yield with_row(plan, rank, changed)


def _one_w_moved(row: Row) -> Iterator[Row]:
    places = [place for place, op in enumerate(row) if IS_COMPUTE[op[0]]]
    for before, place in itertools.pairwise([-1, *places]):
        op, other = row[place], row[before]
        if op[0] == BW:
            yield (*row[:place], (B, *op[1:]), (W, *op[1:]), *row[place + 1 :])
        parts = max(op[4], other[4]) >= 0  # they stay at the row's end
        if before < 0 or W not in (op[0], other[0]) or parts:
            continue
        if other[0] == B and other[1:] == op[1:]:
            yield (*row[:before], (BW, *op[1:]), *row[before + 1 : place], *row[place + 1 :])
        elif other[0] == W and op[0] != W and (op[0] != BW or op[1] != other[1]):
            yield (*row[:before], *row[before + 1 : place + 1], other, *row[place + 1 :])
        elif op[0] == W and (op[1] != other[1] or other[0] not in (W, BW)):
            yield (*row[:before], op, *row[before:place], *row[place + 1 :])


def split_trailing(plan: Plan, stages: Sequence[StageUnits], parts: int) -> Plan:
    """The plan with each stage's trailing W's in up to so many parts; the same plan where no row has any to split.

    Behind its last B a rank has W's only, and nobody waits for them. Taken microbatch by microbatch, the first unit is
    complete in the last W. Taken chunk by chunk and range of units by range of units, each for all microbatches, the
    first range is complete early, and its reduction runs beside the rest. Chunks, and parts of a chunk, come in the
    order of their largest unit's gradients, the largest first.
    """

    def split(row: Row) -> Row:
        first = 1 + max(
            (place for place, op in enumerate(row) if IS_COMPUTE[op[0]] and op[0] != W), default=-1
        )
        tail = row[first:]
        trailing = [op for op in tail if op[0] == W]
        if len(trailing) < 2:
            return row
        last = max(place for place, op in enumerate(tail) if op[0] == W)
        written = [op for op in tail[:last] if op[0] != W]
        sizes = {
            stage: [unit.reduced_bytes for unit in stages[stage].units]
            for stage in {op[1] for op in trailing}
        }
        for stage in sorted(sizes, key=lambda one: (-max(sizes[one], default=0), -one)):
            mine = [op for op in trailing if op[1] == stage]
            ranges = _ranges(sizes[stage], parts) if len(mine) > 1 else [(-1, -1)]
            written += [(*op[:4], begin, end, *op[6:]) for begin, end in ranges for op in mine]
        return (*row[:first], *written, *tail[last + 1 :])

    return _by_row(plan, split)


def _ranges(sizes: Sequence[int], parts: int) -> list[tuple[int, int]]:
    """Units cut into ranges of about the same bytes of gradients, from the last unit on; (-1, -1): all of them."""
    ranges: list[tuple[int, int]] = []
    end, held = len(sizes), 0
    for unit in reversed(range(len(sizes))):
        held += sizes[unit]
        if held * parts >= sum(sizes) or not unit:
            ranges.append((unit, end))
            end, held = unit, 0
    if len(ranges) < 2:
        return [(-1, -1)]
    return sorted(ranges, key=lambda one: -max(sizes[one[0] : one[1]]))


def hold_back(plan: Plan, costs: CostModel, room: Room) -> Plan | None:
    """The same computations, with forwards held back where a rank has no room for what they leave.

    What a rank may hold of activations changes within a step: from its first weight gradient on, gradients are whole
    until they are reduced. An order made for the room before that holds too much behind it; an order made for the room
    behind it lets ranks wait for each other at the beginning, where there is room.

    plan: of computations alone. None where some rank can go no further.

    In each sweep over the ranks each takes the first of its row that there is room for, as long as its input is there.
    Where all ranks wait for each other, the result that is there first is used earlier than the row says.
    """
    walk = _HoldBack(plan, costs, room)
    while any(walk.left):
        moved = [walk.advance(rank) for rank in range(len(plan.rows))]
        if not any(moved) and not walk.jump():
            return None
    return dataclasses.replace(plan, rows=tuple(map(tuple, walk.rows)))


# By kind, what of its own stage a computation comes behind: so many microbatches before its own one.
_BEHIND = {F: ((F, 1),), B: ((B, 1), (F, 0)), W: ((W, 1), (B, 0)), BW: ((B, 1), (W, 1), (F, 0))}


class _HoldBack:
    """left: by rank, what it has not done. ends: when F, B and W of a stage and microbatch are through, if known."""

    def __init__(self, plan: Plan, costs: CostModel, room: Room) -> None:
        self.costs, self.whole_grads, self.durations = costs, room.whole_grads, costs.durations()
        self.room, self.most_read = [one * (1 + _SLACK) for one in room.free], room.most_read
        self.rank_of = plan.placement.ranks()
        self.left = list(map(list, plan.rows))
        self.rows: list[list[RawOp]] = [[] for _ in plan.rows]
        self.held, self.clock = [0.0] * len(plan.rows), [0.0] * len(plan.rows)
        self.ends = {(kind, stage, -1): 0.0 for kind in (F, B, W) for stage in range(len(self.rank_of))}

    def advance(self, rank: int) -> bool:
        """As far as the row goes; whether that is any further."""
        before = len(self.rows[rank])
        while (op := next(self._possible(rank), None)) and self._start(rank, op) < math.inf:
            self._take(rank, op)
        return len(self.rows[rank]) > before

    def jump(self) -> bool:
        """One computation out of its row's order: the one that can start first; whether there is any."""
        found: list[tuple[float, int, RawOp]] = []
        for rank in range(len(self.rows)):
            starts = ((self._start(rank, op), rank, op) for op in self._possible(rank))
            found += itertools.islice((one for one in starts if one[0] < math.inf), 1)
        if found:
            _, rank, op = min(found)
            self._take(rank, op)
        return bool(found)

    def _possible(self, rank: int) -> Iterator[RawOp]:
        """What the rank itself is ready for and has room for while it runs, in the row's order: B's and W's free at
        their ends."""
        for op in self.left[rank]:
            kind, stage, one = op[:3]
            if all((before, stage, one - by) in self.ends for before, by in _BEHIND[kind]):
                more = self._more(kind, stage, one)
                if kind in (W, BW) and not one:
                    more = max(more, self.whole_grads[stage])
                read = 0.0 if kind == W else self.most_read[rank]
                if more <= 0 or self.held[rank] + more + read <= self.room[rank]:
                    yield op

    def _more(self, kind: int, stage: int, one: int) -> float:
        """Bytes that are held behind a computation beyond those before it."""
        if kind == F:
            return self.costs.activation[stage]
        first_w = kind in (W, BW) and not one
        return self.whole_grads[stage] * first_w - self.costs.released(kind, stage)

    def _start(self, rank: int, op: RawOp) -> float:
        """When it can; infinity where it is not known when what it needs is there."""
        kind, stage, one = op[:3]
        if kind == W or (kind == F and not stage):
            return self.clock[rank]
        last = len(self.rank_of) - 1
        source = (F, stage - 1) if kind == F else (B, stage + 1) if stage < last else (F, stage)
        arrival = self.ends.get((*source, one), math.inf)
        if self.rank_of[source[1]] != rank:
            arrival += self.costs.comm
        return max(arrival, self.clock[rank])

    def _take(self, rank: int, op: RawOp) -> None:
        kind, stage, one = op[:3]
        self.clock[rank] = self._start(rank, op) + self.durations[kind][stage]
        self.held[rank] += self._more(kind, stage, one)
        for written in (B, W) if kind == BW else (kind,):
            self.ends[written, stage, one] = self.clock[rank]
        self.left[rank].remove(op)
        self.rows[rank].append(op)
