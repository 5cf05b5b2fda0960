"""Ranks that were lost start again under the launchers that they had, which import nothing for it.

[Note: all or none] A launcher sees the ranks of its own machine alone. So those of all machines decide, in the store of
torch's agent: if each of them says that its ranks were lost and that there is a new checkpoint since they began, all
start them again. Else none does, and they end as they would have: where a rank has ended for a reason of its own, or a
launcher has not been heard of for QUIET_S.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.catalog import read_tracker
from megatron.training.guard.exit_status import ExitStatus

AGENT = "torch.distributed.elastic.agent.server.local_elastic_agent"
BEAT_S, QUIET_S = 1.0, 6.0
AGAIN, END = "again", "end"


def restart_lost_ranks(save: Path) -> None:
    """torch's agent asks `Restarts` before it starts failed ranks again. save: their checkpoints' folder."""
    agent, restarts = importlib.import_module(AGENT).LocalElasticAgent, Restarts(save)
    monitor = agent._monitor_workers

    def monitored(self: Any, group: Any) -> Any:
        result = monitor(self, group)
        launchers = Launchers(self._store, group.group_rank, group.group_world_size)
        if result.state.name == "HEALTHY":
            restarts.beat(launchers)
            return result
        statuses = [failure.exitcode for failure in result.failures.values()]
        attempt = group.spec.max_restarts - self._remaining_restarts
        if not restarts.agreed(launchers, attempt, statuses) and result.is_failed():
            self._remaining_restarts = 0
        return result

    agent._monitor_workers = monitored


class Restarts:
    """What one launcher says of its ranks. save: their checkpoints' folder."""

    def __init__(self, save: Path) -> None:
        self._save, self._last_beat = save, 0.0
        self._begun_with = read_tracker(save)

    def beat(self, launchers: Launchers) -> None:
        """Say that this launcher is there, every BEAT_S."""
        if time.monotonic() - self._last_beat > BEAT_S:
            self._last_beat = time.monotonic()
            with contextlib.suppress(RuntimeError):
                launchers.beats_of(launchers.mine, 1)

    def agreed(self, launchers: Launchers, attempt: int, statuses: Sequence[int]) -> bool:
        """Whether all start their ranks again. statuses: of those that failed here, -n where signal n ended them; none
        where all have trained to the end. See [Note: all or none]."""
        newest = read_tracker(self._save)
        are_lost = [status < 0 or status == ExitStatus.PEER_LOST for status in statuses]
        decision = END
        with contextlib.suppress(RuntimeError):  # the store is gone with its launcher
            wants = newest != self._begun_with and bool(are_lost) and all(are_lost)
            decision = launchers.decided(f"after attempt {attempt}", wants)
        if decision == AGAIN:
            self._begun_with = newest
            said = f"ranks were lost, and iteration {newest} is saved: all of them start again"
            print(said, file=sys.stderr, flush=True)
        return decision == AGAIN


class Launchers:
    """Of all machines, of which this one's is number `mine`, as the store that they share knows them."""

    def __init__(self, store: Any, mine: int, count: int) -> None:
        self._store, self.mine, self._count = store, mine, count

    def beats_of(self, launcher: int, more: int = 0) -> int:
        """How often it has said that it is there."""
        return int(self._store.add(f"launcher {launcher}", more))

    def decided(self, key: str, wants: bool) -> str:
        """The first decision that is put down: AGAIN by the last one that wants it, END by one that does not, or by the
        first machine's, that has waited in vain. Raises RuntimeError without a store."""
        here = [f"{key}: launcher {launcher}" for launcher in range(self._count)]
        if not wants:
            return self._put(key, END)
        self._store.set(here[self.mine], "")
        if self._store.add(f"{key}: launchers", 1) == self._count:
            return self._put(key, AGAIN)
        heard: dict[int, tuple[int, float]] = {}
        while not self._store.check([key]):
            for launcher, its in enumerate(here if self.mine == 0 else ()):
                beats, now = self.beats_of(launcher), time.monotonic()
                last = heard.setdefault(launcher, (beats, now))
                if self._store.check([its]) or beats != last[0]:
                    heard[launcher] = (beats, now)
                elif now - last[1] > QUIET_S:
                    return self._put(key, END)
            time.sleep(0.1)  # not in the store, where no signal is heard
        return self._put(key, END)

    def _put(self, key: str, decision: str) -> str:
        return bytes(self._store.compare_set(key, "", decision)).decode()
