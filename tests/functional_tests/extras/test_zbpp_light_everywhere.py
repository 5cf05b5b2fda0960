"""zbpp_light under every release of megatron-core: all cases of the proof, memory, zb_h1.patch, a user's walk."""

import dataclasses
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import venv
from pathlib import Path

import pytest

from tests.wheels.environments import ROOT
from tests.wheels.release_processes import releases, started  # isort: split

import memory
import prove
import release_process
from cases import EVERY, FOUR_RANKS, MEMORY, TWO_RANKS

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
PACKAGE = ROOT / "extras" / "zbpp_light"


@pytest.fixture(scope="module", params=releases.RELEASES)
def process(request):
    with started(request.param) as running:
        yield running


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where plans are saved, once for all cases that are as large."""
    return tmp_path_factory.mktemp("plans")


@pytest.mark.parametrize(
    "case", [*TWO_RANKS, *FOUR_RANKS], ids=lambda case: f"{case.ranks} ranks, {case.name}"
)
def test_twenty_steps_have_the_bits_of_1f1b(process, case, folder):
    assert not prove.differences(case, process, prove.SCHEDULES, folder)


def test_every_plan_of_a_line_of_stages(tmp_path):
    case = EVERY["four stages"]
    with started(releases.AT_EACH_CI[-1]) as running:
        assert not prove.differences(case, running, ("1f1b", "zb-h2", "gpipe"), tmp_path)


@pytest.mark.parametrize("release", [releases.AT_EACH_CI[-1], releases.NEWEST])
def test_live_bytes_are_those_of_1f1b_and_of_the_plan(release):
    """The most of any rank: zb-h1 at most 1.05 of 1F1B's; a plan at most 1.05 of what it was simulated with, a stage's
    activations taken from 1F1B, whose first stage holds as many as there are stages."""
    with started(release) as running:
        found = memory.measure(running)
    of_1f1b = max(found["1f1b"].measured)
    assert max(found["zb-h1"].measured) <= 1.05 * of_1f1b, found
    activation = of_1f1b / MEMORY.pipeline
    for name in memory.PLANS:
        for measured, units in zip(found[name].measured, found[name].simulated, strict=True):
            assert measured <= 1.05 * units * activation, (name, found[name], activation)


@pytest.mark.parametrize("layers_a_stage", [1, 2, 4])
def test_live_bytes_of_zb_h1_with_few_layers(layers_a_stage):
    """Where messages weigh most. What is kept until W of microbatches that are through must not be their graphs."""
    case = dataclasses.replace(MEMORY, layers=layers_a_stage * MEMORY.pipeline)
    with started(releases.AT_EACH_CI[-1]) as running:
        of_1f1b, of_zb_h1 = (
            max(rank["peak_bytes"] for rank in ranks)
            for ranks in running.records(case, [None, {"schedule": "zb-h1"}], memory=True)
        )
    assert of_zb_h1 <= 1.05 * of_1f1b


def test_the_patch_has_the_bits_of_1f1b():
    with started(releases.NEWEST):
        pass
    assert [line for line, right in prove.prove_patch() if not right] == []


def test_the_patch_is_as_short_as_docs_say():
    from apply_patch import PATCH

    lines = PATCH.read_text().splitlines()
    changed = [
        line
        for line in lines
        if line[:1] in ("+", "-") and line[:3] not in ("+++", "---") and line[1:].strip()
    ]
    assert f"{len(changed)} changed lines" in (ROOT / "docs" / "megatron_compat.md").read_text()


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("ends", ["torchrun is terminated", "a rank is killed", "forward_step raises"])
def test_a_run_that_ends_in_a_step_leaves_no_process(ends, tmp_path):
    """Under torchrun, with the last rank in its second forward and the first waiting for it."""
    with started(releases.AT_EACH_CI[-1]):
        variables = release_process.environment(releases.AT_EACH_CI[-1])
    folders = (variables["PYTHONPATH"], PACKAGE / "examples")
    variables["PYTHONPATH"] = os.pathsep.join(map(str, folders))
    what = "raise" if ends == "forward_step raises" else "sleep"
    python = [sys.executable, "-S"]  # as release_process.py says
    words = [
        *python,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "--no-python",
        *python,
    ]
    script = str(ROOT / "tests" / "wheels" / "zbpp_light_in_a_step.py")
    with (tmp_path / "errors").open("w+") as errors:
        run = subprocess.Popen(
            [*words, script, what],
            env=variables,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        said = list(itertools.takewhile(lambda line: line != "in a step\n", run.stdout))
        ranks = [int(line.split()[2]) for line in sorted(said) if line.startswith("rank ")]
        assert len(ranks) == 2, "".join(said) + (tmp_path / "errors").read_text()
        if ends == "torchrun is terminated":
            run.terminate()
        elif ends == "a rank is killed":
            os.kill(ranks[-1], signal.SIGKILL)
        assert run.wait(timeout=90) != 0
        run.stdout.close()
        deadline = time.monotonic() + 10
        while any(map(is_alive, ranks)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not [pid for pid in ranks if is_alive(pid)]
        if what == "raise":
            said = (tmp_path / "errors").read_text()
            assert "ArithmeticError: planted in forward_step" in said
            assert "zbpp_light_in_a_step.py" in said


def blocks(page, language):
    """Contents of a page's code blocks."""
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def test_a_users_walk(tmp_path):
    """README's lines as printed, in an environment that has torch and nothing of ours."""
    import torch

    environment = tmp_path / "venv"
    venv.create(environment, with_pip=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    shutil.copytree(PACKAGE, tmp_path / "extras" / "zbpp_light")  # pip builds in the folder
    (packages / "torch.pth").write_text(str(Path(torch.__file__).resolve().parents[1]))
    install, run = blocks(PACKAGE / "README.md", "bash")[:2]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    variables |= {"PATH": f"{environment / 'bin'}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    for lines in (install, run):
        lines = lines.replace(
            "torchrun", "python -m torch.distributed.run"
        )  # a script that belongs to the lender
        done = subprocess.run(
            ["bash", "-e", "-c", lines],
            cwd=tmp_path,
            env=variables,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    losses = {
        line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if line[:4] in ("1F1B", "ZB-H")
    }
    assert len(losses["1F1B"]) == 5
    assert losses["ZB-H1"] == losses["1F1B"]
    assert "zbpp_light: zb-h1, 2 stages, 6 microbatches, planned bubble " in done.stdout
    (lines,) = blocks(PACKAGE / "README.md", "python")[:1]
    assert "zbpp_light.patch_megatron()" in lines
    compile(lines, "README.md", "exec")
