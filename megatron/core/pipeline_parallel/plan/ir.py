"""The plan of a pipeline as data: operations, their text, a whole plan and its hash.

F is a forward, B the input gradient, W the weight gradient, BW both together (the letters of the zero-bubble
paper, arXiv 2401.10241; torch writes I for this B and B for this BW).
"""

from __future__ import annotations

import enum
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron.core.pipeline_parallel.plan.placement import Placement
from megatron.core.pipeline_parallel.plan.residency import PlannedResidency

VERSION = 1

# (kind, global stage, microbatch, sequence slice, first unit, end unit, peer rank, pair id); -1: none, or all units.
# Plans hold these: hundreds of thousands of dataclasses would cost seconds.
RawOp = tuple[int, int, int, int, int, int, int, int]
Row = tuple[RawOp, ...]


class PlanError(ValueError):
    """A plan or a request for one is wrong; the message names the operation or the option."""


class Kind(enum.IntEnum):
    """What an operation does. COMPUTE kinds are the first four: a generator writes only these."""

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
F, B, W, BW = int(Kind.F), int(Kind.B), int(Kind.W), int(Kind.BW)
SEND_F, RECV_F, SEND_B, RECV_B = int(Kind.SEND_F), int(Kind.RECV_F), int(Kind.SEND_B), int(Kind.RECV_B)
LAST_COMPUTE = BW
LAST_TRANSFER = RECV_B
_NAMES = tuple(kind.name for kind in Kind)


@dataclass(frozen=True, slots=True)
class Op:
    """One operation of one rank. stage: global. units: (first, end) within the stage, None = all.

    pair: of a transfer, the id that its two ends share; of a computation, the id that it shares with its
    neighbour in the row when the two overlap.
    """

    kind: Kind
    stage: int
    microbatch: int | None = None
    slice: int = 0
    units: tuple[int, int] | None = None
    peer: int | None = None
    pair: int | None = None

    @classmethod
    def of(cls, raw: RawOp) -> Op:
        """The view of a raw operation."""
        kind, stage, microbatch, part, first, end, peer, pair = raw
        return cls(
            Kind(kind),
            stage,
            None if microbatch < 0 else microbatch,
            part,
            None if first < 0 else (first, end),
            None if peer < 0 else peer,
            None if pair < 0 else pair,
        )

    @property
    def raw(self) -> RawOp:
        """The compact form."""
        first, end = self.units or (-1, -1)
        microbatch = -1 if self.microbatch is None else self.microbatch
        peer = -1 if self.peer is None else self.peer
        pair = -1 if self.pair is None else self.pair
        return (int(self.kind), self.stage, microbatch, self.slice, first, end, peer, pair)

    def __str__(self) -> str:
        return op_text(self.raw)


def compute(kind: int, stage: int, microbatch: int) -> RawOp:
    """A computation of a whole stage."""
    return (kind, stage, microbatch, 0, -1, -1, -1, -1)


def op_text(raw: RawOp, names: Sequence[str] = _NAMES) -> str:
    """`2F0`, with `.slice`, `[first:end]`, `@peer` and `#pair` where they say something."""
    kind, stage, microbatch, part, first, end, peer, pair = raw
    text = f"{stage}{names[kind]}{microbatch}" if microbatch >= 0 else f"{stage}{names[kind]}"
    if part:
        text += f".{part}"
    if first >= 0:
        text += f"[{first}:{end}]"
    if peer >= 0:
        text += f"@{peer}"
    if pair >= 0 and kind > LAST_COMPUTE:
        text += f"#{pair}"
    return text


def is_overlapped(row: Sequence[RawOp], index: int) -> bool:
    """Whether the computation at `index` overlaps with the next one."""
    op = row[index]
    if op[7] < 0 or op[0] > LAST_COMPUTE or index + 1 == len(row):
        return False
    return row[index + 1][0] <= LAST_COMPUTE and row[index + 1][7] == op[7]


def row_texts(row: Sequence[RawOp], names: Sequence[str] = _NAMES) -> list[str]:
    """One text an operation; overlapped computations are one text, `(0F3;7BW1)`."""
    texts: list[str] = []
    index = 0
    while index < len(row):
        if row[index][7] >= 0 and is_overlapped(row, index):
            texts.append(f"({op_text(row[index], names)};{op_text(row[index + 1], names)})")
            index += 2
        else:
            texts.append(op_text(row[index], names))
            index += 1
    return texts


_OP = re.compile(
    r"(\d{1,9})(" + "|".join(sorted(_NAMES, key=len, reverse=True)) + r")(\d{1,9})?"
    r"(?:\.(\d{1,9}))?(?:\[(\d{1,9}):(\d{1,9})\])?(?:@(\d{1,9}))?(?:#(\d{1,9}))?"
)


def parse_op(text: str) -> RawOp:
    """The operation that `op_text` wrote. Raises PlanError showing a text that is none."""
    match = _OP.fullmatch(text.strip())
    if match is None:
        raise PlanError(
            f"{text!r:.80} is no operation: expected for example 2F0, 2BW0, 0SEND_F3@1#17 or (0F3;7BW1)"
        )
    stage, kind, microbatch, part, first, end, peer, pair = match.groups()
    op = (
        int(Kind[kind]),
        int(stage),
        _number(microbatch),
        int(part or 0),
        _number(first),
        _number(end),
        _number(peer),
        _number(pair),
    )
    if (op[0] <= LAST_TRANSFER) != (microbatch is not None):
        raise PlanError(
            f"{text!r}: F, B, W, BW and their transfers have a microbatch, {kind} as others has none"
        )
    if op[0] <= LAST_COMPUTE and (peer is not None or pair is not None):
        raise PlanError(f"{text!r}: a computation has neither peer nor message")
    if op[4] >= 0 and op[4] >= op[5]:
        raise PlanError(f"{text!r}: no units from {op[4]} to {op[5]}")
    return op


def _number(text: str | None) -> int:
    return -1 if text is None else int(text)


def parse_row(texts: Sequence[str]) -> Row:
    """The row that `row_texts` wrote; overlapped pairs are numbered anew."""
    row: list[RawOp] = []
    pairs = 0
    for text in texts:
        if not text.strip().startswith("("):
            row.append(parse_op(text))
            continue
        parts = text.strip()[1:-1].split(";")
        ops = [parse_op(part) for part in parts]
        if len(ops) != 2 or not text.strip().endswith(")") or any(op[0] > LAST_COMPUTE for op in ops):
            raise PlanError(f"{text!r}: two computations overlap, as in (0F3;7BW1)")
        row += [(*op[:7], pairs) for op in ops]
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

    def ops(self, rank: int) -> Iterator[Op]:
        """Views of one rank's operations."""
        return map(Op.of, self.rows[rank])

    @property
    def num_ops(self) -> int:
        return sum(map(len, self.rows))

    @property
    def has_transfers(self) -> bool:
        """Whether a pass has added sends and receives."""
        return any(LAST_COMPUTE < op[0] <= LAST_TRANSFER for row in self.rows for op in row)


def plan_hash(plan: Plan) -> str:
    """SHA-256 of the canonical JSON of version, placement and operations, as hex."""
    content = {
        "version": VERSION,
        "placement": plan.placement.as_json(),
        "ops": [row_texts(row) for row in plan.rows],
    }
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
