"""The weight gradients at a row's end, unit by unit: their reductions begin early and run beside the rest.

Behind its last B a rank has W's only, and nobody waits for them. Taken microbatch by microbatch, the first
unit is complete in the last W. Taken chunk by chunk and range of units by range of units, each for all
microbatches, the first range is complete early; the order of microbatches in a unit stays, and with it every
bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from megatron.core.pipeline_parallel.plan.ir import Plan, RawOp, Row, W
from megatron.core.pipeline_parallel.plan.kinds import IS_COMPUTE
from megatron.core.pipeline_parallel.plan.units import StageUnits

PARTS = (1 << 20, 4, 1)  # all, some, none: whole chunks one after the other


def split_trailing(plan: Plan, stages: Sequence[StageUnits], parts: int) -> Plan:
    """The plan with each stage's trailing W's in up to so many parts; the same plan where no row has any to
    split. Chunks, and parts of a chunk, come in the order of their largest unit's gradients, the largest
    first."""
    rows = tuple(_split(row, stages, parts) for row in plan.rows)
    return plan if rows == plan.rows else dataclasses.replace(plan, rows=rows)


def _split(row: Row, stages: Sequence[StageUnits], parts: int) -> Row:
    first = 1 + max((place for place, op in enumerate(row) if IS_COMPUTE[op[0]] and op[0] != W), default=-1)
    tail = row[first:]
    trailing = [op for op in tail if op[0] == W]
    if len(trailing) < 2:
        return row
    last = max(place for place, op in enumerate(tail) if op[0] == W)
    before = [op for op in tail[:last] if op[0] != W]
    written: list[RawOp] = []
    for stage in sorted({op[1] for op in trailing}, key=lambda one: (-_largest(stages[one]), -one)):
        mine = [op for op in trailing if op[1] == stage]
        ranges = _ranges(stages[stage], parts) if len(mine) > 1 else [(-1, -1)]
        written += [(*op[:4], begin, end, *op[6:]) for begin, end in ranges for op in mine]
    return (*row[:first], *before, *written, *tail[last + 1 :])


def _ranges(stage: StageUnits, parts: int) -> list[tuple[int, int]]:
    """Units cut into ranges of about the same bytes of gradients, from the last unit on; (-1, -1): all of
    them."""
    sizes = [unit.grad_bytes for unit in stage.units]
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


def _largest(stage: StageUnits) -> int:
    return max((unit.grad_bytes for unit in stage.units), default=0)
