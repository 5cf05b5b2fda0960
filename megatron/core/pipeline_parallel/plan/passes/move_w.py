"""Orders with the same forwards and input gradients, and weight gradients at another time, in parts, or in one with
theirs; the order of microbatches in a unit stays, and with it every bit.

A search that knows no gathers places a W where a rank would wait. Under a limit in bytes W's that come later, one
behind the other, leave room for weights until then and have one reduction; and a BW has a unit's gradients complete
while units before it are still computed, so that they are reduced beside that.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import BW, B, F, Plan, RawOp, Row, W
from megatron.core.pipeline_parallel.plan.kinds import IS_COMPUTE, IS_TRANSFER
from megatron.core.pipeline_parallel.plan.units import StageUnits

PARTS = (1 << 20, 4, 1)  # of trailing W's: all, some, none: whole chunks one after the other


def _by_row(plan: Plan, change: Callable[[Row], Row]) -> Plan:
    """The plan with every row changed; the same plan where none is."""
    rows = tuple(map(change, plan.rows))
    return plan if rows == plan.rows else dataclasses.replace(plan, rows=rows)


def with_row(plan: Plan, rank: int, row: Row) -> Plan:
    """The plan with another row of one rank."""
    return dataclasses.replace(plan, rows=(*plan.rows[:rank], row, *plan.rows[rank + 1 :]))


def delay_w(
    plan: Plan,
    by: int,
    costs: CostModel,
    room: Sequence[float],
    whole_grads: Sequence[float],
    *,
    together: bool = False,
    before_last: bool = False,
) -> Plan:
    """Each W behind so many more F's and B's of its row, as far as there are any, and before what there is no room for
    without it.

    room: by rank, bytes for activations and gradients. whole_grads: by stage, bytes of gradients from its first W on.
    together: with one W come all that wait. before_last: all that wait come before the last B.
    """

    def delayed(row: Row, room: float) -> Row:
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
                    held += (0 if one[2] else whole_grads[one[1]]) - costs.released(W, one[1])
                held += more + (whole_grads[stage] if kind == BW and not op[2] else 0)
                count += 1
            if kind != W:
                written.append(op)
            if place == last.get(W):
                written += [one for one, _ in waiting]
                waiting = []
        return tuple(written)

    rows = (delayed(row, one) for row, one in zip(plan.rows, room, strict=True))
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
            stage: [unit.grad_bytes for unit in stages[stage].units] for stage in {op[1] for op in trailing}
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
