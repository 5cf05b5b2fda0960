"""The harness itself."""

import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.harness.launch import ROOT
from tests.slurm import leftovers
from tests.slurm.cluster import OURS, Cluster

ENTERED = """
import pathlib, sys, time
from tests.slurm.cluster import Cluster
with Cluster(pathlib.Path(sys.argv[1])):
    print("entered", flush=True)
    time.sleep(600)
"""


def of_slurm():
    """Files of the system that have to do with Slurm, and when each was written."""
    folders = map(Path, ("/etc", "/run", "/var"))
    paths = (path for folder in folders for path in folder.rglob("*") if re.search("slurm|munge", str(path)))
    return {path: path.lstat().st_mtime_ns for path in paths}


def broken_off(folder):
    """A cluster whose block raises while a job runs."""
    with Cluster(folder) as cluster:
        job = cluster.submit("--wrap=sleep 600", cwd=folder)
        cluster.until(lambda: cluster.processes(SLURM_JOB_ID=job.id), "the job runs")
        raise ZeroDivisionError


@pytest.mark.full
def test_an_exception_leaves_no_process_and_nothing_is_written_outside_the_folder(slurm):
    before, folder = of_slurm(), Path(tempfile.mkdtemp(prefix="slurm-"))
    folder.chmod(0o755)
    with pytest.raises(ZeroDivisionError):
        broken_off(folder)
    assert leftovers.processes([f"{OURS}={folder}"]) == []
    assert of_slurm() == before
    shutil.rmtree(folder)


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
