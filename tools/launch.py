#!/usr/bin/env python3
"""Start the ranks of a run on this machine, as torchrun does, and end with the run's own status and a last word on it.

    megatron-zero launch --nproc-per-node 4 -- train --num-layers 8 ...

Ranks are started, watched, restarted and stopped by torch's elastic agent, with torchrun's flags. What differs is what
one sees: refusals are said once, and last; a run that was stopped ends with where it was saved; the exit status is the
run's, as in its exit.json. SIGUSR1 is handed on like SIGTERM.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import re
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.command import NAME, SCRIPTS, called_as, program
from megatron.training.guard.signals import STOP_SIGNALS, StopRequested, end_at_once

if __name__ == "__main__" or called_as(sys.argv[0]):
    # What stops a run waits until somebody can say its last words: modules are imported until then.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
from megatron.training.config.command_line import last_value, read_command_line
from megatron.training.config.launch_env import LAUNCH_RECORD, LaunchEnv
from megatron.training.guard.exit_status import ExitRecord, ExitStatus, read_exit_json
from megatron.training.run.arguments import last_words
from tools.commands import COMMANDS
from tools.forked_ranks import fork_ranks
from tools.lost_ranks import restart_lost_ranks

STARTS_SCRIPTS = (
    "-m",
    "--module",
    "--no-python",
    "--run-path",
)  # of torchrun's flags; here a command is started
RESTART_LOST = "--restart-lost-ranks"  # this launcher's own
USAGE = f"{NAME} launch --nproc-per-node 2 -- train FLAGS"
FLAGS = {
    "--nproc-per-node N": "ranks of this machine; gpu: as many as it has GPUs",
    "--nnodes N": "machines; each of them runs this line",
    "--node-rank N": "which of them this one is, 0 to N - 1",
    "--master-addr HOST": "of machine 0",
    "--master-port PORT": "a free one of machine 0",
    "--rdzv-backend c10d": "or, instead of the three above: machines find their numbers by themselves",
    "--rdzv-endpoint HOST:PORT": "where they meet",
    "--rdzv-id NAME": "of the job",
    "--max-restarts N": "starts all ranks again, so often, when one has failed",
    RESTART_LOST: "starts all ranks again when some are lost, if there is a new checkpoint since they began",
    "--shutdown-timeout S": "what ranks have for saving after a signal; 30 unless given",
}
LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"


class LaunchError(ValueError):
    """The ranks cannot be started as asked."""


def main() -> int:
    """The status of the run."""
    try:
        return launch(sys.argv[1:])
    except LaunchError as error:
        tell(f"{program('launch.py')}: {error}")
        return int(ExitStatus.CONFIGURATION)
    except KeyboardInterrupt:  # before torch's agent listens to signals
        return ended_early(signal.SIGINT)


def launch(words: Sequence[str]) -> int:
    """Start ranks, wait for them, and say how the run ended. words: torchrun's flags, `--`, a command and its flags.
    Raises LaunchError."""
    flags, command = split(words)
    if not words or {"-h", "--help"} & set(flags):
        print(page(), file=sys.stdout if words else sys.stderr)
        return 0 if words else int(ExitStatus.CONFIGURATION)
    started = called(command)
    save = last_value(command, "--save")
    goes_on = folder_that_goes_on(command) if RESTART_LOST in flags else None
    end_at_once(functools.partial(last_words, LaunchEnv(), save))  # until torch's agent listens
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    with cpp_logs_off():
        from torch.distributed import run as torchrun
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    quiet_agent()
    if not LaunchEnv().gpu_present():
        fork_ranks(started[0])
    if goes_on is not None:
        restart_lost_ranks(goes_on)
        flags = [f"--max-restarts={sys.maxsize}", *(flag for flag in flags if flag != RESTART_LOST)]
    args = torchrun.get_args_parser().parse_args([*flags, "--no-python", sys.executable, "-u", *started])
    args.signals_to_handle = ",".join(dict.fromkeys([*args.signals_to_handle.split(","), "SIGUSR1"]))
    if args.nproc_per_node != "1":
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun, which prints a page about it
    with tempfile.TemporaryDirectory(prefix="launch-") as folder:
        os.environ[LAUNCH_RECORD] = folder
        try:
            torchrun.run(args)
            return said(newest_record(folder), command, 0)
        except ChildFailedError as error:
            record, (rank, failure) = newest_record(folder), error.get_first_failure()
            if failure.exitcode < 0:
                tell(f"rank {rank} (pid {failure.pid}) was ended by {failure.signal_name()}")
            tell(words_left(failure.error_file_data))
            return said(record, command, failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode)
        except SignalException as stopped:
            record = newest_record(folder)
            return (
                ended_early(stopped.sigval, save) if record is None else said(record, command, record.status)
            )
        except (RuntimeError, ValueError, AssertionError, OSError) as error:
            raise LaunchError(unstartable(args, error)) from None


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """torchrun's flags, and the command with its own. Raises LaunchError."""
    at = words.index("--") if "--" in words else len(words)
    flags, command = list(words[:at]), list(words[at + 1 :])
    if taken := [flag for flag in flags if flag.replace("_", "-") in STARTS_SCRIPTS]:
        raise LaunchError(f"{taken[0]} starts other programs: leave it out, or start them with torchrun")
    if words and not command and not {"-h", "--help"} & set(flags):
        raise LaunchError(f"what is to be started stands behind a --: {USAGE}")
    return flags, command


