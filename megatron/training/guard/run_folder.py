"""Which folder a run writes to: `--save`, which it holds a lease on, else `runs/<UTC time>-<pid>` (floor 0).

One rank chooses and takes it once all ranks were compared, and the others hear of it; before that a run has no folder
and writes nothing. Without `--save` the folder is made when the first file is put into it.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron.training.config.launch_env import LaunchEnv
from megatron.training.guard.exit_status import ExitStatus, clear_exit_json
from megatron.training.guard.lease import Lease, LeaseError, take
from megatron.training.guard.lease_holder import Holder, LeaseState, look

RUNS = "runs"
DIRECTORY_MODE = 0o750  # outputs on shared clusters are not for everybody


class OutputPathError(ValueError):
    """A place that the flags name cannot be written."""


def fresh_folder(now: datetime.datetime, pid: int) -> Path:
    """The folder of a run without `--save`; names sort by time. now: in UTC."""
    return Path(RUNS) / f"{now:%Y%m%dT%H%M%S}.{now.microsecond // 1000:03d}Z-{pid}"


class RunFolder:
    """Of one run. path: None until `adopt`.

    on_lost: called in a side thread of the first rank once another run has taken the folder.
    """

    def __init__(self, save: str | None, on_lost: Callable[[LeaseError], None]) -> None:
        self.path: Path | None = None
        self._save, self._on_lost = save, on_lost
        self._token, self._is_refused = "", False
        self._lease: Lease | None = None

    def claim(self, env: LaunchEnv, say: Callable[[str], None]) -> dict[str, str]:
        """On the first rank: choose the folder, take it and remove a former run's exit.json. What all ranks `adopt`."""
        if self._save is None:
            path = fresh_folder(datetime.datetime.now(datetime.UTC), os.getpid())
            say(f" > run folder: {path}")
            return {"path": str(path), "token": ""}
        folder, me = Path(self._save), Holder.this_process(env.run_id, env.restart_count)
        try:
            folder.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
            take(folder, me, say)
            self._lease = Lease(folder, me, self._on_lost)
            clear_exit_json(folder)
        except LeaseError as error:
            return {"held": str(error)}
        except OSError as error:
            why = f"{error.filename or folder}: {error.strerror}"
            return {"unwritable": f"--save {folder}: {why}: name another folder"}
        return {"path": str(folder), "token": me.token}

    def adopt(self, claimed: Mapping[str, Any]) -> None:
        """On every rank. claimed: of the first one. Raises LeaseError and OutputPathError, on all alike."""
        self._is_refused = "held" in claimed
        if self._is_refused:
            raise LeaseError(claimed["held"])
        if "unwritable" in claimed:
            raise OutputPathError(claimed["unwritable"])
        self.path, self._token = Path(claimed["path"]), claimed["token"]

    def check(self) -> None:
        """Before anything in the folder is changed for good: raises LeaseError when it is another run's now, OSError.

        Only the first rank knows; elsewhere it passes.
        """
        if self._lease is not None:
            self._lease.check()

    def release(self) -> None:
        """Give the folder free: the run ends."""
        if self._lease is not None:
            self._lease.release()

    def for_exit_record(self, status: ExitStatus) -> Path | None:
        """Where exit.json of this end goes. None: a refused launch without --save writes nothing, and nobody writes
        into a folder that another run holds."""
        if self._save is not None:
            folder = Path(self._save)
            is_lost = self._is_refused or (self._lease is not None and self._lease.is_lost)
            return None if is_lost or is_held(folder, but_for=self._token) else folder
        is_new = self.path is not None and not self.path.exists()
        return None if is_new and status is ExitStatus.CONFIGURATION else self.path


def is_held(folder: Path, but_for: str = "") -> bool:
    """Whether a run holds a folder, other than the one of this token."""
    with contextlib.suppress(OSError):  # who writes there meets it
        found = look(folder)
        return found.state is LeaseState.HELD and found.holder is not None and found.holder.token != but_for
    return False
