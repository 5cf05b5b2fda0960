"""The scripts of examples/slurm, and `megatron-zero slurm`, which prints one."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.harness import launch
from tests.harness.launch import ROOT
from tests.slurm.cluster import Job
from tests.slurm.runs import FAULTY, FLAGS, ITERATIONS, VARIABLES, resumed_at, started, trained, undisturbed

SCRIPT_FLAGS = ("--nodes", "2", "--ranks-per-node", "1", "--script", FAULTY)


def test_what_a_run_was_started_with(slurm, tmp_path):
    """A stand-in for a container notes its words; names like TOKEN lose their values; each rank has a log."""
    noted = tmp_path / "words"
    container = tmp_path / "container"
    container.write_text(f'#!/usr/bin/env bash\nprintf "%s\\n" "$@" >> {noted}\nshift 2\nexec "$@"\n')
    container.chmod(0o755)
    secrets = {
        "HF_TOKEN": "hush-1",
        "My_Secret_2": "hush-2\nhush-3",
        "INDEX": "https://me:hush-4@host/simple",
    }
    env = {**secrets, "HARMLESS": "told", "CONTAINER": f"{container} exec image.sif"}
    job = started(slurm, tmp_path, env=env)
    job.wait()
    assert trained(tmp_path / "ck") == undisturbed()
    words = noted.read_text().splitlines()
    assert words.count("image.sif") == 2
    assert words[:4] == ["exec", "image.sif", "megatron-zero", "launch"]
    assert words[words.index("--master-addr") + 1] == "127.0.0.1"  # of n1, a name that nobody knows
    (attempt,) = (tmp_path / "ck" / f"slurm-{job.id}").iterdir()
    captured = (attempt / "environment.txt").read_text()
    assert "hush" not in captured
    assert {"HF_TOKEN=(left out)", "HARMLESS=told", f"SLURM_JOB_ID={job.id}"} <= set(captured.splitlines())
    assert re.match(r"commit: .*\nrequirements.lock: ", captured)
    logs = {path.relative_to(attempt).parts[0]: path.read_text() for path in attempt.rglob("stdout.log")}
    assert "saving checkpoint" in logs["node-0"]
    assert f"iteration       {ITERATIONS}/" in logs["node-1"]


def test_an_array_of_three(slurm, tmp_path):
    """Each task trains with the flags of its line, in its own folder, as a run of these flags does."""
    lines = ["--seed 7", "--seed 8  --lr '1e-3'", "--seed 9"]
    (tmp_path / "sweep.txt").write_text("\n".join(lines))
    options = {
        "script": "examples/slurm/array.sbatch",
        "before": ("sweep.txt", "all"),
        "nodes": 1,
        "ranks_per_node": 2,
    }
    job = started(slurm, tmp_path, array="1-3", **options)
    slurm.until(lambda: not slurm.commands("squeue", "-h"), "all tasks have ended")
    for task, line in enumerate(lines, 1):
        assert trained(tmp_path / "all" / f"task-{task}") == undisturbed(2, *line.replace("'", "").split())
    missing = started(slurm, tmp_path, array="4", **options)
    slurm.until(lambda: not slurm.commands("squeue", "-h"), "it has ended")
    said = "".join(path.read_text() for path in slurm.folder.glob(f"sweep-{missing.id}*.log"))
    assert "sweep.txt has no line 4: ask for --array 1-3" in said
    assert job.id != missing.id


@pytest.mark.full
def test_a_chain_of_windows(slurm, tmp_path):
    """Three, or more on a busy machine: each ends in time and saves, and the next one goes on; the one in which the run
    is done calls the next off."""
    # A minute has seven iterations of eight seconds at most.
    env = {"WINDOWS": "9", "WINDOW_MINUTES": "1"}
    job = started(slurm, tmp_path, "--slow-s", "4", script="examples/slurm/chain.sbatch", env=env)
    job.wait_for("8 windows more, the next is job")
    slurm.until(lambda: not slurm.commands("squeue", "-h"), "the chain has ended", 900)
    assert trained(tmp_path / "ck") == undisturbed()
    windows = sorted(int(path.name[6:]) for path in (tmp_path / "ck").glob("slurm-*"))
    assert 3 <= len(windows) < 9
    logs = [job.log, *((tmp_path / f"chain-{window}.log").read_text() for window in windows[1:])]
    assert all("exiting program after 1 minutes" in log for log in logs[:-1])
    assert [len(resumed_at(log)) for log in logs] == [0, *[1] * (len(windows) - 1)]
    assert "the run is done, job" in logs[-1]
    assert Job(slurm, windows[-1] + 1).shown["JobState"] == "CANCELLED"


def printed(*words, cwd, env=None):
    """(status, output, errors) of tools/slurm.py."""
    command = [sys.executable, ROOT / "tools" / "slurm.py", *map(str, words)]
    variables = {**(env or os.environ), **VARIABLES}
    done = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def test_a_printed_script_runs_and_its_status_is_the_runs(slurm, tmp_path):
    words = [*SCRIPT_FLAGS, "--output", slurm.folder / "%x-%j.log", "--wait", "--submit", "--time=10", "--"]
    where = {"cwd": tmp_path, "env": slurm.env}
    status, output, errors = printed(*words, *FLAGS, "--exit-interval", "4", "--save", "ck", **where)
    assert status == 0, errors
    assert "#SBATCH --time=10" in output.splitlines()
    assert launch.exit_record(tmp_path / "ck")["iteration"] == 4
    status, _, errors = printed(*words, *FLAGS, "--inject-nan-iteration", "6", "--save", "ck", **where)
    assert status == launch.exit_record(tmp_path / "ck")["status"] == 5, errors
    log = max(slurm.folder.glob("megatron-zero-*.log"), key=lambda path: path.stat().st_mtime)
    assert resumed_at(log.read_text()) == [4]


@pytest.mark.parametrize(
    ("flags", "words", "line"),
    [
        (("--partition", "nowhere"), "invalid partition specified: nowhere", "#SBATCH --partition=nowhere"),
        (("-p", "high", "--time=3:00:00"), "Requested time limit is invalid", "#SBATCH --time=3:00:00"),
        (("--nodes=3", "--ranks-per-node=2"), "node", "#SBATCH --nodes=3"),
        (("--no-such-flag",), "unrecognized option", "#SBATCH --no-such-flag"),
    ],
    ids=["partition", "time limit", "nodes", "flag"],
)
def test_what_slurm_refuses_is_told_in_its_words_and_with_the_line(slurm, tmp_path, flags, words, line):
    flags = [*flags, "--script", FAULTY, "--submit", "--"]
    status, output, errors = printed(*flags, *FLAGS, "--save", "ck", cwd=tmp_path, env=slurm.env)
    assert status == 2
    assert "Slurm refuses the job: " in errors
    assert words in errors
    number = output.splitlines().index(line) + 1
    assert f"  line {number}: {line}" in errors.splitlines()
    assert not slurm.commands("squeue", "-h")


@pytest.mark.full
def test_the_last_save_against_the_lead_of_the_signal(slurm, tmp_path):
    """A save that takes longer than Slurm's signal leaves is told of before it is needed."""
    (tmp_path / "ck").mkdir()
    save = {"event": "checkpoint", "iteration": 1, "time": 1.0, "path": "ck/iter_0000001", "seconds": 300.5}
    (tmp_path / "ck" / "metrics.jsonl").write_text(json.dumps(save) + "\n")
    job = started(slurm, tmp_path)
    job.wait()
    assert (
        "WARNING: the last save took 300 s, and Slurm's signal comes 300 s before the time limit" in job.log
    )
