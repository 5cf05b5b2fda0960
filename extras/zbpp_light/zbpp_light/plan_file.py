"""Plans that `show_schedule.py --format plan` of Megatron-Zero writes: JSON with the operations of each rank. Pure.

A file is read as data, and believed in nothing: its hash, each operation and the messages are checked before the first
step.
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

MAX_BYTES = 1 << 24
VERSION = 1
_FIELDS = {
    "version",
    "schedule",
    "placement",
    "ranks",
    "chunks",
    "microbatches",
    "bitwise",
    "forward_only",
    "hash",
    "ops",
}
_IGNORED = (
    "UNSHARD",
    "RESHARD",
    "REDUCE",
    "HSDP_ALL_REDUCE",
)  # of data parallelism, which is Megatron's here
_REFUSED = ("SEND_STATE", "RECV_STATE", "VALIDATE", "STEP")
_MESSAGES = ("SEND_F", "SEND_B", "RECV_F", "RECV_B")
_KINDS = (*_IGNORED, *_REFUSED, *_MESSAGES, BW, F, B, W)
_OP = re.compile(
    r"(\d{1,6})(" + "|".join(_KINDS) + r")(\d{1,6})?(\[\d+:\d+\])?(\.\d+)?(?:@(\d{1,6}))?(?:#(\d{1,9}))?",
    re.ASCII,
)


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
        problems = []
        if stages != len(self.rows):
            problems.append(f"{self.path} is a plan for {len(self.rows)} stages, this run has {stages}")
        if microbatches != self.microbatches:
            problems.append(
                f"{self.path} is a plan for {self.microbatches} microbatches, this step has {microbatches}"
            )
        return problems


def read(path: str | os.PathLike[str]) -> PlanFile:
    """Raises ValueError naming the file and what is wrong with it."""
    name = os.fspath(path)
    try:
        with open(name, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{name} cannot be read: {error.strerror}") from None
    if len(data) > MAX_BYTES:
        raise ValueError(f"{name} is no plan: it has more than {MAX_BYTES >> 20} MiB")
    try:
        return parse(data.decode(), name)
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is no plan: {error}") from None
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def parse(text: str, path: str = "the plan") -> PlanFile:
    """Raises ValueError saying what is wrong."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"this is no plan: {error}") from None
    _check_header(content)
    if _hash(content) != content["hash"]:
        raise ValueError(f"its hash is {_hash(content)}, its header says {content['hash']}: it was changed")
    rows: list[Row] = []
    ends: dict[
        tuple[str, str, int, int], int
    ] = {}  # of messages: SEND or RECV, F or B, sender, microbatch -> pair
    ignored = 0
    for stage, texts in enumerate(content["ops"]):
        row, left_out = _row(stage, content["ranks"], texts, ends)
        rows.append(row)
        ignored += left_out
    schedules.check(tuple(rows), content["microbatches"])
    schedules.timed(tuple(rows))
    _check_pairs(ends, len(rows), content["microbatches"])
    return PlanFile(path, content["schedule"], tuple(rows), content["microbatches"], ignored)


def _check_header(content: Any) -> None:
    if not isinstance(content, dict) or set(content) - {"residency"} != _FIELDS:
        fields = ", ".join(map(str, content)) if isinstance(content, dict) else type(content).__name__
        raise ValueError(f"this is no plan: it has {fields:.200}, a plan has {', '.join(sorted(_FIELDS))}")
    if content["version"] != VERSION:
        raise ValueError(f"it has version {content['version']!r:.40}, this package reads version {VERSION}")
    for name in ("ranks", "chunks", "microbatches"):
        if type(content[name]) is not int or content[name] < 1:
            raise ValueError(f"{name} is a number from 1 on, not {content[name]!r:.40}")
    if not isinstance(content["schedule"], str) or not re.fullmatch(
        r"[\w.-]{1,40}", content["schedule"], re.ASCII
    ):
        raise ValueError(f"schedule is a name, not {content['schedule']!r:.40}")
    if content["placement"] != "linear" or content["chunks"] != 1:
        raise ValueError(
            f"{content['schedule']} has {content['chunks']} chunks on each rank, placed as {content['placement']!r:.20}: "
            f"this package runs one stage a rank, on a line ({', '.join((*schedules.NAMES, *schedules.SEARCHED))})"
        )
    if content["forward_only"] is not False:
        raise ValueError(
            "it is the plan of an evaluation, which runs by Megatron's own function: save one for training"
        )
    ops = content["ops"]
    if not isinstance(ops, list) or not all(
        isinstance(row, list) and all(isinstance(text, str) for text in row) for row in ops
    ):
        raise ValueError("ops is one list of texts a rank")
    if len(ops) != content["ranks"]:
        raise ValueError(f"it has operations of {len(ops)} ranks, its header says {content['ranks']}")


