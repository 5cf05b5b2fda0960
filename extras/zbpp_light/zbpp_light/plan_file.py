"""Plans that `show_schedule.py --format plan` of Megatron-Zero writes: JSON with the operations of each rank. Pure.

A file is believed in nothing: its hash, operations and messages are checked before the first step.
"""

import dataclasses
import hashlib
import json
import os
import re
from typing import Any

from zbpp_light import schedules
from zbpp_light.schedules import B, F, Op, Rows

MAX_BYTES, VERSION = 1 << 24, 1
_FIELDS = "version schedule placement ranks chunks microbatches bitwise forward_only hash ops".split()
_OP = re.compile(r"(\d{1,6})(?:(BW|F|B|W)(\d{1,6})|(SEND|RECV)_([FB])(\d{1,6})@(\d{1,6})#(\d{1,9}))", re.ASCII)
_OF_DATA_PARALLELISM = re.compile(r"\d{1,6}(UNSHARD|RESHARD|REDUCE|HSDP_ALL_REDUCE)(\d{1,6})?([\[.][^@#]*)?", re.ASCII)
_VALIDATION = re.compile(r"\d{1,6}(SEND_STATE|RECV_STATE|VALIDATE|STEP)", re.ASCII)
Message = tuple[str, int, int, int, int]  # F or B, sender, receiver, microbatch, pair id


@dataclasses.dataclass(frozen=True)
class PlanFile:
    """path: for messages; hash: the file's; rows: by stage; ignored: how many operations of data parallelism it has."""

    path: str
    schedule: str
    microbatches: int
    hash: str
    rows: Rows
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
    rows: list[list[Op]] = [[] for _ in content["ops"]]
    messages: dict[str, list[Message]] = {"SEND": [], "RECV": []}
    ignored = 0
    for stage, text in [(stage, text) for stage, texts in enumerate(content["ops"]) for text in texts]:
        op = _OP.fullmatch(text)
        if _VALIDATION.match(text):
            raise ValueError(f"{text!r:.80} is of steps that are validated afterwards, which Megatron's are not")
        if _OF_DATA_PARALLELISM.fullmatch(text):
            ignored += 1
        elif op is None or int(op[1]) != stage:
            raise ValueError(f"{text!r:.80} is no operation of stage {stage}, whole, and one microbatch")
        elif op[2]:
            rows[stage].append((op[2], int(op[3])))
        else:
            microbatch, peer, pair = (int(number) for number in op.groups()[5:])
            ends = (stage, peer) if op[4] == "SEND" else (peer, stage)
            messages[op[4]].append((op[5], *ends, microbatch, pair))
    header = {field: content[field] for field in ("schedule", "microbatches", "hash")}
    plan = PlanFile(path, rows=tuple(map(tuple, rows)), ignored=ignored, **header)
    schedules.check(plan.rows, plan.microbatches)
    _check_messages(messages, len(rows), plan.microbatches)
    return plan


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
    if type(ops) is not list or not all(type(row) is list and {*map(type, row)} <= {str} for row in ops):
        return "ops is one list of texts a rank"
    if len(ops) != content["ranks"]:
        return f"it has operations of {len(ops)} ranks, its header says {content['ranks']}"
    hashed = {"version": VERSION, "placement": {"kind": placement, "ranks": len(ops), "chunks": chunks}, "ops": ops}
    hashed |= {field: content[field] for field in ("residency",) if field in content}
    digest = hashlib.sha256(json.dumps(hashed, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    return "" if digest == content["hash"] else f"its hash is {digest}, not {content['hash']!r:.80}: it was changed"


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
        raise ValueError("its messages are not each activation and gradient once, between neighbours, by a pair id")
