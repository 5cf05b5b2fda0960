"""Scripts of the checkout without a Python of their own, which imports for seconds: `python script words` in a fork of
this process, and what a launch script of an example starts."""

from __future__ import annotations

import importlib
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.harness.launch import GPT, ROOT, become


def run_script(script: str, *words: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """What it prints on each stream, and its status. script: below ROOT."""
    importlib.import_module(script.removesuffix(".py").replace("/", "."))
    argv = [str(ROOT / script), *map(str, words)]
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryDirectory(prefix="script-") as folder:
        told = [Path(folder) / name for name in ("stdout", "stderr")]
        for file in told:
            file.touch()
        pid = os.fork()
        if pid == 0:
            become(argv, told[0], cwd, {}, errors=told[1])
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return subprocess.CompletedProcess(argv, status, *(file.read_text() for file in told))


def launched_by(script: Path, folder: Path, *flags: str, **variables: str) -> tuple[list[str], int]:
    """(the trainer's flags, ranks) with which a launch script starts torchrun, which must be what it says."""
    python = folder / "python"
    folder.mkdir(exist_ok=True)
    python.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    python.chmod(0o755)
    env = {**os.environ, "PYTHON": str(python), "RUN_DIR": str(folder), **variables}
    words = ["bash", str(script), *flags]
    done = subprocess.run(words, capture_output=True, text=True, env=env, timeout=30, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    said, *started = done.stdout.splitlines()
    assert shlex.split(said) == [str(python), *started]
    assert started[:2] == ["-m", "torch.distributed.run"]
    at = started.index(GPT)
    return started[at + 1 :], int(started[started.index("--nproc-per-node", 0, at) + 1])
