"""How a run ends: the one table of exit statuses, `exit.json`, and the way from an exception to a status.

torchrun turns every failure into status 1, so the status is also written to `exit.json`, which a batch script reads to
decide whether to requeue.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from megatron.command import as_called
from megatron.core.safe_files import SHARED_MODE, publish_text, read_json
from megatron.core.schema import Place, check, fields_of, integer, or_null, words
from megatron.training.guard.console import complain, show_bar

EXIT_FILE = "exit.json"
MAX_BYTES = 1 << 20  # of exit.json; a reason may list many problems


class ExitStatus(enum.IntEnum):
    """Exit status of every rank, what it means (docs/exit_statuses.md has the same text), and whether the same command,
    started again, goes on with the run."""

    description: str
    requeue: bool

    def __new__(cls, value: int, description: str, requeue: bool = False) -> ExitStatus:
        member = int.__new__(cls, value)
        member._value_, member.description, member.requeue = value, description, requeue
        return member

    DONE = 0, "done; also when left by `--exit-interval` or `--exit-duration-in-mins`"
    BUG = 1, "an unexpected error: the traceback is printed, please report it"
    CONFIGURATION = 2, "configuration: flags, or ranks started with different configuration, code or torch"
    CHECKPOINT = (
        3,
        "checkpoint: missing, damaged or of another model; or one could not be written; or another run holds the "
        "folder of `--save`",
    )
    DATA = 4, "data: a corpus, tokenizer or index file is missing or damaged"
    NON_FINITE = (
        5,
        "a loss or gradient was NaN or infinite and `--nan-policy` says to stop; or weights were after an update or "
        "before a save, which no policy can go on from: they are never saved",
    )
    PEER_LOST = (
        6,
        "another rank was lost or hangs; the message names it, and in a pipeline the stage, iteration and operation in "
        "which it was missed; or the launcher or the store is gone",
        True,
    )
    RERUN_PERSISTENT = (
        16,
        "`--nan-policy rerun-once`: the step gives the same non-finite bits twice; checkpoint kept, resume on other "
        "machines to tell a bad device from a bad model",
        True,
    )
    RERUN_INVALID = (
        17,
        "a machine is not to be trusted: two different non-finite results under `--nan-policy rerun-once`, or "
        "different weights on replicas, found by `--check-weight-hash-across-dp-replicas-interval`",
    )
    STOPPED = (
        75,
        "stopped by a signal with a valid checkpoint, or with `--save` before training began: start again with the "
        "same command",
        True,
    )
    STOPPED_UNSAVED = 143, "stopped by a signal without `--save`: nothing to go on from"


REFUSALS = (ExitStatus.CONFIGURATION, ExitStatus.CHECKPOINT, ExitStatus.DATA)  # what was asked for cannot be


@dataclasses.dataclass(frozen=True)
class ExitRecord:
    """The content of `exit.json`.

    status: an ExitStatus, or 128 + n when a second signal n stopped a run that has no checkpoint.
    iteration: last completed iteration, None before training. checkpoint: newest valid checkpoint's folder, or None.
    requeue: whether the same command, started again, goes on with the run.
    """

    status: int
    reason: str
    iteration: int | None
    checkpoint: str | None
    rank: int
    requeue: bool

    @classmethod
    def of(cls, status: int, reason: str, *, rank: int, **how_far: Any) -> ExitRecord:
        """The record with the table's answer for `requeue`. how_far: iteration, checkpoint."""
        requeue = any(one == status and one.requeue for one in ExitStatus)
        return cls(status, reason, how_far.get("iteration"), how_far.get("checkpoint"), rank, requeue)


def _status(value: Any, place: Place) -> None:
    integer()(value, place)
    if value not in {*ExitStatus, *(128 + number for number in signal.valid_signals())}:
        place.fail("an exit status", value)


_OWN = {"status": _status, "reason": words, "iteration": or_null(integer()), "checkpoint": or_null(words)}
_SCHEMA = fields_of(ExitRecord, **_OWN)


class TrainingExit(Exception):  # noqa: N818 - an end, not an error
    """Raised where the loop decides to end the run early with a status that is not an error of a part."""

    def __init__(self, status: ExitStatus, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


def stopped_status(save: str | None) -> ExitStatus:
    """The status of a run that a signal stopped, once it is saved or before it began to train: with --save the same
    command goes on."""
    return ExitStatus.STOPPED_UNSAVED if save is None else ExitStatus.STOPPED


def clear_exit_json(directory: str | Path) -> None:
    """Remove a former run's `exit.json`: rank 0 at start-up, so that a run that is killed leaves none."""
    (Path(directory) / EXIT_FILE).unlink(missing_ok=True)


def write_exit_json(directory: str | Path, record: ExitRecord) -> Path:
    """Write `<directory>/exit.json` atomically and return its path. A link of that name is replaced, not followed.

    When a rank fails, its peers soon lose it. So a PEER_LOST record never replaces one that is there
    already: the file keeps the cause, whichever rank writes last.
    """
    target = Path(directory) / EXIT_FILE
    target.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**dataclasses.asdict(record), "status": int(record.status)}, indent=2)
    publish_text(target, text + "\n", mode=SHARED_MODE, replace=record.status != ExitStatus.PEER_LOST)
    return target


