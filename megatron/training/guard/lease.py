"""The lease on a folder of checkpoints: who writes there, so that a second run does not (floor 0).

[Note: the lease] `lease.json` says which process holds the folder; its modification time is the newest heartbeat. Age
is that time against the time of a file written there just now: only the file system's clock counts. A lease without a
heartbeat for 60 s is stale, and on the holder's own machine one whose process is gone. Pids mean something only within
one boot and one pid namespace, and are used again, so these are compared too, and when the process began.

A file dated further ahead than that was dated before the clock was set back: a live holder dates it anew within
seconds, so it is watched for that.

[Note: who may end a lease] A lease comes into being by a hard link, which fails where one is there. It is ended, by its
own holder or by who takes a stale one over, only by the one process that has made the claim on it: a file named after
the lease's token, which comes into being by a link too. Who has the claim looks once more, and then removes the lease,
or renames its own over it, so that no third one finds the folder free in between. A claim whose maker died, or was
stopped, is itself claimed as a lease is, by the token in it; a maker that was only slow sees that, and withdraws. No
lock is needed, which network file systems may lack and a stopped process keeps. A holder that was stopped for longer
than a minute finds another's lease, or none, and stops: every save asks, before it cleans up and before it commits.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from megatron.core.dist_checkpointing.catalog import LEASE_FILE
from megatron.core.dist_checkpointing.files import CheckpointError
from megatron.core.safe_files import publish_text
from megatron.core.transport import waiting
from megatron.training.guard.lease_holder import (
    STALE_S,
    FoundLease,
    Holder,
    LeaseState,
    look,
    read,
    this_machine,
)

HEARTBEAT_S = 10.0
PATIENCE_S = STALE_S + 2 * HEARTBEAT_S  # with a former attempt of this job, whose host may have died
_POLL_S = 0.25


class LeaseError(CheckpointError):
    """Another run holds the folder, or has taken it over (exit status 3)."""


def take(folder: Path, me: Holder, say: Callable[[str], None]) -> None:
    """Make the folder's lease this process's. say: gets a line where a stale one is taken over or one is waited for.

    A former attempt of the same job is waited for, and whether one dated ahead of the clock is renewed. Raises
    LeaseError where another run holds it, OSError, what `waiting.pause` raises.
    """
    began, first = time.monotonic(), None
    while (found := _try(folder, me, say)) is not None:
        holder, waited_s = found.holder, time.monotonic() - began
        assert holder is not None, f"{found}: held by nobody"
        is_same_job = me.run_id is not None and holder.run_id == me.run_id and waited_s <= PATIENCE_S
        # Only time can tell where neither the date nor this machine's processes do.
        may_be_dead = found.is_ahead and not holder.machine == this_machine() != ""
        is_silent = may_be_dead and first in (None, (holder.token, found.beat_s))
        if is_silent and waited_s > STALE_S:
            why = f"{found.heartbeat} and not renewed for {waited_s:.0f} s"
            if _take_over(folder, found, me):
                return say(_taken_over(folder, holder, why))
            continue
        if not (is_same_job or is_silent):
            raise LeaseError(
                f"--save {folder}: another run holds this folder: {holder.name}, last heartbeat {found.heartbeat} "
                f"({folder / LEASE_FILE}). It is free when that run ends, or {STALE_S:.0f} s after its last "
                "heartbeat. Give this run another --save, or wait for that run or stop it"
            )
        if first is None:
            first = holder.token, found.beat_s
            whom = "a former attempt of this job to end" if is_same_job else "a heartbeat of another run"
            more = (
                ""
                if is_same_job
                else f": its last is {found.heartbeat}; after {STALE_S:.0f} s it counts as gone"
            )
            say(f" > --save {folder}: waiting for {whom} ({holder.name}){more}")
        waiting.pause(_POLL_S)


def _try(folder: Path, me: Holder, say: Callable[[str], None]) -> FoundLease | None:
    """Take the lease, None; or the one that is held."""
    while True:
        publish_text(folder / LEASE_FILE, me.to_json(), replace=False)
        found = look(folder)
        holder = found.holder
        if holder is None:
            continue
        if holder.token == me.token:
            return None
        if found.state is LeaseState.HELD:
            return found
        if _take_over(folder, found, me):
            why = f"no heartbeat for {found.age_s:.0f} s" if found.age_s > STALE_S else "that process is gone"
            say(_taken_over(folder, holder, why))
            return None
        waiting.pause(_POLL_S)  # another does


def _taken_over(folder: Path, holder: Holder, why: str) -> str:
    return f" > --save {folder}: took over the lease of another run ({holder.name}): {why}"


def _take_over(folder: Path, judged: FoundLease, me: Holder) -> bool:
    """Put this run's lease in the place of the one that was judged, unless another process does, or it is another one
    meanwhile, or has had a heartbeat."""
    claims = _claim(folder, judged.holder, me)
    try:
        if not claims or read(folder / LEASE_FILE) != (judged.holder, judged.beat_s):
            return False
        publish_text(folder / LEASE_FILE, me.to_json())
        mine = _claim_path(folder, me)
        if read(claims[-1])[0] != me or os.path.lexists(mine):
            os.unlink(folder / LEASE_FILE)  # this process was stopped for a minute, right here
            return False
        claims += folder.glob(_claim_pattern("*"))  # of processes that died behind such a line
        return True
    finally:
        _give_up(claims)


def _claim_pattern(token: str) -> str:
    return f".{LEASE_FILE}.{token}.claim"


def _claim_path(folder: Path, holder: Holder) -> Path:
    """The name of the claim on this holder's lease, whatever the lease says is its token."""
    return folder / _claim_pattern(hashlib.sha256(holder.token.encode()).hexdigest()[:32])


def _claim(folder: Path, holder: Holder | None, me: Holder) -> list[Path]:
    """The claim on this holder's lease, last, behind those of processes that died before they had made use of it.

    Empty where another process has it. See [Note: who may end a lease].
    """
    claims: list[Path] = []
    while holder is not None:
        path = _claim_path(folder, holder)
        if path in claims:
            raise LeaseError(f"{path} and {claims[-1]} name each other: remove them")
        claims.append(path)
        publish_text(path, me.to_json(), replace=False)
        found = look(folder, path.name)
        if found.holder is not None and found.holder.token == me.token:
            return claims
        if found.state is LeaseState.HELD and not found.is_ahead:  # nobody keeps a claim until a clock is set
            break
        holder = found.holder
    return []


def _give_up(claims: Iterable[Path]) -> None:
    for claim in claims:
        claim.unlink(missing_ok=True)


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
                ender = dataclasses.replace(self._me, token=secrets.token_hex(16))
                if claims := _claim(self._folder, self._me, ender):
                    if self._touch() == self._me:
                        os.unlink(self._folder / LEASE_FILE)
                    _give_up(claims)
        except OSError:
            return  # it grows stale
        finally:
            self._lock.release()

    def _touch(self) -> Holder | None:
        """Who holds the lease; a heartbeat where it is this run. Another's lease is never touched."""
        return read(self._folder / LEASE_FILE, renewed_by=self._me.token)[0]

    def _keep(self) -> None:
        while not self._released.wait(HEARTBEAT_S):
            try:
                self.check()
            except LeaseError as error:
                self._on_lost(error)
                return
            except OSError:
                continue  # a file system in trouble: the next beat or the next save meets it


def _uptime_s() -> float:
    """Runs on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
