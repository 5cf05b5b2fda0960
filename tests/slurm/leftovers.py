"""Ends what is left of a cluster once nobody holds the other end of standard input: also after a `kill -9` of pytest.

    python tests/slurm/leftovers.py TESTS_OF_SLURM=FOLDER

What is left are the processes whose environment has this variable, until there are none.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path


def processes(variables: Iterable[str]) -> list[int]:
    """Those whose environment has all of `NAME=VALUE`."""
    wanted, found = {variable.encode() for variable in variables}, []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if wanted <= set((entry / "environ").read_bytes().split(b"\0")):
                    found.append(int(entry.name))
    return found


if __name__ == "__main__":
    sys.stdin.read()
    while pids := processes(sys.argv[1:]):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