def leave_exit_json(
    status: int,
    reason: str,
    directory: str | Path | None = None,
    *,
    rank: int,
    launcher: str | None = None,
    **how_far: Any,
) -> None:
    """`write_exit_json` where it can be: a full disk must not hide how the run ended. directory: None writes none.
    launcher: the folder of a second one, `LaunchEnv.record_of_attempt`. how_far: as `ExitRecord.of`."""
    record = ExitRecord.of(status, reason, rank=rank, **how_far)
    for folder in (one for one in (directory, launcher) if one is not None):
        try:
            write_exit_json(folder, record)
        except OSError as problem:
            _tell(f"[rank {rank}] {EXIT_FILE} could not be written to {folder}: {problem}")


def tell_launcher(error_file: str | None, status: ExitStatus, text: str, *, printed: bool = False) -> bool:
    """Leave the text where torchrun looks (`LaunchEnv.error_file`): it then ends its own report with it. False where
    there is no such place. printed: this rank has said it too, for `tools/launch.py`, which says what was not.

    It takes the earliest failure of a machine for the cause, in whole seconds: a rank that knows a reason of its own is
    dated before those that have lost a peer or were ended by the launcher.
    """
    if error_file is not None:
        seconds = int(time.time()) - (status is not ExitStatus.PEER_LOST)
        extra = {"py_callstack": f"\n{text}", "timestamp": str(seconds), "printed": printed}
        with contextlib.suppress(OSError):
            publish_text(error_file, json.dumps({"message": {"message": text, "extraInfo": extra}}))
            return True
    return False


def read_exit_json(directory: str | Path) -> ExitRecord | None:
    """The record in `<directory>/exit.json`, or None without the file.

    Raises ValueError naming a damaged file, OSError.
    """
    path = Path(directory) / EXIT_FILE
    try:
        fields = read_json(path, max_bytes=MAX_BYTES)
        check(_SCHEMA, fields, Place(path))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{path} is not an exit record: {str(error).removeprefix(f'{path}: ')}") from None
    return ExitRecord(**fields)


StatusTable = Mapping[type[BaseException], ExitStatus]


def status_of(error: BaseException, table: StatusTable) -> ExitStatus:
    """The status for an exception. table: the error classes of the parts (ConfigurationError, DataError, ...).

    The most derived class wins. A TrainingExit carries its own; anything else is a bug.
    """
    if isinstance(error, TrainingExit):
        return error.status
    return next((table[cls] for cls in type(error).__mro__ if cls in table), ExitStatus.BUG)


def report_failure(
    error: BaseException,
    table: StatusTable,
    *,
    rank: int,
    diagnose: Callable[[], str] | None = None,
    error_file: str | None = None,
    launcher: str | None = None,
    **of_record: Any,
) -> ExitStatus:
    """Print the message of an exception (of bugs the traceback), write `exit.json`, tell the launcher, and return the
    status to exit with.

    diagnose: called when a peer was lost, for the sentence that names it (Watchdog.diagnose). launcher, of_record: see
    `leave_exit_json`; a launcher that reads records prints what refuses a run itself, once and last.
    """
    status, reason = status_of(error, table), as_called(str(error)) or type(error).__name__
    if status is ExitStatus.BUG:
        trace = "".join(traceback.format_exception(error)).rstrip("\n")
        told = f"[rank {rank}] internal error, exit status {int(status)}:\n{trace}"
    else:
        kind = status.name.lower().replace("_", " ")
        is_stop = status in (ExitStatus.STOPPED, ExitStatus.STOPPED_UNSAVED)
        what = "stopped (" if is_stop else f"error ({kind}, "
        told = f"[rank {rank}] {what}exit status {int(status)}): {reason}"
    left = launcher is not None and status in REFUSALS and tell_launcher(error_file, status, told)
    if not left:
        _tell(told)
    if status is ExitStatus.PEER_LOST and diagnose is not None:
        found = diagnose()
        _tell(f"[rank {rank}] {found}")
        told += f"\n[rank {rank}] {found}"
        reason = f"{found}; {reason}"  # who is to blame, then where it was missed
    if not left:
        tell_launcher(error_file, status, told, printed=True)
    leave_exit_json(status, reason, rank=rank, launcher=launcher, **of_record)
    return status


def _tell(text: str) -> None:
    """Say it, if anybody hears: who read our streams may be gone, and the status has to be recorded all the same."""
    with contextlib.suppress(OSError):
        complain(text)


def second_signal(
    signum: int, directory: str | Path | None, *, rank: int, checkpoint: str | None, **of_record: Any
) -> int:
    """The end of a run by a second signal: says so, writes `exit.json`, and returns the status to stop with.

    75 if there is a valid checkpoint to go on from, else 128 + n. Runs in the side thread; must not block.
    """
    reason = f"second {signal.Signals(signum).name}: stopped at once, without saving"
    status = int(ExitStatus.STOPPED) if checkpoint else 128 + signum
    show_bar(None)
    with contextlib.suppress(OSError):  # the terminal may be gone
        os.write(2, f"[rank {rank}] {reason}; valid checkpoint: {checkpoint or 'none'}\n".encode())
    leave_exit_json(status, reason, directory, rank=rank, checkpoint=checkpoint, **of_record)
    return status


def hard_exit(status: int) -> NoReturn:
    """Leave now: no destructors, which could wait for a lost peer. Standard streams are flushed."""
    show_bar(None)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a closed pipe; nothing is left to say it on
            stream.flush()
    os._exit(int(status))
