"""Before there is any group: have all ranks come, and do they run the same configuration, code, torch, Python, backend?

A rank with an old checkout or another flag trains silently wrong, or makes other groups than the others and hangs in
the first; here it is named within a second. Ranks look at a few small keys of the store; nobody waits longer than the
timeout, and who does not come is named.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import platform
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.core.transport import waiting
from megatron.core.transport.peer_loss import PeerLostError, peer_loss_named
from megatron.core.words import printable
from megatron.training.config.launch_env import LaunchEnvError
from megatron.training.guard.rendezvous import MEETING, pauses

PACKAGE_DIR = Path(__file__).resolve().parents[2]
FAREWELL_S = 5.0  # the host of the store leaves last, but does not wait for the dead
MAX_NAMED = 8  # ranks, or differences, in a message
_OP = "the comparison at start-up"

Judge = Callable[[Sequence[Mapping[str, str]], Callable[[str], str]], str]


class StartupMismatchError(ValueError):
    """Ranks disagree on configuration, code or versions (exit status 2)."""


def _ranks_have(ranks: Sequence[int]) -> str:
    """`rank 3 has`, `ranks 3, 5 have`, of very many the first."""
    named = ", ".join(map(str, ranks[:MAX_NAMED])) + (", ..." if len(ranks) > MAX_NAMED else "")
    return f"rank {named} has" if len(ranks) == 1 else f"ranks {named} have"


class Meeting:
    """The ranks of a launch, from the first one that has come to the verdict on all of them.

    The verdict is one key of the store, {"missing": ranks} or {"unlike": text}; the first that is posted counts.
    hosts: whether the store ends with this process.
    """

    def __init__(
        self, store: dist.Store, rank: int, world_size: int, timeout: datetime.timedelta, *, hosts: bool
    ) -> None:
        self.rank, self._everyone = rank, tuple(range(world_size))
        self._store = dist.PrefixStore(MEETING, store)
        self._hosts, self._timeout_s = hosts, timeout.total_seconds()
        self._began = time.monotonic()

    def decide(self, mine: Mapping[str, str], texts: Mapping[str, str], judge: Judge) -> str:
        """Rank 0's judgement of what all ranks say: the same text on every rank, empty where all is well.

        mine: a few short facts. texts: longer ones by a name that stands for the content, alike on most ranks: judge
        gets every rank's facts, in order, and a function that reads a text by its name.
        Raises LaunchEnvError where this rank cannot be one of these, PeerLostError naming ranks that do not come.
        """
        with peer_loss_named(_OP, "default", self._everyone, self.rank):
            verdict = self._come(mine, texts) or self._wait_for("verdict" if self.rank else None)
            if verdict is None:
                verdict = self._read() if self.rank else self._post({"unlike": self._judged(judge)})
            if verdict.get("missing") or verdict.get("unlike"):
                self._leave()
        if missing := verdict.get("missing"):
            waited_s, why = time.monotonic() - self._began, f"{_ranks_have(missing)} not come"
            raise PeerLostError(_OP, "default", self._everyone, self.rank, waited_s, why)
        return str(verdict["unlike"])

    def _come(self, facts: Mapping[str, str], texts: Mapping[str, str]) -> dict[str, Any] | None:
        """Say who this is; a verdict where there cannot be any other."""
        store, rank, size = self._store, self.rank, len(self._everyone)
        who = f"process {os.getpid()} on {socket.gethostname()}"
        mine = f"{secrets.token_hex(8)} {who}"  # containers of one host can share process ids
        store.add("arrived", 1)  # before it is seen to have come: the store's host waits for who arrived
        first = store.compare_set(f"came/{rank}", "", mine).decode()
        if first != mine:
            self._hosts = False  # of two that were told to, the first one does
            other = first.partition(" ")[2]
            return self._object(f"RANK={rank} was given to two processes of one launch: {other}, and {who}")
        if rank == 0:
            store.set("world size", str(size))
        elif (missing := self._wait_for("world size")) is not None:
            return missing
        elif (expected := int(store.get("world size"))) != size:
            return self._object(f"WORLD_SIZE: rank {rank} has {size}, rank 0 {expected}")
        for name, text in texts.items():
            if not store.check([f"text/{name}"]):
                store.set(f"text/{name}", text)
        store.set(f"facts/{rank}", json.dumps(dict(facts)))
        store.add("present", 1)
        return None

    def _judged(self, judge: Judge) -> str:
        facts = self._store.multi_get([f"facts/{rank}" for rank in self._everyone])
        return judge(
            [json.loads(one) for one in facts], lambda name: self._store.get(f"text/{name}").decode()
        )

    def _wait_for(self, key: str | None) -> dict[str, Any] | None:
        """Until the key is there, None: until all ranks are. A verdict that comes before, or the timeout's."""
        waits = pauses()
        while True:
            if key != "verdict" and self._store.check(["verdict"]):
                return self._read()
            if self._store.check([key]) if key else self._store.add("present", 0) == len(self._everyone):
                return None
            if time.monotonic() - self._began > self._timeout_s:
                return self._post({"missing": self._without("came") or self._without("facts") or [0]})
            waiting.pause(next(waits))

    def _without(self, key: str) -> list[int]:
        return [rank for rank in self._everyone if not self._store.check([f"{key}/{rank}"])]

    def _post(self, verdict: dict[str, Any]) -> dict[str, Any]:
        """The first verdict counts for all."""
        return dict(json.loads(self._store.compare_set("verdict", "", json.dumps(verdict))))

    def _read(self) -> dict[str, Any]:
        return dict(json.loads(self._store.get("verdict")))

    def _object(self, why: str) -> dict[str, Any]:
        """End the meeting; where it is over already, the others go on, and this rank alone does not belong to them."""
        verdict = self._post({"unlike": why})
        if verdict == {"unlike": ""}:
            raise LaunchEnvError(f"{why}; the others have started: is another run using this MASTER_PORT?")
        return verdict

    def _leave(self) -> None:
        """The host of the store waits until the others have read the verdict. They ask nothing once they have left: the
        store may be gone, and torch prints its stack for that."""
        with contextlib.suppress(RuntimeError):
            left, deadline = self._store.add("left", 1), time.monotonic() + FAREWELL_S
            while self._hosts and left < self._store.add("arrived", 0) and time.monotonic() < deadline:
                time.sleep(0.002)
                left = self._store.add("left", 0)


