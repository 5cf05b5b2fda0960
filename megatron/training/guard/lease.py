"""The lease on a folder of checkpoints: who writes there, so that a second run does not (floor 0).

    take(folder, me, say=print)              raises LeaseError where another run holds the folder
    lease = Lease(folder, me, on_lost)       renews it every 10 s from a thread
    lease.check()                            before anything is committed: raises LeaseError once it is another's
    lease.release()

[Note: the lease] `lease.json` says which process holds the folder; its modification time is the newest heartbeat.
Age is that time against the time of a file written there just now, so only the file system's clock counts and hosts
need not agree on theirs. A lease without a heartbeat for 60 s is stale. On the holder's own machine its process is
asked as well: a lease whose process is gone is stale at once. Pids mean something only within one boot and one pid
namespace, and are used again, so all of these are compared, and when the process began.

A lease comes into being by a hard link, which fails where one is there, and a stale one goes by a rename, which gives
it to one process only; who finds that it has moved a lease other than the one it has judged puts it back. That works
without locks, which network file systems may lack; where there are locks, one process at a time looks and takes. A
holder that was stopped for longer than a minute finds another's lease, or none, and stops: every save asks, before it
cleans up and before it commits.

The thread needs the interpreter for an instant every 10 s; only native code that keeps it for a minute could make a
working run look dead, and that run would then stop at its next save rather than write over the other's.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from megatron.core.dist_checkpointing.catalog import LEASE_FILE
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.safe_files import locked, open_regular, publish_text
from megatron.training.guard.lease_holder import (
    STALE_S,
    Holder,
    State,
    from_json,
    judge,
    this_machine,
    to_json,
)

LOCK_FILE = ".lease.lock"
HEARTBEAT_S = 10.0
PATIENCE_S = STALE_S + 2 * HEARTBEAT_S  # with a former attempt of this job, whose host may have died
_POLL_S = 0.25
_MAX_BYTES = 1 << 14


class LeaseError(CheckpointError):
    """Another run holds the folder, or has taken it over (exit status 3)."""


class Found(NamedTuple):
    """A folder's lease. age_s: since the newest heartbeat, which was at beat_s by the file system's clock."""

    state: State
    holder: Holder | None = None
    age_s: float = 0.0
    beat_s: float = 0.0


def look(folder: Path) -> Found:
    """What holds a folder. Raises OSError."""
    try:
        holder, beat_s = _read(folder / LEASE_FILE)
    except FileNotFoundError:
        return Found(State.FREE)
    age_s = _file_system_time(folder) - beat_s
    is_here = holder.machine == (machine := this_machine())
    state = judge(holder, age_s, machine=machine, is_alive=is_here and holder.is_alive)
    return Found(state, holder, age_s, beat_s)


def _read(path: Path, renewed_by: str = "") -> tuple[Holder, float]:
    """The holder and its newest heartbeat. renewed_by: a token, whose lease gets a heartbeat. Raises OSError."""
    with open_regular(path) as fd:
        holder, beat_s = from_json(os.read(fd, _MAX_BYTES)), os.fstat(fd).st_mtime
        if renewed_by and holder.token == renewed_by:
            os.utime(fd)
    return holder, beat_s


def take(folder: Path, me: Holder, say: Callable[[str], None]) -> None:
    """Make the folder's lease this process's. say: gets a line where a stale one is taken over or one is waited for.

    A former attempt of the same job is waited for. Raises LeaseError where another run holds it, OSError.
    """
    deadline, waits = time.monotonic() + PATIENCE_S, False
    while (held := _try(folder, me, say)) is not None and held.holder is not None:
        is_same_job = me.run_id is not None and held.holder.run_id == me.run_id
        if not is_same_job or time.monotonic() > deadline:
            raise LeaseError(
                f"--save {folder}: another run holds this folder: {held.holder.name}, last heartbeat "
                f"{held.age_s:.0f} s ago ({folder / LEASE_FILE}). It is free when that run ends, or {STALE_S:.0f} s "
                "after its last heartbeat. Give this run another --save, or wait for that run or stop it"
            )
        if not waits:
            waits = True
            say(f" > --save {folder}: waiting for a former attempt of this job to end ({held.holder.name})")
        time.sleep(_POLL_S)


def _try(folder: Path, me: Holder, say: Callable[[str], None]) -> Found | None:
    """Take the lease, None, or find the one that is held."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # a file system without locks
            stack.enter_context(locked(folder / LOCK_FILE))
        while True:
            publish_text(folder / LEASE_FILE, to_json(me), replace=False)
            found = look(folder)
            if found.holder is not None and found.holder.token == me.token:
                return None
            if found.state is State.HELD:
                return found
            if found.holder is not None and _remove(folder, found.holder, found.beat_s):
                silent = "that process is gone"
                if abs(found.age_s) > STALE_S:
                    silent = f"no heartbeat for {found.age_s:.0f} s"
                say(f" > --save {folder}: took over the lease of another run ({found.holder.name}): {silent}")


