"""The plan of a pipeline as data: kinds of operations in one table, operations and their text, a whole plan and its
hash.

F is a forward, B the input gradient, W the weight gradient, BW both together (the letters of the zero-bubble paper,
arXiv 2401.10241; torch writes I for this B and B for this BW).
"""

from __future__ import annotations

import contextlib
import enum
import gc
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron.core.pipeline_parallel.plan.placement import Placement
from megatron.core.pipeline_parallel.plan.residency import PlannedResidency

VERSION = 1


class Kind(enum.IntEnum):
    """What an operation does. A generator of a schedule writes only computations, passes add the others. Saved plans
    hold these numbers and names."""

    F = 0
    B = 1
    W = 2
    BW = 3
    SEND_F = 4
    RECV_F = 5
    SEND_B = 6
    RECV_B = 7
    UNSHARD = 8
    RESHARD = 9
    REDUCE = 10
    SEND_STATE = 11
    RECV_STATE = 12
    VALIDATE = 13
    STEP = 14
    HSDP_ALL_REDUCE = 15


# Plain ints, for loops over whole plans.
F, B, W, BW, SEND_F, RECV_F, SEND_B, RECV_B, UNSHARD, RESHARD, REDUCE = map(int, list(Kind)[:11])
SEND_STATE, RECV_STATE, VALIDATE, STEP, HSDP_ALL_REDUCE = map(int, list(Kind)[11:])


class KindInfo(NamedTuple):
    """What a kind of operation is.

    lane: what runs it: COMPUTE, the stage; MESSAGES between stages; PEERS, collectives over data parallel ranks beside
    computations; DECISION on the optimizer's step. has_microbatch. has_units: it is of units of its stage, all or a
    range. reads_weights, writes_grads: of a computation, of its stage. repeated: standing before VALIDATE, it is done
    again once a step was taken back. waits_its_turn: as many are under way as its lane allows (held/lanes.py).
    """

    lane: str
    has_microbatch: bool = False
    has_units: bool = False
    reads_weights: bool = False
    writes_grads: bool = False
    repeated: bool = False
    waits_its_turn: bool = False


COMPUTE, MESSAGES, PEERS, DECISION = "compute", "messages", "peers", "decision"
KINDS: dict[int, KindInfo] = {
    Kind.F: KindInfo(COMPUTE, has_microbatch=True, reads_weights=True, repeated=True),
    Kind.B: KindInfo(COMPUTE, has_microbatch=True, reads_weights=True),
    Kind.W: KindInfo(COMPUTE, has_microbatch=True, has_units=True, writes_grads=True),
    Kind.BW: KindInfo(COMPUTE, has_microbatch=True, reads_weights=True, writes_grads=True),
    Kind.SEND_F: KindInfo(MESSAGES, has_microbatch=True, repeated=True),
    Kind.RECV_F: KindInfo(MESSAGES, has_microbatch=True, repeated=True),
    Kind.SEND_B: KindInfo(MESSAGES, has_microbatch=True),
    Kind.RECV_B: KindInfo(MESSAGES, has_microbatch=True),
    Kind.UNSHARD: KindInfo(PEERS, has_units=True, repeated=True),
    Kind.RESHARD: KindInfo(PEERS, has_units=True, repeated=True),
    Kind.REDUCE: KindInfo(PEERS, has_units=True, waits_its_turn=True),
    Kind.HSDP_ALL_REDUCE: KindInfo(PEERS, has_units=True, waits_its_turn=True),
    Kind.SEND_STATE: KindInfo(DECISION),
    Kind.RECV_STATE: KindInfo(DECISION),
    Kind.VALIDATE: KindInfo(DECISION),
    Kind.STEP: KindInfo(DECISION),
}
# Columns of the table, for loops over whole plans. IS_BESIDE: what runs on a lane beside the computations.
_ROWS = tuple(KINDS[kind] for kind in Kind)
NAMES = tuple(kind.name for kind in Kind)
IS_COMPUTE, IS_TRANSFER, IS_BESIDE, IS_VALIDATION = (
    tuple(row.lane == lane for row in _ROWS) for lane in (COMPUTE, MESSAGES, PEERS, DECISION)
)
HAS_MICROBATCH = tuple(row.has_microbatch for row in _ROWS)
READS_WEIGHTS, WRITES_GRADS = (
    tuple(row.reads_weights for row in _ROWS),
    tuple(row.writes_grads for row in _ROWS),
)


# (kind, global stage, microbatch, slice, first unit, end unit, peer rank, pair id); -1: none, or all units. A pair id
# is what both ends of a transfer share, and computations that overlap with one another. Plans hold tuples: hundreds of
# thousands of dataclasses would cost seconds.
RawOp = tuple[int, int, int, int, int, int, int, int]
Row = tuple[RawOp, ...]


class PlanError(ValueError):
    """A plan or a request for one is wrong; the message names the operation or the option."""


def wrong_op(rank: int, place: int, op: RawOp, what: str) -> PlanError:
    """What is wrong with the operation at a place of a rank's row."""
    return PlanError(f"rank {rank}, place {place}, {op_text(op)}: {what}")


def compute(kind: int, stage: int, microbatch: int) -> RawOp:
    """A computation of a whole stage."""
    return (kind, stage, microbatch, 0, -1, -1, -1, -1)


