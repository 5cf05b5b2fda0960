"""Which process holds a folder, and whether it still does: the record in `lease.json`, judged (floor 0, pure but for
asking the system about a process). lease.py has the protocol."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import json
import os
import secrets
import socket
from pathlib import Path

STALE_S = 60.0


class State(enum.Enum):
    """The verdict on a lease."""

    FREE = "free"
    HELD = "held"
    STALE = "stale"


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
        now = datetime.datetime.now(datetime.UTC)
        return cls(
            token=secrets.token_hex(16),
            host=socket.gethostname(),
            pid=os.getpid(),
            machine=this_machine(),
            process_start=process_start(os.getpid()) or "",
            started=f"{now:%Y-%m-%d %H:%M:%S} UTC",
            run_id=None if run_id == "none" else run_id,  # what torchrun says where no id was given
            attempt=attempt,
        )

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


UNREADABLE = Holder("", "unknown", 0, "", "", "unknown (the file cannot be read as a lease)")


def judge(holder: Holder | None, age_s: float, *, machine: str, is_alive: bool) -> State:
    """The verdict on a lease (pure). age_s: since the newest heartbeat. machine: this one. is_alive: what this machine
    says of the holder's process, which counts only where it is the holder's machine."""
    if holder is None:
        return State.FREE
    if holder.machine and holder.machine == machine and not is_alive:
        return State.STALE
    return State.HELD if abs(age_s) <= STALE_S else State.STALE  # the clock itself may have been set back


def to_json(holder: Holder) -> str:
    """The text of `lease.json`."""
    return json.dumps(dataclasses.asdict(holder), indent=2) + "\n"


def from_json(data: bytes) -> Holder:
    """The holder that a file names, UNREADABLE where it names none."""
    try:
        found = Holder(**json.loads(data))
        texts = (found.token, found.host, found.machine, found.process_start, found.started)
        is_whole = all(text.isprintable() for text in texts) and 0 < found.pid < 1 << 31
    except (ValueError, TypeError, AttributeError, RecursionError):
        return UNREADABLE
    return found if is_whole else UNREADABLE


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
