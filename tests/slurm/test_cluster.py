"""The harness itself."""

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.harness.launch import ROOT
from tests.slurm import leftovers
from tests.slurm.cluster import OURS

ENTERED = """
import pathlib, sys, time
from tests.slurm.cluster import Cluster
with Cluster(pathlib.Path(sys.argv[1])):
    print("entered", flush=True)
    time.sleep(600)
"""


def test_a_killed_pytest_leaves_no_process(slurm):
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    folder.chmod(0o755)
    words = [sys.executable, "-c", ENTERED, folder]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT) as run:
        assert run.stdout.readline() == "entered\n"
        assert len(leftovers.processes([f"{OURS}={folder}"])) >= 4
        run.kill()
    deadline = time.monotonic() + 60
    while (left := leftovers.processes([f"{OURS}={folder}"])) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []
    shutil.rmtree(folder)
