"""Who is stuck: every rank publishes how far it is, and a survivor reads all records and names the rank to blame.

gloo's and NCCL's errors do not say which rank is to blame. So each rank keeps step, phase and, per group,
how many collectives it has begun, and a side thread publishes that to the store every 0.4 s. A rank
that loses a peer calls `diagnose`, which takes less than 2 s where the store answers at once, and says, for example,

    rank 1 (host node7, pid 4242) missed all_reduce #3 of group 'dp' at step 17, phase grad-sync; last heard of
    5.2 s ago, then in step 17, phase data

Torch-free: the store (set, get, check, clone) is passed in. `OrphanGuard` ends a rank whose launcher or store is gone.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from megatron.core.transport.traffic import TrafficCounter
from megatron.core.words import time_text
from megatron.training.guard import hang_diagnosis
from megatron.training.guard.hang_diagnosis import ENDED, FAILING, RUNNING, ProgressRecord

SAVING = "save"  # the phase in which a checkpoint is written
INTERVAL_S = 0.4
ECHO_EVERY = 10  # publications; `set` does not wait for an answer, so now and then one is asked for
STORE_SILENT_S = 60.0  # without an answer: a store that thousands of ranks write to may be slow
# A live rank publishes within one interval; four leave room for a loaded machine, and keep within 2 s.
BUDGET_INTERVALS = 4.0
ANSWER_INTERVALS = (
    4.5  # a store that has not answered for so long is gone; one that answers is read to the end
)
PATIENCE_S = 15.0  # in all


class Watchdog:
    """Publishes this rank's progress and names the rank to blame when a peer is lost.

    store: a torch.distributed store that all ranks of one attempt share (torch's stubs do not declare `clone`); it is
    cloned, so that nobody's blocking `get` holds the records up. store_host: where it is, for messages.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        *,
        interval_s: float = INTERVAL_S,
        store_host: str = "rank 0 or its launcher",
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self._interval_s, self._store_host = interval_s, store_host
        self._publishing, self._reading = store.clone(), store.clone()
        self._host = socket.gethostname()
        self._sequences: dict[str, int] = {}
        self._step, self._phase = 0, "start"
        self._last: tuple[str, str, int, tuple[int, ...]] = ("", "", 0, ())  # op, group, sequence, members
        self._progressed_at = time.time()
        self._traffic: tuple[TrafficCounter, ...] = ()
        self._state, self._reason, self._beat = RUNNING, "", 0
        self._closing = False
        self.store_error: str | None = None
        self._unanswered_s = self._answered_at = 0.0
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
        key = hang_diagnosis.group_instance(group, ranks)
        sequence = self._sequences[key] = self._sequences.get(key, 0) + 1
        self._last = (op, group, sequence, tuple(ranks))
        self._progressed_at = time.time()

    def watch(self, traffic: Iterable[TrafficCounter]) -> None:
        """These counters of the rank's groups know from now on whether the main thread waits."""
        self._traffic = tuple(traffic)

    # --- publishing

    def record(self) -> ProgressRecord:
        """This rank's progress now."""
        process = self.rank, self._host, os.getpid(), self._beat, self._state, self._reason
        waits, sequences = any(counter.waits for counter in self._traffic), self._sequences.copy()
        times = time.time(), self._progressed_at
        return ProgressRecord(*process, self._step, self._phase, *self._last, sequences, waits, *times)

    def _publish_loop(self) -> None:
        key, last = _key(self.rank), False
        while not last:
            last = self._closing
            self._beat += 1
            try:
                self._publishing.set(key, self.record().to_json())
                if self._beat % ECHO_EVERY == 1 and not last:
                    self._publishing.check([key])
                    self._unanswered_s = 0.0
            except (RuntimeError, OSError) as error:
                self.store_error = _first_line(error)
                return
            if not last:
                self._wake.wait(self._interval_s)
                self._wake.clear()

    def store_trouble(self, since_last_s: float) -> str | None:
        """What is wrong with the store, if anything. Called every `since_last_s` s; the calls are counted rather than
        the time, in which this process may have been stopped."""
        self._unanswered_s += since_last_s
        if self.store_error is not None:
            return f"the store at {self._store_host} is gone ({self.store_error})"
        if self._unanswered_s > STORE_SILENT_S:
            return f"the store at {self._store_host} has not answered for {time_text(self._unanswered_s, 2)}"
        return None

    @property
    def still_s(self) -> float:
        """For how long the main thread has begun nothing new: 0 while it saves, which takes as long as it takes."""
        return 0.0 if self._phase == SAVING else time.time() - self._progressed_at

    @property
    def place(self) -> str:
        """Where the main thread is, for a message."""
        return f"at step {self._step}, phase {self._phase}"

    def close(self, reason: str = "") -> None:
        """Stop publishing. reason: why this rank leaves early, for the others to read; empty at a regular end."""
        if self._state == RUNNING:  # a rank that lost a peer stays "failing": it is not to blame
            self._reason, self._state = reason, ENDED
        self._closing = True
        self._wake.set()
        self._thread.join(timeout=1.0)  # a store that does not answer must not hold up the exit

    # --- diagnosis

    def diagnose(self) -> str:
        """One line that names the rank that is to blame. Takes less than 2 s, also where the store is gone; at most
        PATIENCE_S where each of its answers takes its time, as on a loaded machine."""
        self._state = FAILING
        self._wake.set()
        found: list[str] = []

        def look() -> None:
            try:
                seen = self._observe()
                found.append(hang_diagnosis.diagnose(self.record(), *seen, self.world_size, time.time()))
            except (RuntimeError, OSError) as error:
                found.append(self._store_gone(_first_line(error)))

        began = self._answered_at = time.monotonic()
        reader = threading.Thread(target=look, daemon=True)
        try:
            reader.start()
        except RuntimeError as error:  # there is no memory for its stack, or no process more is allowed
            return f"who is to blame cannot be looked up ({error}). This rank was {self._whereabouts()}"
        while reader.is_alive() and (now := time.monotonic()) < began + PATIENCE_S:
            if now > self._answered_at + self._interval_s * ANSWER_INTERVALS:
                break
            reader.join(self._interval_s / 4)
        return found[0] if found else self._store_gone("it does not answer")

    def _store_gone(self, why: str) -> str:
        return (
            f"the store is gone ({why}): its host, {self._store_host}, is lost, so who else is stuck "
            f"cannot be told. This rank was {self._whereabouts()}"
        )

    def _whereabouts(self) -> str:
        return f"{self.place} {self.record().collective}".rstrip()

    def _observe(self) -> tuple[dict[int, ProgressRecord], set[int]]:
        """All records, and the ranks whose record is fresh: published after we began to look, or a last word."""
        deadline = time.monotonic() + self._interval_s * BUDGET_INTERVALS
        first = {rank: record.beat for rank, record in self._read_all().items()}
        while True:
            time.sleep(self._interval_s / 4)
            records = self._read_all()
            alive = {
                rank
                for rank, record in records.items()
                if rank == self.rank or record.state != RUNNING or record.beat > first.get(rank, 0)
            }
            if len(alive) == self.world_size or time.monotonic() > deadline:
                return records, alive

    def _read_all(self) -> dict[int, ProgressRecord]:
        records = {}
        for rank in range(self.world_size):
            if self._reading.check([_key(rank)]):  # `get` would wait for a key that is missing
                records[rank] = ProgressRecord.from_json(self._reading.get(_key(rank)))
            self._answered_at = time.monotonic()
        return records


def _key(rank: int) -> str:
    return f"watchdog/{rank}"


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


POLL_S = 0.4
GRACE_S = 2.0  # in which the main thread may meet the loss itself and name who is to blame
LEAVE_S = 30.0  # for saving once the launcher is gone: what torchrun leaves to its ranks
STILL_S = 5.0  # of these, without anything new: somebody hangs


class OrphanedError(RuntimeError):
    """The launcher or the store of this rank is gone (exit status 6)."""


class OrphanGuard:
    """Ends a rank whose launcher or store is gone, from a thread, whatever the main thread waits for: nobody stops the
    ranks of a torchrun that was killed with -9, and the same command, started again, would be a second run. Looks until
    `close`, and calls `end` once, in its thread, with an OrphanedError.

    [Note: a launcher that leaves] A signal that torchrun does not know (SIGUSR1, which Slurm sends to all of a step)
    ends it and not its ranks. So a run that saves is asked to (`ask`, which says whether there is such a run), and is
    ended only when it does not leave by itself: LEAVE_S later, or once it stands still (`still_s`).

    launcher: pid of the parent where that lives as long as its ranks (torchrun), None where it may end before them
    (srun, mpirun, a shell). store_trouble(s): what is wrong with the store, None while nothing is; called every s
    seconds. where: what this rank is doing, for the message.
    """

    def __init__(
        self,
        launcher: int | None,
        store_trouble: Callable[[float], str | None],
        where: Callable[[], str],
        end: Callable[[OrphanedError], None],
        ask: Callable[[str], bool] = lambda why: False,
        still_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._launcher, self._store_trouble, self._where, self._end = launcher, store_trouble, where, end
        self._ask, self._still_s = ask, still_s
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="orphans", daemon=True).start()

    def close(self) -> None:
        """This rank ends by itself from here on: others may be gone before it."""
        self._closed.set()

    def _watch(self) -> None:
        gone: str | None
        while not self._closed.wait(POLL_S):
            if self._is_orphan():
                gone = f"the launcher (pid {self._launcher}) is gone"
                if self._leaves(f"the loss of its launcher (pid {self._launcher})"):
                    return
            elif (gone := self._store_trouble(POLL_S)) is None:
                continue
            elif self._closed.wait(GRACE_S):
                return
            elif self._is_orphan():  # it was the store's host
                continue
            why = f"{gone}; this rank was {self._where()}: it ends rather than train on alone"
            self._end(OrphanedError(why))
            return

    def _is_orphan(self) -> bool:
        return self._launcher is not None and os.getppid() != self._launcher

    def _leaves(self, why: str) -> bool:
        """Whether the run ends by itself, asked to. See [Note: a launcher that leaves]."""
        if not self._ask(why):
            return False
        deadline = time.monotonic() + LEAVE_S
        while time.monotonic() < deadline and self._still_s() < STILL_S:
            if self._closed.wait(POLL_S):
                return True
        return False
