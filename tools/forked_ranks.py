"""Ranks as forks of their launcher, which has imported torch and the trainer: each saves seconds of a core.

[Note: what a fork keeps] Of its launcher a rank keeps modules, nothing else: signals, files, sockets (the job's store
may be the launcher's, and has to be gone with it), the environment and what is to be done at the end are as in a new
Python. Where there is a GPU ranks are new processes, as CUDA's driver does not survive a fork.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import math
import multiprocessing
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.command import SCRIPTS
from megatron.training.guard import signals

TRAINER = "megatron.training.run.training"
DESCRIPTION = "torch.fx.experimental.symbolic_shapes"  # the first rank needs it for the model's
PYTHON = (sys.executable, "-u")  # what a rank's words begin with


def fork_ranks(script: str) -> None:
    """Ranks that torch's agent starts from now on are forks of this process, which imports the trainer now. script:
    what they will run; beside a `megatron` of its own it gets new processes."""
    home = Path(script).resolve().parent
    if script.endswith(".py") and home != SCRIPTS and (home / "megatron").exists():
        return
    for name in (TRAINER, DESCRIPTION):
        importlib.import_module(name)
    where = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
    handler = importlib.import_module(where).SubprocessHandler
    start = handler._popen

    def popen(self: Any, words: Sequence[str], variables: Mapping[str, str]) -> Any:
        if tuple(words[:2]) != PYTHON:  # bound to a part of the machine, by another program
            return start(self, words, variables)
        return ForkedRank(words[2:], variables, (self._stdout, self._stderr))

    handler._popen = popen


class ForkedRank:
    """As much of subprocess.Popen as torch's agent uses. words: a script and its flags, or -m, a module and its flags.
    streams: files for its output and errors; None: the launcher's."""

    def __init__(self, words: Sequence[str], variables: Mapping[str, str], streams: Sequence[Any]) -> None:
        rank = multiprocessing.get_context("fork").Process(target=_become, args=(words, variables, streams))
        rank.start()
        assert rank.pid is not None, f"{rank} has not started"
        self.pid, self._rank = rank.pid, rank

    def poll(self) -> int | None:
        """Its status, -n where signal n has ended it; None while it runs."""
        return self._rank.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired. It asks again and again: multiprocessing takes the pipe that a rank closes
        for its end, and would wait without a limit."""
        limit, pause = math.inf if timeout is None else timeout, 0.001
        begun = time.monotonic()
        while (status := self.poll()) is None:
            if time.monotonic() - begun >= limit:
                raise subprocess.TimeoutExpired(str(self._rank), limit)
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        return status


def _become(words: Sequence[str], variables: Mapping[str, str], streams: Sequence[Any]) -> None:
    """Run these words as a new Python would. See [Note: what a fork keeps]."""
    os.setsid()
    atexit._clear()
    signals.forget()
    for fd, stream in enumerate(streams, 1):
        if stream is not None:
            os.dup2(stream.fileno(), fd)
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2:
            with contextlib.suppress(OSError):  # the folder's own
                os.close(fd)
    for fd, name in ((1, "stdout"), (2, "stderr")):
        if (old := getattr(sys, name)) is not None:  # None: closed before the launcher began
            new = open(fd, "w", encoding=old.encoding, errors=old.errors, closefd=False)  # noqa: SIM115
            new.reconfigure(write_through=True)
            setattr(sys, name, new)
    os.environ.clear()
    os.environ.update(variables)
    gc.freeze()  # modules are not to be walked, nor their pages copied
    try:
        if words[0] == "-m":
            sys.argv = ["", *words[2:]]
            sys.path.insert(0, os.getcwd())
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(words)
            sys.path[0] = str(Path(words[0]).resolve().parent)
            runpy.run_path(words[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()
