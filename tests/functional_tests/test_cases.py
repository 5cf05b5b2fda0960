"""Every case of tests/functional_tests/cases, as `tools/functional_tests.py run` has it; a few in every suite."""

import functools
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.harness.launch import ROOT
from tests.slurm.leftovers import processes
from tools import functional_tests
from tools.cases.case import CASES

ALWAYS = ("toy", "schedule_zbv_validated")
NAMES = sorted(path.stem for path in CASES.glob("*.yaml"))


@pytest.mark.parametrize(
    "name", [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.grid) for name in NAMES]
)
def test_it_has_its_golden_values(name, capfd):
    assert functional_tests.main(["run", name]) == 0, capfd.readouterr()


def same_values_as_forked(name, folder, capfd, *launcher):
    """The case under forked ranks, and under another launcher beside their values."""
    golden = ["--golden", str(folder / "golden.json")]
    assert functional_tests.main(["record", name, *golden, "--dirty"]) == 0, capfd.readouterr()
    assert functional_tests.main(["run", name, *golden, "--launcher", *launcher]) == 0, capfd.readouterr()
    said = capfd.readouterr().out
    assert "ok   lm loss: every bit" in said
    assert "another image" not in said


IN_THE_GRID = ("schedule_zbv_validated", "resume")


@pytest.mark.timeout(600)  # ranks start Pythons of their own
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.grid if n in IN_THE_GRID else pytest.mark.full) for n in NAMES],
)
def test_torchrun_has_the_values_of_forked_ranks(name, tmp_path, capfd):
    same_values_as_forked(name, tmp_path, capfd, "torchrun")


def test_a_case_of_five_lines(tmp_path, capfd):
    """Written, recorded, and found again."""
    case = tmp_path / "mine.yaml"
    case.write_text(
        "EXTENDS: toy\nMODEL_ARGS:\n  --pipeline-model-parallel-size: 2\n"
        "  --train-iters: 3\n  --log-params-norm: false\n"
    )
    assert functional_tests.main(["record", str(case), "--dirty"]) == 0, capfd.readouterr()
    assert functional_tests.main(["run", str(case)]) == 0
    assert "ok   lm loss: every bit of 3 values" in capfd.readouterr().out


def interrupted(folder, *launcher, environ=os.environ):
    """Ctrl-C of the tool once its case trains: what is left of its processes."""
    case = folder / "endless.yaml"
    case.write_text(
        "EXTENDS: toy\nMODEL_ARGS:\n  --train-iters: 1000000\n  --save: ${CHECKPOINT_SAVE_PATH}\n"
        "  --save-interval: 1000000\n"
    )
    tool = ROOT / "tools" / "functional_tests.py"
    words = [
        sys.executable,
        tool,
        "record",
        case,
        "--dirty",
        "--launcher",
        *launcher,
        "--out",
        folder / "out",
    ]
    metrics = folder / "out" / "endless" / "checkpoints" / "metrics.jsonl"
    variables = {**environ, "OF_A_CASE": str(folder)}
    heard = functools.partial(
        signal.signal, signal.SIGINT, signal.SIG_DFL
    )  # which a suite in the background ignores
    with subprocess.Popen(words, env=variables, stderr=subprocess.PIPE, text=True, preexec_fn=heard) as run:
        while not metrics.exists() or "lm loss" not in metrics.read_text():
            assert run.poll() is None, run.stderr.read()
            time.sleep(0.05)
        run.send_signal(signal.SIGINT)
        said = run.communicate()[1]
    assert run.returncode == 128 + signal.SIGINT, said
    assert said.endswith("functional_tests.py: interrupted; the run is stopped\n")
    assert "Traceback" not in said
    return processes([f"OF_A_CASE={folder}"])


@pytest.mark.grid
@pytest.mark.parametrize("launcher", ["forked", "torchrun"])
def test_an_interrupted_tool_stops_its_run(tmp_path, launcher):
    assert interrupted(tmp_path, launcher) == []
