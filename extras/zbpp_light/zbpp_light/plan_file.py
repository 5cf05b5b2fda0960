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
from zbpp_light.schedules import BW, B, F, Op, Row, Rows, W

MAX_BYTES, VERSION = 1 << 24, 1
_FIELDS = ("version schedule placement ranks chunks microbatches bitwise forward_only hash ops").split()
_IGNORED = ("UNSHARD", "RESHARD", "REDUCE", "HSDP_ALL_REDUCE")  # of data parallelism, which is Megatron's here
_VALIDATION = ("SEND_STATE", "RECV_STATE", "VALIDATE", "STEP")
_KINDS = (*_IGNORED, *_VALIDATION, "SEND_F", "SEND_B", "RECV_F", "RECV_B", BW, F, B, W)
_OP = re.compile(
    rf"(\d{{1,6}})({'|'.join(_KINDS)})(\d{{1,6}})?([\[.][^@#]*)?(?:@(\d{{1,6}}))?(?:#(\d{{1,9}}))?", re.ASCII
)
Ends = dict[tuple[str, str, int, int], int]  # of messages: SEND or RECV, F or B, sender, microbatch -> pair id


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
    if _hash(content) != content["hash"]:
        raise ValueError(f"its hash is {_hash(content)}, its header says {content['hash']!r:.80}: it was changed")
    ends: Ends = {}
    stages, microbatches = content["ranks"], content["microbatches"]
    kept = [_row(stage, stages, texts, ends) for stage, texts in enumerate(content["ops"])]
    rows = tuple(row for row, _ in kept)
    schedules.check(rows, microbatches)
    schedules.timed(rows)
    _check_pairs(ends, stages, microbatches)
    return PlanFile(path, content["schedule"], rows, microbatches, sum(ignored for _, ignored in kept))


def _wrong_header(content: Any) -> str:
    """What is wrong with all but the operations, or nothing."""
    if not isinstance(content, dict) or set(content) - {"residency"} != set(_FIELDS):
        return f"this is no plan: a plan has {', '.join(_FIELDS)}"
    if content["version"] != VERSION:
        return f"it has version {content['version']!r:.40}, this package reads version {VERSION}"
    for name in ("ranks", "chunks", "microbatches"):
        if type(content[name]) is not int or content[name] < 1:
            return f"{name} is a number from 1 on, not {content[name]!r:.40}"
    name, ops = content["schedule"], content["ops"]
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]{1,40}", name, re.ASCII):
        return f"schedule is a name, not {name!r:.40}"
    if content["placement"] != "linear" or content["chunks"] != 1:
        return (
            f"{name} has {content['chunks']} chunks on each rank, placed as {content['placement']!r:.20}: this package "
            f"runs one stage a rank, on a line ({', '.join((*schedules.NAMES, *schedules.SEARCHED))})"
        )
    if content["forward_only"] is not False:
        return "it is the plan of an evaluation, which runs by Megatron's own function: save one for training"
    if not isinstance(ops, list) or not all(
        isinstance(row, list) and all(type(op) is str for op in row) for row in ops
    ):
        return "ops is one list of texts a rank"
    if len(ops) != content["ranks"]:
        return f"it has operations of {len(ops)} ranks, its header says {content['ranks']}"
    return ""


def _hash(content: dict[str, Any]) -> str:
    """Of what the plan does: all but names and flags."""
    placement = {"kind": content["placement"], "ranks": content["ranks"], "chunks": content["chunks"]}
    hashed = {"version": content["version"], "placement": placement, "ops": content["ops"]}
    hashed |= {name: content[name] for name in ("residency",) if name in content}
    return hashlib.sha256(json.dumps(hashed, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _row(stage: int, stages: int, texts: list[str], ends: Ends) -> tuple[Row, int]:
    """The computations of a stage, and how many operations are ignored. Enters its messages into `ends`."""
    row: list[Op] = []
    computed: set[Op] = set()
    ignored = 0
    for text in texts:
        kind, microbatch, peer, pair = _op(stage, text)
        if kind in _IGNORED:
            ignored += 1
        elif kind in (F, B, W, BW):
            row.append((kind, microbatch))
            computed.add((B if kind == BW else kind, microbatch))
        else:
            end, direction = kind.split("_")
            message = (end, direction, stage if end == "SEND" else peer, microbatch)
            if peer != stage + (1 if kind in ("SEND_F", "RECV_B") else -1) or not 0 <= peer < stages:
                raise ValueError(f"{text!r:.80}: stage {stage} has no such message with rank {peer}")
            if ((direction, microbatch) in computed) != (end == "SEND"):
                raise ValueError(f"{text!r:.80} stands on the wrong side of {direction}{microbatch}")
            if ends.setdefault(message, pair) is not pair or pair < 0:
                raise ValueError(f"{text!r:.80} stands twice, or has no message")
    return tuple(row), ignored


def _op(stage: int, text: str) -> tuple[str, int, int, int]:
    """Kind, microbatch, peer and pair, -1 for none."""
    match = _OP.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r:.80} is no operation of one stage a rank")
    at, kind, microbatch, part, peer, pair = match.groups()
    if kind in _VALIDATION:
        raise ValueError(f"{text!r:.80} is of steps that are validated afterwards, which Megatron's are not")
    if kind not in _IGNORED:
        if int(at) != stage:
            raise ValueError(f"{text!r:.80} stands in the row of stage {stage}")
        if part or microbatch is None or (kind in (F, B, W, BW) and (peer or pair)):
            raise ValueError(f"{text!r:.80} is no operation of a whole stage and one microbatch")
    numbers = [-1 if number is None else int(number) for number in (microbatch, peer, pair)]
    return kind, numbers[0], numbers[1], numbers[2]


def _check_pairs(ends: Ends, stages: int, microbatches: int) -> None:
    """Every message has both its ends, of one pair id; or there are none, before a pass has added them."""
    pairs = set()
    messages = [(F, sender) for sender in range(stages - 1)] + [(B, sender) for sender in range(1, stages)]
    for direction, sender in messages if ends else ():
        for microbatch in range(microbatches):
            sent, received = (ends.get((end, direction, sender, microbatch)) for end in ("SEND", "RECV"))
            if sent is None or sent != received or sent in pairs:
                raise ValueError(
                    f"{direction}{microbatch} of stage {sender} is sent as message {sent} and received as {received}: "
                    "each message is sent and received once"
                )
            pairs.add(sent)
