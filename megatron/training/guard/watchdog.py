"""Who is stuck: every rank publishes how far it is, and a survivor reads all records and names the culprit.

gloo's and NCCL's errors do not say which rank is to blame. So each rank keeps step, phase and, per group,
how many collectives it has begun, and a side thread publishes that to the store every half second. A rank
that loses a peer calls `diagnose`, which takes less than 2 s and says, for example,

    rank 1 (host node7, pid 4242) missed all_reduce #3 of group 'dp' at step 17, phase grad-sync; last heard of
    5.2 s ago, then in step 17, phase data

Torch-free: the store (set, get, check, clone) is passed in. Who is to blame is decided in
`culprit.py`, which is pure.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from megatron.core.transport.traffic import TrafficCounter
from megatron.training.guard.hang_diagnosis import (
    ENDED,
    FAILING,
    RUNNING,
    ProgressRecord,
    find_culprit,
    first_line,
    group_instance,
    newest_collective,
)

INTERVAL_S = 0.4
ECHO_EVERY = 10  # publications; `set` does not wait for an answer, so now and then one is asked for
STORE_SILENT_S = 60.0  # without an answer: a store that thousands of ranks write to may be slow
# A live rank publishes within one interval; four leave room for a loaded machine, and keep within the
# promised 2 s.
BUDGET_INTERVALS = 4.0


class Watchdog:
    """Publishes this rank's progress and names the culprit when a peer is lost.

    store: a torch.distributed store that all ranks share (torch's stubs do not declare `clone`); it is
    cloned, so that nobody's blocking `get` holds the records up.
    prefix: a fresh one for each restart, so that a dead attempt's records are not read.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        *,
        interval_s: float = INTERVAL_S,
        prefix: str = "watchdog",
        store_host: str = "rank 0 or its launcher",
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._interval_s = interval_s
        self._prefix = prefix
        self._store_host = store_host
        self._publishing = store.clone()
        self._reading = store.clone()
        self._host = socket.gethostname()
        self._sequences: dict[str, int] = {}
        self._step, self._phase = 0, "start"
        self._last: tuple[str, str, int, tuple[int, ...]] = ("", "", 0, ())
        self._progressed_at = time.time()
        self._traffic: tuple[TrafficCounter, ...] = ()
        self._state, self._reason, self._beat = RUNNING, "", 0
        self._closing = False
        self.store_error: str | None = None
        self._unanswered_s = 0.0
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._publish_loop, name="watchdog", daemon=True)
        self._thread.start()

    # --- what the training loop tells; cheap, as it runs many times a step

    def step(self, iteration: int) -> None:
        """The main thread begins this iteration."""
        self._step = iteration
        self._progressed_at = time.time()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The main thread is in phase `name`: "data", "forward-backward", "grad-sync", "optimizer", ..."""
        outer, self._phase = self._phase, name
        self._progressed_at = time.time()
        yield
        self._phase = outer  # not in a finally: after an error the record must show where it happened
        self._progressed_at = time.time()

    def collective(self, op: str, group: str, ranks: Sequence[int] = ()) -> None:
        """The main thread begins a collective; the observer that `collectives` calls.

        group: the purpose ("dp"). ranks: the group's members.
        """
        key = group_instance(group, ranks)
        sequence = self._sequences.get(key, 0) + 1
        self._sequences[key] = sequence
        self._last = (op, group, sequence, tuple(ranks))
        self._progressed_at = time.time()

    def watch(self, traffic: Iterable[TrafficCounter]) -> None:
        """These counters of the rank's groups know from now on whether the main thread waits."""
        self._traffic = tuple(traffic)

    # --- publishing

    def record(self) -> ProgressRecord:
        """This rank's progress now."""
        op, group, sequence, members = self._last
        return ProgressRecord(
            rank=self.rank,
            host=self._host,
            pid=os.getpid(),
            beat=self._beat,
            state=self._state,
            reason=self._reason,
            step=self._step,
            phase=self._phase,
            op=op,
            group=group,
            sequence=sequence,
            members=members,
            sequences=self._sequences.copy(),
            waits=any(counter.waits for counter in self._traffic),
            published_at=time.time(),
            progressed_at=self._progressed_at,
        )

    def _publish_loop(self) -> None:
        while True:
            last = self._closing
            self._beat += 1
            try:
                self._publishing.set(self._key(self.rank), self.record().to_json())
                if self._beat % ECHO_EVERY == 1 and not last:
                    self._publishing.check([self._key(self.rank)])
                    self._unanswered_s = 0.0
            except (RuntimeError, OSError) as error:
                self.store_error = first_line(error)
                return
            if last:
                return
            self._wake.wait(self._interval_s)
            self._wake.clear()

    def store_trouble(self, since_last_s: float) -> str | None:
        """What is wrong with the store, if anything. Called every `since_last_s` s; the calls are counted rather than
        the time, in which this process may have been stopped."""
        self._unanswered_s += since_last_s
        if self.store_error is not None:
            return f"the store at {self._store_host} is gone ({self.store_error})"
        if self._unanswered_s > STORE_SILENT_S:
            return f"the store at {self._store_host} has not answered for {self._unanswered_s:.0f} s"
        return None

    @property
    def place(self) -> str:
        """Where the main thread is, for a message."""
        return f"at step {self._step}, phase {self._phase}"

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/{rank}"

    def close(self, reason: str = "") -> None:
        """Stop publishing. reason: why this rank leaves early, for the others to read; empty at a regular end."""
        if self._state == RUNNING:  # a rank that lost a peer stays "failing": it is nobody's culprit
            self._reason, self._state = reason, ENDED
        self._closing = True
        self._wake.set()
        self._thread.join(timeout=1.0)  # a store that does not answer must not hold up the exit

    # --- diagnosis

    def diagnose(self) -> str:
        """One line that names the rank that is to blame. Takes less than 2 s, whatever the store does."""
        self._state = FAILING
        self._wake.set()
        found: list[str] = []
        reader = threading.Thread(target=lambda: found.append(self._diagnose()), daemon=True)
        reader.start()
        reader.join(timeout=self._interval_s * (BUDGET_INTERVALS + 0.5))
        return found[0] if found else self._store_gone("it does not answer")

    def _diagnose(self) -> str:
        try:
            records, alive = self._observe()
        except (RuntimeError, OSError) as error:
            return self._store_gone(first_line(error))
        return find_culprit(self.record(), records, alive, self.world_size, time.time())

    def _store_gone(self, why: str) -> str:
        mine = self.record()
        return (
            f"the store is gone ({why}): its host, {self._store_host}, is lost, so who else is stuck "
            "cannot be told. "
            f"This rank was {self.place}{newest_collective(mine)}"
        )

    def _observe(self) -> tuple[dict[int, ProgressRecord], set[int]]:
        """All records, and the ranks whose record is fresh: published after we began to look, or a last word."""
        deadline = time.monotonic() + self._interval_s * BUDGET_INTERVALS
        first = self._read_all()
        while True:
            time.sleep(self._interval_s / 4)
            records = self._read_all()
            alive = {
                rank
                for rank, record in records.items()
                if rank == self.rank
                or record.state != RUNNING
                or record.beat > (first[rank].beat if rank in first else 0)
            }
            if len(alive) == self.world_size or time.monotonic() > deadline:
                return records, alive

    def _read_all(self) -> dict[int, ProgressRecord]:
        records = {}
        for rank in range(self.world_size):
            key = self._key(rank)
            if self._reading.check([key]):  # `get` would wait for a key that is missing
                records[rank] = ProgressRecord.from_json(self._reading.get(key))
        return records
