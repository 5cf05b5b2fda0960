"""Functional cases started by Slurm on two nodes have the values of forked ranks, bit for bit."""

import subprocess
import sys

import pytest

from tests.harness.launch import ROOT


@pytest.mark.parametrize(
    "name",
    [
        "schedule_zbv_validated",
        *(pytest.param(n, marks=pytest.mark.full) for n in ("resume", "gpt3_tp2_pp2")),
    ],
)
def test_values_are_those_of_forked_ranks(slurm, tmp_path, name):
    golden = ["--golden", str(tmp_path / "golden.json")]
    recorded = run("record", name, *golden, "--dirty")
    assert recorded.returncode == 0, recorded.stdout + recorded.stderr
    done = run("run", name, *golden, "--launcher", "slurm", "--nodes", "2", env=slurm.env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ok   lm loss: every bit" in done.stdout


def run(*words, env=None):
    tool = [sys.executable, str(ROOT / "tools" / "functional_tests.py")]
    return subprocess.run([*tool, *words], env=env, capture_output=True, text=True)
