"""A script of the checkout as `python script words` runs it, in a fork of this process: of what it imports, nothing is
imported anew, which takes a process of its own seconds."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.harness.launch import ROOT, become


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
