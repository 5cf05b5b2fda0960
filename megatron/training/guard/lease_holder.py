"""Who holds a folder of checkpoints: the content of `lease.json`, and the judgement on it (floor 0). See lease.py."""

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
from pathlib import Path
from typing import NamedTuple

from megatron.core.dist_checkpointing.catalog import LEASE_FILE
from megatron.core.safe_files import open_regular
from megatron.core.schema import Place, check, fields_of, integer, or_null, text
from megatron.core.words import age, time_text

STALE_S = 60.0
_MAX_BYTES = 1 << 14

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
    return LeaseState.STALE if is_gone or age_s > STALE_S else LeaseState.HELD


class FoundLease(NamedTuple):
    """A folder's lease. age_s: since the newest heartbeat, which was at beat_s by the file system's clock."""

    state: LeaseState
    holder: Holder | None = None
    age_s: float = 0.0
    beat_s: float = 0.0

    @property
    def is_ahead(self) -> bool:
        """Whether its date says nothing: the clock was set back since the newest heartbeat."""
        return self.age_s < -STALE_S

    @property
    def heartbeat(self) -> str:
        return f"dated {time_text(-self.age_s, 2)} ahead of the clock" if self.is_ahead else age(self.age_s)


def look(folder: Path, name: str = LEASE_FILE) -> FoundLease:
    """What holds a folder, or the claim of this name. Raises OSError."""
    holder, beat_s = read(folder / name)
    if holder is None:
        return FoundLease(LeaseState.FREE)
    with tempfile.TemporaryFile(dir=folder) as probe:  # dated by the clock that dates the folder's files
        probe.write(b"\n")
        probe.flush()
        os.fsync(probe.fileno())
        age_s = os.fstat(probe.fileno()).st_mtime - beat_s
    state = judge(holder, age_s, machine=this_machine(), is_alive=holder.is_alive)
    return FoundLease(state, holder, age_s, beat_s)


def read(path: Path, renewed_by: str = "") -> tuple[Holder | None, float]:
    """The holder and its newest heartbeat; (None, 0) without a file. renewed_by: a token, whose lease gets a heartbeat.
    Raises OSError."""
    with contextlib.suppress(FileNotFoundError), open_regular(path) as fd:
        holder, beat_s = Holder.from_json(os.read(fd, _MAX_BYTES)), os.fstat(fd).st_mtime
        if renewed_by and holder.token == renewed_by:
            os.utime(fd)
        return holder, beat_s
    return None, 0.0
