"""Schedules as data: a row of operations for each stage, made, checked and timed. Pure.

F is a forward, B a backward with respect to the input, W with respect to the weights, BW both (arXiv 2401.10241).
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Sequence

F, B, W, BW = "F", "B", "W", "BW"
Op = tuple[str, int]  # kind, microbatch
Row = tuple[Op, ...]
Rows = tuple[Row, ...]  # by stage

# By name, of a stage and the number of stages: how many forwards it runs ahead, and how many weight gradients it lets
# wait, to fill the end of its row with them. None: backwards are not split.
_DEPTHS: dict[str, Callable[[int, int], tuple[int, int | None]]] = {
    "1f1b": lambda stage, stages: (stages - stage, None),
    "zb-h1": lambda stage, stages: (stages - stage, stage),
    "zb-h2": lambda stage, stages: (2 * (stages - stage) - 1, 2 * stage),
}
NAMES, SEARCHED = tuple(_DEPTHS), ("zb-1p", "zb-2p")


def known(schedule: str) -> None:
    """Raises ValueError for a name not in `NAMES`, with the nearest, or with how to save a plan of that name."""
    if schedule in SEARCHED:
        raise ValueError(
            f"{schedule} is searched for, not made here: save it by `python tools/show_schedule.py --schedule {schedule} "
            "--stages P --microbatches M --format plan > FILE` of Megatron-Zero, and give plan=FILE"
        )
    if schedule not in NAMES:
        nearest = difflib.get_close_matches(str(schedule), (*NAMES, *SEARCHED), n=1, cutoff=0)[0]
        raise ValueError(
            f"no schedule {schedule!r}: did you mean {nearest}? There are {', '.join(NAMES)}, and plan=FILE"
        )


def make(schedule: str, stages: int, microbatches: int) -> Rows:
    """The rows of one of `NAMES`. A stage with fewer microbatches than it would run ahead runs all of them ahead."""
    depths = _DEPTHS[schedule]
    return tuple(_row(microbatches, *depths(stage, stages)) for stage in range(stages))


def _row(microbatches: int, ahead: int, late: int | None) -> Row:
    """`ahead` forwards, then turns of B, W (once more than `late` wait) and F, then the other Ws."""
    row = [(F, microbatch) for microbatch in range(min(ahead, microbatches))]
    for microbatch in range(microbatches):
        row.append((BW if late is None else B, microbatch))
        if late is not None and microbatch >= late:
            row.append((W, microbatch - late))
        if ahead + microbatch < microbatches:
            row.append((F, ahead + microbatch))
    if late is not None:
        row += [(W, microbatch) for microbatch in range(max(microbatches - late, 0), microbatches)]
    return tuple(row)


def check(rows: Rows, microbatches: int) -> None:
    """Each F, B and W once, each kind in the order of microbatches, behind what it needs. Raises ValueError naming stage
    and operation. That no stage waits for ever is `timed`'s to see."""
    for stage, row in enumerate(rows):
        done = {F: 0, B: 0, W: 0}
        for kind, microbatch in row:
            for part in (B, W) if kind == BW else (kind,):
                if done[part] != microbatch or microbatch >= microbatches:
                    raise ValueError(
                        f"stage {stage}: {kind}{microbatch} where {part}{done[part]} of {microbatches} is due: each F, B "
                        "and W stands once, in order, or gradients would not have 1F1B's bits"
                    )
                if part != F and done[F if part == B else B] <= microbatch:
                    raise ValueError(f"stage {stage}: {kind}{microbatch} stands before what it needs")
                done[part] += 1
        if set(done.values()) != {microbatches}:
            raise ValueError(
                f"stage {stage} has {done[F]} F, {done[B]} B and {done[W]} W of {microbatches} microbatches"
            )


@dataclasses.dataclass(frozen=True)
class Timing:
    """Of F = B = W = 1 and messages that take no time. ends: of F and B (BW, too), by kind, stage and microbatch.

    bubble: of the step, where ranks wait for each other between steps; bubble_apart: where they do not.
    """

    ends: dict[tuple[str, int, int], int]
    bubble: float
    bubble_apart: float


def timed(rows: Rows) -> Timing:
    """Raises ValueError naming an operation that would wait for ever."""
    stages = len(rows)
    ends: dict[tuple[str, int, int], int] = {}
    places, clocks, begins = [0] * stages, [0] * stages, [0] * stages
    moved = True
    while moved:
        moved = False
        for stage, row in enumerate(rows):
            for kind, microbatch in row[places[stage] :]:
                direction = B if kind == BW else kind
                source = stage + {F: -1, B: 1, W: stages}[direction]
                ready = ends.get((direction, source, microbatch)) if 0 <= source < stages else 0
                if ready is None:
                    break
                begin = max(ready, clocks[stage])
                begins[stage] = begins[stage] if places[stage] else begin
                clocks[stage] = begin + (2 if kind == BW else 1)
                ends[direction, stage, microbatch] = clocks[stage]
                places[stage] += 1
                moved = True
    for stage, row in enumerate(rows):
        for kind, microbatch in row[places[stage] :]:
            raise ValueError(f"stage {stage}: {kind}{microbatch} would wait for ever for the stage beside it")
    work = max(sum(2 if kind == BW else 1 for kind, _ in row) for row in rows)
    apart = max(end - begin for begin, end in zip(begins, clocks))
    return Timing(ends, 1 - work / max(clocks), 1 - work / apart)


def between(timing: Timing, stage: int, microbatches: int) -> list[Op]:
    """All messages between a stage and the next by the time they are sent: activations as F, their gradients as B. What
    a stage sends before it takes a message stands before that message."""
    ends, both = timing.ends, ((F, stage), (B, stage + 1))
    sent = [(ends[kind, sender, m], kind, m) for kind, sender in both for m in range(microbatches)]
    return [(kind, microbatch) for _, kind, microbatch in sorted(sent)]


def done_before(row: Sequence[Op], kind: str, then: str) -> list[int]:
    """By microbatch: how many operations of a kind stand before its operation of the kind `then`. BW is a B, too."""
    counts, count = [], 0
    for op in row:
        direction = B if op[0] == BW else op[0]
        count += direction == kind
        if direction == then:
            counts.append(count)
    return counts


def most(row: Sequence[Op], begins: str, *ends: str) -> int:
    """The most microbatches at a time that are between two kinds of operations: F, and B or BW; B, and W."""
    count = highest = 0
    for kind, _ in row:
        count += (kind == begins) - (kind in ends)
        highest = max(highest, count)
    return highest
