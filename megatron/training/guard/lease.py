"""The lease on a folder of checkpoints: who writes there, so that a second run does not (floor 0).

[Note: the lease] `lease.json` says which process holds the folder; its modification time is the newest heartbeat. Age
is that time against the time of a file written there just now: only the file system's clock counts. A lease without a
heartbeat for 60 s is stale, and on the holder's own machine one whose process is gone. Pids mean something only within
one boot and one pid namespace, and are used again, so these are compared too, and when the process began.

A lease comes into being by a hard link, which fails where one is there, and a stale one goes by a rename, which gives
it to one process only; who has moved another lease than the one it has judged puts it back. That works without locks,
which network file systems may lack. A holder that was stopped for longer than a minute finds another's lease, or none,
and stops: every save asks, before it cleans up and before it commits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import enum
import json
import os
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from megatron.core.dist_checkpointing.catalog import LEASE_FILE
from megatron.core.dist_checkpointing.files import CheckpointError
from megatron.core.safe_files import locked, open_regular, publish_text
from megatron.core.schema import Place, check, fields_of, integer, or_null, text

LOCK_FILE = ".lease.lock"
STALE_S = 60.0
HEARTBEAT_S = 10.0
PATIENCE_S = STALE_S + 2 * HEARTBEAT_S  # with a former attempt of this job, whose host may have died
_POLL_S = 0.25
_MAX_BYTES = 1 << 14


class LeaseError(CheckpointError):
    """Another run holds the folder, or has taken it over (exit status 3)."""


LeaseState = enum.Enum("LeaseState", ["FREE", "HELD", "STALE"])


@dataclasses.dataclass(frozen=True)
class Holder:
    """The content of `lease.json`.

    token: names the run. machine: boot and pid namespace, within which pids mean the same process; empty where they are
    not known. process_start: when the process began, in the machine's own ticks. run_id, attempt: the launcher's.
    """

    token: str
    host: str
    pid: int
    machine: str
    process_start: str
    started: str
    run_id: str | None = None
    attempt: int = 0

    @classmethod
    def this_process(cls, run_id: str | None = None, attempt: int = 0) -> Holder:
        pid, now = os.getpid(), f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M:%S} UTC"
        here = socket.gethostname(), pid, this_machine(), process_start(pid) or ""
        job = None if run_id == "none" else run_id  # what torchrun says where no id was given
        return cls(secrets.token_hex(16), *here, now, job, attempt)

    @property
    def name(self) -> str:
        return f"host {self.host}, pid {self.pid}, started {self.started}"

    @property
    def is_alive(self) -> bool:
        """Whether a process of this machine is the holder still."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # another user's
        return process_start(self.pid) in (self.process_start, None)

    def to_json(self) -> str:
        """The text of `lease.json`."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, data: bytes) -> Holder:
        """The holder that a file names, UNREADABLE where it names none."""
        with contextlib.suppress(ValueError, RecursionError):
            fields = json.loads(data)
            check(_SCHEMA, fields, Place(Path(LEASE_FILE)))
            return cls(**fields)
        return UNREADABLE


_SCHEMA = fields_of(Holder, pid=integer(1, (1 << 31) - 1), run_id=or_null(text()))
UNREADABLE = Holder("", "unknown", 0, "", "", "unknown (the file cannot be read as a lease)")


def this_machine() -> str:
    """Boot and pid namespace: where these are alike, a pid is the same process; empty where they are not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def process_start(pid: int) -> str | None:
    """When a process began; empty for one that has ended and is still listed, None where it is not shown."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return "" if fields[0] in "ZX" else fields[19]


def judge(holder: Holder | None, age_s: float, *, machine: str, is_alive: bool) -> LeaseState:
    """The verdict on a lease (pure). age_s: since the newest heartbeat. machine: this one. is_alive: what this machine
    says of the holder's process, which counts only where it is the holder's machine."""
    if holder is None:
        return LeaseState.FREE
    is_gone = holder.machine and holder.machine == machine and not is_alive
    # The clock itself may have been set back.
    return LeaseState.STALE if is_gone or abs(age_s) > STALE_S else LeaseState.HELD


class FoundLease(NamedTuple):
    """A folder's lease. age_s: since the newest heartbeat, which was at beat_s by the file system's clock."""

    state: LeaseState
    holder: Holder | None = None
    age_s: float = 0.0
    beat_s: float = 0.0


def look(folder: Path) -> FoundLease:
    """What holds a folder. Raises OSError."""
    try:
        holder, beat_s = _read(folder / LEASE_FILE)
    except FileNotFoundError:
        return FoundLease(LeaseState.FREE)
    with tempfile.TemporaryFile(dir=folder) as probe:  # dated by the clock that dates the folder's files
        probe.write(b"\n")
        probe.flush()
        os.fsync(probe.fileno())
        age_s = os.fstat(probe.fileno()).st_mtime - beat_s
    state = judge(holder, age_s, machine=this_machine(), is_alive=holder.is_alive)
    return FoundLease(state, holder, age_s, beat_s)


def _read(path: Path, renewed_by: str = "") -> tuple[Holder, float]:
    """The holder and its newest heartbeat. renewed_by: a token, whose lease gets a heartbeat. Raises OSError."""
    with open_regular(path) as fd:
        holder, beat_s = Holder.from_json(os.read(fd, _MAX_BYTES)), os.fstat(fd).st_mtime
        if renewed_by and holder.token == renewed_by:
            os.utime(fd)
    return holder, beat_s


def take(folder: Path, me: Holder, say: Callable[[str], None]) -> None:
    """Make the folder's lease this process's. say: gets a line where a stale one is taken over or one is waited for.

    A former attempt of the same job is waited for. Raises LeaseError where another run holds it, OSError.
    """
    deadline, waits = time.monotonic() + PATIENCE_S, False
    while (held := _try(folder, me, say)) is not None:
        holder, age_s = held
        is_same_job = me.run_id is not None and holder.run_id == me.run_id
        if not is_same_job or time.monotonic() > deadline:
            raise LeaseError(
                f"--save {folder}: another run holds this folder: {holder.name}, last heartbeat {age_s:.0f} s ago "
                f"({folder / LEASE_FILE}). It is free when that run ends, or {STALE_S:.0f} s after its last "
                "heartbeat. Give this run another --save, or wait for that run or stop it"
            )
        if not waits:
            waits = True
            say(f" > --save {folder}: waiting for a former attempt of this job to end ({holder.name})")
        time.sleep(_POLL_S)


def _try(folder: Path, me: Holder, say: Callable[[str], None]) -> tuple[Holder, float] | None:
    """Take the lease, None; or who holds it, and the age of its heartbeat."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # a file system without locks
            stack.enter_context(locked(folder / LOCK_FILE))
        while True:
            publish_text(folder / LEASE_FILE, me.to_json(), replace=False)
            state, holder, age_s, beat_s = look(folder)
            if holder is None:
                continue
            if holder.token == me.token:
                return None
            if state is LeaseState.HELD:
                return holder, age_s
            if _remove(folder, holder, beat_s):
                why = f"no heartbeat for {age_s:.0f} s" if abs(age_s) > STALE_S else "that process is gone"
                say(f" > --save {folder}: took over the lease of another run ({holder.name}): {why}")


class Lease:
    """A lease that `take` has got, renewed until it is released. is_lost: another run has taken it.

    on_lost: called in the renewing thread once that is so. The thread needs the interpreter for an
    instant every 10 s: a run whose native code keeps it for a minute may look dead, and stops at its next save.
    """

    def __init__(self, folder: Path, me: Holder, on_lost: Callable[[LeaseError], None]) -> None:
        self._folder, self._me, self._on_lost, self.is_lost = folder, me, on_lost, False
        self._beat_at_s = _uptime_s()
        self._lock, self._released = threading.Lock(), threading.Event()
        threading.Thread(target=self._keep, name="lease", daemon=True).start()

    def check(self) -> None:
        """A heartbeat. Raises LeaseError when the lease is not this run's any more, OSError."""
        with self._lock:
            if self._released.is_set():
                return
            holder = self._touch()
            if holder is None and _uptime_s() - self._beat_at_s <= STALE_S:  # removed, and taken by no run
                publish_text(self._folder / LEASE_FILE, self._me.to_json(), replace=False)
                holder = self._touch()
            if holder is None or holder.token != self._me.token:
                self.is_lost = True
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
        while not self._released.wait(HEARTBEAT_S):
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


def _uptime_s() -> float:
    """Runs on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
