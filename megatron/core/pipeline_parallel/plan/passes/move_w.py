"""Orders with the same forwards and input gradients, whose weight gradients come later, or in one with theirs.

A search that knows no gathers places a W where a rank would wait. Under a limit in bytes W's that come later, one
behind the other, leave room for weights until then and have one reduction; and a BW has a unit's gradients complete
while units before it are still computed, so that they are reduced beside that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import BW, B, F, Plan, RawOp, Row, W
from megatron.core.pipeline_parallel.plan.kinds import IS_COMPUTE, IS_TRANSFER


def later(plan: Plan, by: int, costs: CostModel, room: Sequence[float]) -> Plan:
    """Each W behind so many more F's and B's of its row, as far as there are any; all that wait come where the next one
    would hold more activations than there is room for, by rank."""
    rows = (_later(row, by, costs, one) for row, one in zip(plan.rows, room, strict=True))
    return dataclasses.replace(plan, rows=tuple(rows))


def fused(plan: Plan, first: int, *, everywhere: bool) -> Plan:
    """A W right behind its B is one with it, of microbatches from `first` on: on all stages, or on the first one, where
    nobody waits for a B's end."""
    rows = (_fused(row, everywhere=everywhere, first=first) for row in plan.rows)
    return dataclasses.replace(plan, rows=tuple(rows))


def _later(row: Row, by: int, costs: CostModel, room: float) -> Row:
    last = max((place for place, op in enumerate(row) if op[0] == W), default=-1)
    written: list[RawOp] = []
    waiting: list[tuple[RawOp, int]] = []  # until so many F's and B's stand before it
    count, held = 0, 0.0
    for place, op in enumerate(row):
        if op[0] == W:
            waiting.append((op, count + by))
        elif not IS_COMPUTE[op[0]]:
            written.append(op)
        else:
            more = costs.activation[op[1]] if op[0] == F else -costs.released(op[0], op[1])
            full = held + more > room
            while waiting and (full or waiting[0][1] <= count):
                one = waiting.pop(0)[0]
                written.append(one)
                held -= costs.released(W, one[1])
            written.append(op)
            held += more
            count += 1
        if place == last:
            written += [op for op, _ in waiting]
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