class Lease:
    """A lease that `take` has got, renewed until it is released.

    on_lost: called in the renewing thread once another run has taken it.
    """

    def __init__(
        self,
        folder: Path,
        me: Holder,
        on_lost: Callable[[LeaseError], None],
        *,
        interval_s: float = HEARTBEAT_S,
    ) -> None:
        self._folder, self._me = folder, me
        self._on_lost, self._interval_s = on_lost, interval_s
        self._beat_at_s = _uptime_s()
        self._lock = threading.Lock()
        self._released = threading.Event()
        threading.Thread(target=self._keep, name="lease", daemon=True).start()

    def check(self) -> None:
        """A heartbeat. Raises LeaseError when the lease is not this run's any more, OSError."""
        with self._lock:
            if self._released.is_set():
                return
            holder = self._touch()
            may_be_taken = _uptime_s() - self._beat_at_s > STALE_S
            if holder is None and not may_be_taken:  # somebody removed it
                publish_text(self._folder / LEASE_FILE, to_json(self._me), replace=False)
                holder = self._touch()
            if holder is None or holder.token != self._me.token:
                taker = "another run" + (", which has ended since" if holder is None else f" ({holder.name})")
                raise LeaseError(
                    f"--save {self._folder}: no heartbeat of this run for more than {STALE_S:.0f} s (was it stopped?), "
                    f"and its lease was taken by {taker}; it ends without writing there. What it has committed is "
                    "whole. Start it again with another --save, or once that run has ended"
                )
            self._beat_at_s = _uptime_s()

    def release(self) -> None:
        """Give the folder free. A file system that does not answer is not waited for."""
        if not self._lock.acquire(timeout=1.0):
            return
        try:
            if not self._released.is_set():
                self._released.set()
                if self._touch() == self._me:
                    _remove(self._folder, self._me)
        except OSError:
            return  # it grows stale
        finally:
            self._lock.release()

    def _touch(self) -> Holder | None:
        """Who holds the lease; a heartbeat where it is this run. Another's lease is never touched."""
        try:
            return _read(self._folder / LEASE_FILE, renewed_by=self._me.token)[0]
        except FileNotFoundError:
            return None

    def _keep(self) -> None:
        while not self._released.wait(self._interval_s):
            try:
                self.check()
            except LeaseError as error:
                self._on_lost(error)
                return
            except OSError:
                continue  # a file system in trouble: the next beat or the next save meets it


def _remove(folder: Path, judged: Holder, beat_s: float | None = None) -> bool:
    """Take this lease away, whether it was there; but no other that has come in its place meanwhile, nor one whose
    newest heartbeat is another than was judged."""
    aside = folder / f".{LEASE_FILE}.{secrets.token_hex(8)}.tmp"
    try:
        os.rename(folder / LEASE_FILE, aside)
    except FileNotFoundError:
        return False
    try:
        holder, newest_s = _read(aside)
        is_judged = holder.token == judged.token and beat_s in (None, newest_s)
        if not is_judged:
            with contextlib.suppress(OSError):  # its holder makes it again, or stops
                os.link(aside, folder / LEASE_FILE)
        return is_judged
    finally:
        os.unlink(aside)


def _file_system_time(folder: Path) -> float:
    """Now, by the clock that dates the folder's files."""
    with tempfile.TemporaryFile(dir=folder) as probe:
        probe.write(b"\n")
        probe.flush()
        os.fsync(probe.fileno())
        return os.fstat(probe.fileno()).st_mtime


def _uptime_s() -> float:
    """Runs on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
