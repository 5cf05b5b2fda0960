"""Schedules as data: a row of operations for each stage, made, checked and timed. Pure.

F is a forward, B a backward with respect to the input, W with respect to the weights, BW both (arXiv 2401.10241).
"""

import difflib
import itertools
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

F, B, W, BW = "F", "B", "W", "BW"
Op = tuple[str, int]  # kind, microbatch
Message = tuple[int, str, int]  # when it is sent, F or B, microbatch
Row = tuple[Op, ...]
Rows = tuple[Row, ...]  # by stage

_COSTS = {F: 1, B: 1, W: 1, BW: 2}
MADE_HERE, KNOWN = "zb-h1", ("zb-h1", "zb-h2", "zb-1p", "zb-2p", "1f1b")


def known(schedule: str) -> None:
    """Raises ValueError for a schedule that `make` does not make: with the nearest name, or how to save its plan."""
    if schedule in KNOWN and schedule != MADE_HERE:
        how = f"`show_schedule.py --schedule {schedule} --stages P --microbatches M --format plan > FILE`"
        raise ValueError(f"only {MADE_HERE} is made here: save {schedule} by Megatron-Zero's {how}, and give plan=FILE")
    if schedule != MADE_HERE:
        nearest = difflib.get_close_matches(str(schedule), KNOWN, n=1, cutoff=0)[0]
        raise ValueError(f"no schedule {schedule!r}: did you mean {nearest}? There are {', '.join(KNOWN)}")


def make(stages: int, microbatches: int) -> Rows:
    """ZB-H1: stage s of p runs p-s forwards ahead, or all there are, then turns of B, W (once more than s wait, which
    fill the end of its row) and F."""
    rows = []
    for stage in range(stages):
        ahead = stages - stage
        row = [(F, microbatch) for microbatch in range(min(ahead, microbatches))]
        for microbatch in range(microbatches):
            row.append((B, microbatch))
            row += [(W, microbatch - stage)] if microbatch >= stage else []
            row += [(F, ahead + microbatch)] if ahead + microbatch < microbatches else []
        row += [(W, microbatch) for microbatch in range(max(microbatches - stage, 0), microbatches)]
        rows.append(tuple(row))
    return tuple(rows)


class Plan(NamedTuple):
    """Rows and their times, of F = B = W = 1 and messages that take none. ends: by F or B (BW too), stage, microbatch.
    bubble: of the step, where ranks wait for each other between steps; bubble_apart: where they do not."""

    rows: Rows
    ends: dict[tuple[str, int, int], int]
    bubble: float
    bubble_apart: float


def check(rows: Rows, microbatches: int) -> Plan:
    """Each F, B and W once, in the order of microbatches. Raises ValueError naming what is not, or waits for ever."""
    for stage, row in enumerate(rows):
        for part, kinds in ((F, (F,)), (B, (B, BW)), (W, (W, BW))):
            there = [microbatch for kind, microbatch in row if kind in kinds]
            if len(there) != microbatches or there != list(range(microbatches)):
                raise ValueError(
                    f"stage {stage} has {part} of microbatches {there!s:.80}: each of {microbatches} stands once, in "
                    "order, or gradients would not have 1F1B's bits"
                )
    return timed(rows)


def timed(rows: Rows) -> Plan:
    """Raises ValueError naming an operation that would wait for ever."""
    ends: dict[tuple[str, int, int], int] = {}
    left, clocks, begins = [deque(row) for row in rows], [0] * len(rows), [0] * len(rows)
    while any(left):
        moved = False
        for stage, row in enumerate(left):
            needs = {F: [(F, stage - 1)], B: [(F, stage), (B, stage + 1)], W: [(B, stage)]}
            while row:
                kind, microbatch = row[0]
                direction = B if kind == BW else kind
                others = [(*need, microbatch) for need in needs[direction] if 0 <= need[1] < len(rows)]
                if not all(other in ends for other in others):
                    break
                begin = max([clocks[stage], *(ends[other] for other in others)])
                begins[stage] = begins[stage] if clocks[stage] else begin
                clocks[stage] = ends[direction, stage, microbatch] = begin + _COSTS[kind]
                moved = bool(row.popleft())
        if not moved:
            stage, (kind, microbatch) = next((stage, row[0]) for stage, row in enumerate(left) if row)
            raise ValueError(f"stage {stage}: {kind}{microbatch} would wait for ever for what it needs")
    work = max(sum(_COSTS[kind] for kind, _ in row) for row in rows)
    apart = max(end - begin for begin, end in zip(begins, clocks, strict=True))
    return Plan(rows, ends, 1 - work / max(clocks), 1 - work / apart)


def between(plan: Plan, stage: int, microbatches: int) -> list[Message]:
    """All messages between a stage and the next by the time they are sent, which is an order that both can keep:
    activations as F, their gradients as B."""
    sent = [(plan.ends[kind, at, m], kind, m) for kind, at in ((F, stage), (B, stage + 1)) for m in range(microbatches)]
    return sorted(sent, key=lambda message: (message[0], message[1] == B))


def most(row: Sequence[Op], begins: str, *ends: str) -> int:
    """The most microbatches at a time that are between two kinds of operations: F, and B or BW; B, and W."""
    steps = [(kind == begins) - (kind in ends) for kind, _ in row]
    return max(itertools.accumulate(steps))
