"""Who has come, and what one rank decides for all of them: through the store, before there is any process group.

Every rank looks at a few small keys. Nobody waits longer than the timeout, and who does not come is named.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from megatron.core.transport.peer_loss import PeerLostError, peer_loss_named
from megatron.training.config.launch_env import LaunchEnvError
from megatron.training.guard.rendezvous import pauses

FAREWELL_S = 5.0  # the host of the store leaves last, but does not wait for the dead
MAX_NAMED = 8  # ranks in a message

Judge = Callable[[Sequence[Mapping[str, str]], Callable[[str], str]], str]


def ranks_have(ranks: Sequence[int]) -> str:
    """`rank 3 has`, `ranks 3, 5 have`, of very many the first."""
    named = ", ".join(map(str, ranks[:MAX_NAMED])) + (", ..." if len(ranks) > MAX_NAMED else "")
    return f"rank {named} has" if len(ranks) == 1 else f"ranks {named} have"


class Meeting:
    """The ranks of a launch, from the first one that has come to the verdict on all of them.

    hosts: whether the store ends with this process.
    """

    def __init__(
        self, store: dist.Store, rank: int, world_size: int, timeout: datetime.timedelta, *, hosts: bool
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._store = dist.PrefixStore("meeting", store)
        self._hosts = hosts
        self._timeout_s = timeout.total_seconds()
        self._began = time.monotonic()

    def decide(self, mine: Mapping[str, str], texts: Mapping[str, str], judge: Judge) -> str:
        """Rank 0's judgement of what all ranks say: the same text on every rank, empty where all is well.

        mine: a few short facts. texts: longer ones by a name that stands for the content, alike on most ranks: judge
        gets every rank's facts, in order, and a function that reads a text by its name.
        Raises LaunchEnvError where this rank cannot be one of these, PeerLostError naming ranks that do not come.
        """
        with peer_loss_named("the comparison at start-up", "default", self._everyone, self.rank):
            verdict = self._come(mine, texts) or self._verdict(judge)
            if verdict.get("missing") or verdict.get("unlike"):
                self._leave()
        if missing := verdict.get("missing"):
            waited_s = time.monotonic() - self._began
            why = f"{ranks_have(missing)} not come"
            raise PeerLostError(
                "the comparison at start-up", "default", self._everyone, self.rank, waited_s, why
            )
        return str(verdict["unlike"])

    @property
    def _everyone(self) -> tuple[int, ...]:
        return tuple(range(self.world_size))

    def _come(self, mine: Mapping[str, str], texts: Mapping[str, str]) -> dict[str, Any]:
        """Say who this is; a verdict where there cannot be any other."""
        store, rank = self._store, self.rank
        number = store.add(f"came/{rank}", 1)
        who = f"process {os.getpid()} on {socket.gethostname()}"
        store.set(f"who/{rank}/{number}", who)
        store.add("arrived", 1)
        if number > 1:
            other = f"who/{rank}/{number - 1}"
            named = store.get(other).decode() if store.check([other]) else "another"
            return self._object(f"RANK={rank} was given to two processes of one launch: {named}, and {who}")
        if rank == 0:
            store.set("world size", str(self.world_size))
        elif (missing := self._wait_for("world size")) is not None:
            return missing
        elif (expected := int(store.get("world size"))) != self.world_size:
            return self._object(f"WORLD_SIZE: rank {rank} has {self.world_size}, rank 0 {expected}")
        for name, text in texts.items():
            if not store.check([f"text/{name}"]):
                store.set(f"text/{name}", text)
        store.set(f"facts/{rank}", json.dumps(dict(mine)))
        store.add("present", 1)
        return {}

    def _verdict(self, judge: Judge) -> dict[str, Any]:
        store = self._store
        if self.rank == 0:
            ended = self._wait_for(None)
            if ended is not None:
                return ended
            told = store.multi_get([f"facts/{rank}" for rank in range(self.world_size)])
            text = judge(
                [json.loads(facts) for facts in told], lambda name: store.get(f"text/{name}").decode()
            )
            return self._post({"unlike": text})
        ended = self._wait_for("verdict")
        return ended if ended is not None else self._read()

    def _wait_for(self, key: str | None) -> dict[str, Any] | None:
        """Until the key is there, None: until all ranks are. A verdict that comes before, or the timeout's."""
        for pause in pauses():
            if key != "verdict" and self._store.check(["verdict"]):
                return self._read()
            if self._store.check([key]) if key else self._store.add("present", 0) == self.world_size:
                return None
            if time.monotonic() - self._began > self._timeout_s:
                return self._post({"missing": self._without("came") or self._without("facts") or [0]})
            time.sleep(pause)
        raise AssertionError("pauses never end")

    def _without(self, key: str) -> list[int]:
        return [rank for rank in self._everyone if not self._store.check([f"{key}/{rank}"])]

    def _post(self, verdict: dict[str, Any]) -> dict[str, Any]:
        """The first verdict counts for all."""
        found = self._store.compare_set("verdict", "", json.dumps(verdict))
        return dict(json.loads(found))

    def _read(self) -> dict[str, Any]:
        return dict(json.loads(self._store.get("verdict")))

    def _object(self, why: str) -> dict[str, Any]:
        """End the meeting; where it is over already, the others go on, and this rank alone does not belong to them."""
        verdict = self._post({"unlike": why})
        if verdict == {"unlike": ""}:
            raise LaunchEnvError(f"{why}; the others have started: is another run using this MASTER_PORT?")
        return verdict

    def _leave(self) -> None:
        """The host of the store waits until the others have read the verdict."""
        with contextlib.suppress(RuntimeError):
            self._store.add("left", 1)
            deadline = time.monotonic() + FAREWELL_S
            arrived = self._store.add("arrived", 0)
            while self._hosts and self._store.add("left", 0) < arrived and time.monotonic() < deadline:
                time.sleep(0.002)
