"""Orders with the same forwards and input gradients, and weight gradients at another time or in one with theirs.

A search that knows no gathers places a W where a rank would wait. Under a limit in bytes W's that come later, one
behind the other, leave room for weights until then and have one reduction; and a BW has a unit's gradients complete
while units before it are still computed, so that they are reduced beside that.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import BW, B, F, Plan, RawOp, Row, W
from megatron.core.pipeline_parallel.plan.kinds import IS_COMPUTE, IS_TRANSFER


def later(
    plan: Plan,
    by: int,
    costs: CostModel,
    room: Sequence[float],
    whole: Sequence[float],
    *,
    together: bool = False,
    before_last: bool = False,
) -> Plan:
    """Each W behind so many more F's and B's of its row, as far as there are any, and before what there is no room for
    without it.

    room: by rank, bytes for activations and gradients. whole: by stage, bytes of gradients from its first W on.
    together: with one W come all that wait. before_last: all that wait come before the last B.
    """
    rows = (
        _later(row, by, costs, one, whole, together, before_last)
        for row, one in zip(plan.rows, room, strict=True)
    )
    return dataclasses.replace(plan, rows=tuple(rows))


def at_once(plan: Plan) -> Plan:
    """Each W right behind its B."""
    rows = tuple(tuple(one for op in row for one in _with_w(op)) for row in plan.rows)
    return dataclasses.replace(plan, rows=rows)


def fused(plan: Plan, first: int, *, everywhere: bool) -> Plan:
    """A W right behind its B is one with it, of microbatches from `first` on: on all stages, or on the first one, where
    nobody waits for a B's end."""
    rows = (_fused(row, everywhere=everywhere, first=first) for row in plan.rows)
    return dataclasses.replace(plan, rows=tuple(rows))


def one_w_moved(plan: Plan) -> list[Plan]:
    """With one W a computation earlier or later, in one with its B, or a BW in two."""
    rows = ((rank, changed) for rank, row in enumerate(plan.rows) for changed in _one_w_moved(row))
    return [
        dataclasses.replace(plan, rows=(*plan.rows[:rank], row, *plan.rows[rank + 1 :])) for rank, row in rows
    ]


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


def _with_w(op: RawOp) -> tuple[RawOp, ...]:
    if op[0] == W:
        return ()
    return (op, (W, *op[1:])) if op[0] == B else (op,)


def _later(
    row: Row,
    by: int,
    costs: CostModel,
    room: float,
    whole: Sequence[float],
    together: bool,
    before_last: bool,
) -> Row:
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
                held += (0 if one[2] else whole[one[1]]) - costs.released(W, one[1])
            held += more + (whole[stage] if kind == BW and not op[2] else 0)
            count += 1
        if kind != W:
            written.append(op)
        if place == last.get(W):
            written += [one for one, _ in waiting]
            waiting = []
    return tuple(written)


def _fused(row: Row, *, everywhere: bool, first: int) -> Row:
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
