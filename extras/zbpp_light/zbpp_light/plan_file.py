"""Plans that `show_schedule.py --format plan` of Megatron-Zero writes: JSON with the operations of each rank. Pure.

A file is believed in nothing: its hash, operations and messages are checked before the first step.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from typing import Any

from zbpp_light import schedules
from zbpp_light.schedules import BW, B, F, Row, Rows, W

MAX_BYTES, VERSION = 1 << 24, 1
_FIELDS = "version schedule placement ranks chunks microbatches bitwise forward_only hash ops".split()
_IGNORED = ("UNSHARD", "RESHARD", "REDUCE", "HSDP_ALL_REDUCE")  # of data parallelism, which is Megatron's here
_VALIDATION = ("SEND_STATE", "RECV_STATE", "VALIDATE", "STEP")
_KINDS = "|".join((*_IGNORED, *_VALIDATION, "SEND_F", "SEND_B", "RECV_F", "RECV_B", BW, F, B, W))
_OP = re.compile(rf"(\d{{1,6}})({_KINDS})(\d{{1,6}})?([\[.][^@#]*)?(?:@(\d{{1,6}}))?(?:#(\d{{1,9}}))?", re.ASCII)
Message = tuple[str, int, int, int, int]  # F or B, sender, receiver, microbatch, pair id


@dataclasses.dataclass(frozen=True)
class PlanFile:
    """path: for messages; rows: by stage; ignored: how many operations of data parallelism were left out."""

    path: str
    schedule: str
    rows: Rows
    microbatches: int
    ignored: int

    def problems(self, stages: int, microbatches: int) -> list[str]:
        """Why it is no plan for a run of so many stages and microbatches."""
        both = ("stages", len(self.rows), stages), ("microbatches a step", self.microbatches, microbatches)
        return [f"{self.path} is a plan for {its} {what}, this run has {n}" for what, its, n in both if its != n]


def read(path: str | os.PathLike[str]) -> PlanFile:
    """Raises ValueError naming the file and what is wrong with it."""
    name = os.fspath(path)
    try:
        with open(name, "rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ValueError(f"this is no plan: it has more than {MAX_BYTES >> 20} MiB")
        return parse(data.decode(), name)
    except OSError as error:
        raise ValueError(f"{name} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def parse(text: str, path: str) -> PlanFile:
    """Raises ValueError saying what is wrong."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"this is no plan: {error}") from None
    if wrong := _wrong_header(content):
        raise ValueError(wrong)
    rows: list[Row] = []
    messages: dict[str, list[Message]] = {"SEND": [], "RECV": []}
    ignored = 0
    for stage, texts in enumerate(content["ops"]):
        ops = [_op(stage, text) for text in texts]
        rows.append(tuple((kind, microbatch) for kind, microbatch, _, _ in ops if kind in (F, B, W, BW)))
        ignored += sum(kind in _IGNORED for kind, *_ in ops)
        for kind, microbatch, peer, pair in ops:
            end, _, direction = kind.partition("_")
            if end in messages and kind not in _IGNORED:
                ends = (stage, peer) if end == "SEND" else (peer, stage)
                messages[end].append((direction, *ends, microbatch, pair))
    schedules.check(tuple(rows), content["microbatches"])
    _check_messages(messages, len(rows), content["microbatches"])
    return PlanFile(path, content["schedule"], tuple(rows), content["microbatches"], ignored)


def _wrong_header(content: Any) -> str:
    """What is wrong with all but the operations, or nothing."""
    if not isinstance(content, dict) or set(content) - {"residency"} != set(_FIELDS):
        return f"this is no plan: a plan has {', '.join(_FIELDS)}"
    name, ops, placement, chunks = (content[field] for field in ("schedule", "ops", "placement", "chunks"))
    if content["version"] != VERSION:
        return f"it has version {content['version']!r:.40}, this package reads version {VERSION}"
    for field in ("ranks", "chunks", "microbatches"):
        if type(content[field]) is not int or content[field] < 1:
            return f"{field} is a number from 1 on, not {content[field]!r:.40}"
    if not re.fullmatch(r"[\w.-]{1,40}", str(name), re.ASCII):
        return f"schedule is a name, not {name!r:.40}"
    if placement != "linear" or chunks != 1:
        where = f"{name} has {chunks} chunks on each rank, placed as {placement!r:.20}"
        return f"{where}: this package runs one stage a rank, on a line ({', '.join(schedules.KNOWN)})"
    if content["forward_only"] is not False:
        return "it is the plan of an evaluation, which runs by Megatron's own function: save one for training"
    if not isinstance(ops, list) or not all(
        isinstance(row, list) and all(type(op) is str for op in row) for row in ops
    ):
        return "ops is one list of texts a rank"
    if len(ops) != content["ranks"]:
        return f"it has operations of {len(ops)} ranks, its header says {content['ranks']}"
    hashed = {"version": VERSION, "placement": {"kind": placement, "ranks": len(ops), "chunks": chunks}, "ops": ops}
    hashed |= {field: content[field] for field in ("residency",) if field in content}
    digest = hashlib.sha256(json.dumps(hashed, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    return "" if digest == content["hash"] else f"its hash is {digest}, not {content['hash']!r:.80}: it was changed"


def _op(stage: int, text: str) -> tuple[str, int, int, int]:
    """Kind, microbatch, peer and pair, -1 for none."""
    match = _OP.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r:.80} is no operation of one stage a rank")
    at, kind, microbatch, part, peer, pair = match.groups()
    if kind in _VALIDATION:
        raise ValueError(f"{text!r:.80} is of steps that are validated afterwards, which Megatron's are not")
    whole = not part and microbatch and [bool(peer), bool(pair)] == [len(kind) > 2] * 2
    if kind not in _IGNORED and (int(at) != stage or not whole):
        raise ValueError(f"{text!r:.80} is no operation of stage {stage}, whole, and one microbatch")
    numbers = [-1 if number is None else int(number) for number in (microbatch, peer, pair)]
    return kind, numbers[0], numbers[1], numbers[2]


def _check_messages(messages: dict[str, list[Message]], stages: int, microbatches: int) -> None:
    """Each activation and gradient is sent and received once, as one pair; or none, before a pass has added them."""
    sent, received = (sorted(messages[end]) for end in ("SEND", "RECV"))
    if sent != received:
        wrong = min(set(sent) ^ set(received), default=sent[:1])
        raise ValueError(f"its messages are not in pairs: {wrong} (kind, sender, receiver, microbatch, pair)")
    forth = [(F, stage, stage + 1, microbatch) for stage in range(stages - 1) for microbatch in range(microbatches)]
    back = [(B, receiver, sender, microbatch) for _, sender, receiver, microbatch in forth]
    pairs = {pair for *_, pair in sent}
    if sent and (sorted(forth + back) != [message[:4] for message in sent] or len(pairs) != len(sent)):
        raise ValueError(
            "its messages are not each activation and gradient once, between neighbours, with a pair id each"
        )