def op_text(raw: RawOp, names: Sequence[str] = NAMES) -> str:
    """`2F0`, with `[first:end]`, `.slice`, `@peer` and `#pair` where they say something."""
    kind, stage, microbatch, part, first, end, peer, pair = raw
    text = f"{stage}{names[kind]}{microbatch}" if microbatch >= 0 else f"{stage}{names[kind]}"
    if first >= 0:
        text += f"[{first}:{end}]"
    if part:
        text += f".{part}"
    if peer >= 0:
        text += f"@{peer}"
    if pair >= 0 and not IS_COMPUTE[kind]:
        text += f"#{pair}"
    return text


def partner_of(row: Sequence[RawOp], index: int) -> int:
    """The place of the computation behind the one at `index` that overlaps with it, -1 for none. Operations of data
    parallelism that belong to it may stand between the two."""
    op = row[index]
    if op[7] < 0 or not IS_COMPUTE[op[0]]:
        return -1
    for place in range(index + 1, len(row)):
        if not IS_BESIDE[row[place][0]]:
            return place if IS_COMPUTE[row[place][0]] and row[place][7] == op[7] else -1
    return -1


def is_overlapped(row: Sequence[RawOp], index: int) -> bool:
    """Whether the computation at `index` overlaps with the next one."""
    return partner_of(row, index) >= 0


def row_texts(row: Sequence[RawOp], names: Sequence[str] = NAMES) -> list[str]:
    """One text an operation; overlapped computations are one text, `(0F3;7BW1)`, with what stands between them."""
    texts: list[str] = []
    index = 0
    while index < len(row):
        last = partner_of(row, index) if row[index][7] >= 0 else -1
        if last >= 0:
            texts.append(f"({';'.join(op_text(op, names) for op in row[index : last + 1])})")
            index = last + 1
        else:
            texts.append(op_text(row[index], names))
            index += 1
    return texts


_OP = re.compile(
    r"(\d{1,9})(" + "|".join(sorted(NAMES, key=len, reverse=True)) + r")(\d{1,9})?"
    r"(?:\[(\d{1,9}):(\d{1,9})\])?(?:\.(\d{1,9}))?(?:@(\d{1,9}))?(?:#(\d{1,9}))?"
)


def parse_op(text: str) -> RawOp:
    """The operation that `op_text` wrote. Raises PlanError showing a text that is none."""
    match = _OP.fullmatch(text.strip())
    if match is None:
        raise PlanError(
            f"{text!r:.80} is no operation: expected for example 2F0, 2BW0, 0SEND_F3@1#17 or (0F3;7BW1)"
        )
    stage, kind, *numbers = match.groups()
    microbatch, first, end, part, peer, pair = (-1 if number is None else int(number) for number in numbers)
    op = (int(Kind[kind]), int(stage), microbatch, max(part, 0), first, end, peer, pair)
    if HAS_MICROBATCH[op[0]] != (microbatch >= 0):
        raise PlanError(
            f"{text!r}: F, B, W, BW and their transfers have a microbatch, {kind} as others has none"
        )
    if IS_COMPUTE[op[0]] and max(peer, pair) >= 0:
        raise PlanError(f"{text!r}: a computation has neither peer nor message")
    if first >= 0 and first >= end:
        raise PlanError(f"{text!r}: no units from {first} to {end}")
    return op


def parse_row(texts: Sequence[str]) -> Row:
    """The row that `row_texts` wrote; overlapped pairs are numbered anew."""
    row: list[RawOp] = []
    pairs = 0
    for text in texts:
        if not text.strip().startswith("("):
            row.append(parse_op(text))
            continue
        ops = [parse_op(part) for part in text.strip()[1:-1].split(";")]
        whole = text.strip().endswith(")") and [IS_COMPUTE[op[0]] for op in (ops[0], ops[-1])] == [True, True]
        if len(ops) < 2 or not whole or not all(IS_BESIDE[op[0]] for op in ops[1:-1]):
            raise PlanError(f"{text!r}: two computations overlap, as in (0F3;7BW1)")
        row += [(*ops[0][:7], pairs), *ops[1:-1], (*ops[-1][:7], pairs)]
        pairs += 1
    return tuple(row)


@dataclass(frozen=True)
class Plan:
    """What each rank does in one step, in order.

    schedule: name, for people only. rows: one a rank. bitwise: whether every stage adds its weight gradients in
    increasing microbatch order, and so gives the bits of one process; verify holds a plan to it. forward_only: an
    evaluation, where nothing is kept for a backward. residency: what its operations of data parallelism are for; None
    where there are none.
    """

    schedule: str
    placement: Placement
    num_microbatches: int
    rows: tuple[Row, ...]
    bitwise: bool = True
    forward_only: bool = False
    residency: PlannedResidency | None = None

    @property
    def num_ops(self) -> int:
        return sum(map(len, self.rows))

    @property
    def has_transfers(self) -> bool:
        """Whether a pass has added sends and receives."""
        return any(IS_TRANSFER[op[0]] for row in self.rows for op in row)

    @property
    def has_lanes(self) -> bool:
        """Whether a pass has added operations of data parallelism."""
        return any(IS_BESIDE[op[0]] for row in self.rows for op in row)


def plan_hash(plan: Plan) -> str:
    """SHA-256 of the canonical JSON of version, placement, operations and, where there is one, residency, as hex."""
    content: dict[str, Any] = {
        "version": VERSION,
        "placement": plan.placement.as_json(),
        "ops": [row_texts(row) for row in plan.rows],
    }
    if plan.residency is not None:
        content["residency"] = plan.residency.as_json()
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Plans are hundreds of thousands of tuples without cycles: what is made in here is not walked through for cycles
    again and again, which takes a sixth of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