def page() -> str:
    """The page of --help."""
    about = (__doc__ or "").split("\n\n")
    rows = (f"  {flag:<26}{meaning}" for flag, meaning in FLAGS.items())
    usage = (
        f"usage: {program('launch.py') if not called_as(sys.argv[0]) else sys.argv[0]} [flags] -- train FLAGS"
    )
    return "\n".join(
        [usage, "", about[0], "", *rows, "", about[2].strip(), "", "`torchrun --help` has its other flags."]
    )


def called(command: Sequence[str]) -> list[str]:
    """Python's words that run a command as this program was run; a script of the user's own as it is."""
    name = next((" ".join(command[:n]) for n in (2, 1) if " ".join(command[:n]) in COMMANDS), None)
    if name is None:
        if command[0].endswith(".py") and os.path.isfile(command[0]):
            return list(command)
        raise LaunchError(f"{command[0]!r:.60} is neither a command nor a script of Python: {USAGE}")
    typed = called_as(sys.argv[0])
    if typed == NAME:
        return [sys.orig_argv[1], *command]
    if typed:
        return ["-m", "megatron", *command]
    script, _, flags = COMMANDS[name]
    return [str(SCRIPTS / script), *flags, *command[len(name.split()) :]]


def folder_that_goes_on(command: Sequence[str]) -> Path:
    """That of --save, which the same command goes on from. Raises LaunchError."""
    save = last_value(command, "--save")
    if save is None or save != last_value(command, "--load"):
        raise LaunchError(f"{RESTART_LOST} goes on from what is saved: --save and --load name one folder")
    return Path(save)


@contextlib.contextmanager
def cpp_logs_off() -> Iterator[None]:
    """torch's C++ reads its level as it is imported, and would print frames about a port that is taken; ranks get the
    user's level."""
    before = os.environ.get(LOG_LEVEL)
    os.environ[LOG_LEVEL] = before or "FATAL"
    try:
        yield
    finally:
        if before is None:
            del os.environ[LOG_LEVEL]


def quiet_agent() -> None:
    """The agent logs what is said here in fewer words, and a stack for each signal."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.distributed.launcher")):
            logging.getLogger(name).disabled = True


# --- how it ended


def newest_record(folder: str) -> ExitRecord | None:
    """What the ranks of this machine have left of the last attempt that got so far."""
    attempts = sorted(Path(folder).iterdir(), key=lambda path: int(path.name))
    return read_exit_json(attempts[-1]) if attempts else None


def said(record: ExitRecord | None, command: Sequence[str], status: int) -> int:
    """The status of the run, once its last line is said. status: of the process, where no record says another."""
    if record is None:
        return status
    tell(last_line(record, command))
    return int(record.status)


def tell(text: str | None) -> None:
    """Something to say, where there is."""
    if text:
        print(text, file=sys.stderr, flush=True)


def last_line(record: ExitRecord, command: Sequence[str]) -> str | None:
    """What to do next; None where nothing is to be said. command: with its flags."""
    if record.status == ExitStatus.DONE or (record.iteration is None and not record.requeue):
        return None
    where = f"iteration {record.iteration}" if record.iteration is not None else "no iteration yet"
    if record.checkpoint is None:
        again = "; the same line starts again" if record.requeue else ""
        return f"ended at {where}, nothing is saved{again} (exit status {record.status})"
    loads = "--load" in command or read_command_line(command[1:]).values.get("load") is not None
    goes_on = (
        "the same line resumes"
        if loads
        else f"the same line with --load {Path(record.checkpoint).parent} resumes"
    )
    if record.status == ExitStatus.STOPPED:
        return f"saved at {saved_iteration(record)} ({record.checkpoint}), {goes_on}"
    newest = f"the newest checkpoint is of {saved_iteration(record)} ({record.checkpoint})"
    goes_on = f", {goes_on}" if record.requeue else ""
    return f"ended at {where} with exit status {record.status}; {newest}{goes_on}"


def saved_iteration(record: ExitRecord) -> str:
    found = re.search(r"iter_0*(\d+)$", record.checkpoint or "")
    return f"iteration {found[1] if found else record.iteration}"


def ended_early(number: int, save: str | None = None) -> int:
    """The status after a signal that came before there was a run that could leave a record of itself. save: where it
    would have been, which gets one."""
    if save is not None:
        return last_words(LaunchEnv(), save, StopRequested(signal.Signals(number).name))
    tell(f"stopped by {signal.Signals(number).name}: the ranks have left no record of a run")
    return 128 + int(number)


def words_left(data: Any) -> str:
    """What a rank has left to be said (`exit_status.tell_launcher`) and has not printed itself."""
    message = data.get("message") if isinstance(data, dict) else None
    if not isinstance(message, dict) or message.get("extraInfo", {}).get("printed"):
        return ""
    return str(message.get("message", ""))


def unstartable(args: Any, error: BaseException) -> str:
    """Why the agent could not begin, in one line."""
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    endpoint = args.rdzv_endpoint or f"{args.master_addr}:{args.master_port}"
    taken = "EADDRINUSE" in str(error) or getattr(error, "errno", None) == errno.EADDRINUSE
    if taken:
        return f"the port of {endpoint} is taken by another process on this machine: choose another --master-port"
    if "connection" in str(error).lower() or "timed out" in str(error).lower():
        return f"the ranks cannot meet at {endpoint}: {first}"
    return first


if __name__ == "__main__":
    sys.exit(main())