def _hash(content: dict[str, Any]) -> str:
    """Of what the plan does: everything but names and flags."""
    placement = {"kind": content["placement"], "ranks": content["ranks"], "chunks": content["chunks"]}
    hashed = {"version": content["version"], "placement": placement, "ops": content["ops"]}
    if "residency" in content:
        hashed["residency"] = content["residency"]
    return hashlib.sha256(json.dumps(hashed, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _row(
    stage: int, stages: int, texts: list[str], ends: dict[tuple[str, str, int, int], int]
) -> tuple[Row, int]:
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
            towards = stage + (1 if kind in ("SEND_F", "RECV_B") else -1)
            if peer != towards or not 0 <= towards < stages:
                raise ValueError(f"{text!r:.80}: stage {stage} has no such message with rank {peer}")
            if ((direction, microbatch) in computed) != (end == "SEND"):
                raise ValueError(
                    f"{text!r:.80} stands on the wrong side of {direction}{microbatch}: sends are behind what they send, "
                    "receives before what needs them"
                )
            message = (end, direction, stage if end == "SEND" else peer, microbatch)
            if message in ends:
                raise ValueError(f"{text!r:.80} stands twice")
            ends[message] = pair
    return tuple(row), ignored


def _op(stage: int, text: str) -> tuple[str, int, int, int]:
    """Kind, microbatch, peer and pair, -1 for none."""
    match = _OP.fullmatch(text)
    if match is None:
        overlapped = " (overlapped computations are of plans on a V)" if text.startswith("(") else ""
        raise ValueError(f"{text!r:.80} is no operation{overlapped}")
    at, kind, microbatch, units, part, peer, pair = match.groups()
    if kind in _REFUSED:
        raise ValueError(
            f"{text!r:.80} is of steps that are validated afterwards, which Megatron's are not: save without"
        )
    if int(at) != stage and kind not in _IGNORED:
        raise ValueError(f"{text!r:.80} stands in the row of stage {stage}")
    if (units or part) and kind not in _IGNORED:
        raise ValueError(f"{text!r:.80}: parts of stages and of sequences are not for this package")
    if kind not in _IGNORED and microbatch is None:
        raise ValueError(f"{text!r:.80} has no microbatch")
    if kind in (F, B, W, BW) and (peer or pair):
        raise ValueError(f"{text!r:.80}: a computation has neither peer nor message")
    microbatch, peer, pair = (-1 if number is None else int(number) for number in (microbatch, peer, pair))
    return kind, microbatch, peer, pair


def _check_pairs(ends: dict[tuple[str, str, int, int], int], stages: int, microbatches: int) -> None:
    """Every message has both its ends, of one pair id, or the plan has none at all."""
    if not ends:
        return  # a plan before messages were added: the executor has its own
    pairs = set()
    for direction, senders in ((F, range(stages - 1)), (B, range(1, stages))):
        for sender in senders:
            for microbatch in range(microbatches):
                sent, received = (
                    ends.pop((end, direction, sender, microbatch), None) for end in ("SEND", "RECV")
                )
                if sent is None or received is None or sent != received or sent in pairs:
                    raise ValueError(
                        f"the message of {direction}{microbatch} from stage {sender} is no pair: SEND has #{sent}, RECV #{received}"
                    )
                pairs.add(sent)
    if ends:
        raise ValueError(f"{len(ends)} messages of microbatches that are not computed")