# --- what is compared


def config_text(config: Mapping[str, Any]) -> str:
    """The resolved flat configuration, each value as it is shown."""
    return json.dumps({name: repr(value) for name, value in config.items()}, sort_keys=True)


def code_digest(package_dir: Path = PACKAGE_DIR) -> str:
    """SHA-256 over names and contents of the package's Python files."""
    digest = hashlib.sha256()
    for name, path in sorted((p.relative_to(package_dir).as_posix(), p) for p in package_dir.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def compare_across_ranks(
    meeting: Meeting, config: Mapping[str, Any], *, backend: str, torch_version: str
) -> dict[str, str]:
    """Compare all ranks; returns what they have in common. Every rank calls it and every rank raises alike.

    config: `Config.flat()`.
    Raises StartupMismatchError naming rank and field (for the configuration also the values), and what `decide` raises.
    """
    text = config_text(config)
    mine = {
        "configuration": hashlib.sha256(text.encode()).hexdigest(),
        "code": code_digest(),
        "backend": backend,
        "torch version": torch_version,
        "Python version": platform.python_version(),
    }
    if unlike := meeting.decide(mine, {mine["configuration"]: text}, differences):
        raise StartupMismatchError(unlike)
    return mine


def differences(ranks: Sequence[Mapping[str, str]], config_of: Callable[[str], str]) -> str:
    """What to tell of ranks that were not started alike; empty where all were. config_of: from a digest to
    `config_text`."""
    problems = mismatches(ranks)
    if any(field == "configuration" for field, _, _ in problems):
        # Only now: the digests are small, whole configurations of thousands of ranks are not.
        digests = [facts["configuration"] for facts in ranks]
        configs = {digest: json.loads(config_of(digest)) for digest in set(digests)}
        flags = mismatches([configs[digest] for digest in digests])
        problems = flags + [problem for problem in problems if problem[0] != "configuration"]
    if not problems:
        return ""
    lines = [f"  {field}: {_ranks_have(who)} {text}" for field, who, text in problems[:MAX_NAMED]]
    if len(problems) > MAX_NAMED:
        lines.append(f"  and {len(problems) - MAX_NAMED} more differences")
    advice = "Start every rank with the same flags, code and environment."
    return "\n".join(["the ranks were not started alike:", *lines, advice])


def mismatches(ranks: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[int], str]]:
    """(field, ranks that differ, what they have) against the most common value; ties go to rank 0's."""
    found = []
    for field in dict.fromkeys(name for values in ranks for name in values):
        values = [values.get(field) for values in ranks]
        counts = Counter(values)
        reference = max(counts, key=lambda value: (counts[value], value == values[0]))
        for other in dict.fromkeys(value for value in values if value != reference):
            odd = [rank for rank, value in enumerate(values) if value == other]
            found.append((field, odd, f"{_shown(other)}, rank {values.index(reference)} {_shown(reference)}"))
    return found


def _shown(value: Any) -> str:
    text = "no value" if value is None else printable(str(value))
    is_digest = len(text) == 64 and all(c in "0123456789abcdef" for c in text)
    return f"digest {text[:12]}" if is_digest else text
