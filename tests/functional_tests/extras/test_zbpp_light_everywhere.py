"""zbpp_light under every release of megatron-core: all cases of the proof, memory, zb_h1.patch, a user's walk."""

import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "extras" / "proof"), str(ROOT / "extras")]

import memory  # noqa: E402
import prove  # noqa: E402
import releases  # noqa: E402
from cases import EVERY, FOUR_RANKS, MEMORY, TWO_RANKS  # noqa: E402
from release_process import ReleaseProcess  # noqa: E402

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
PACKAGE = ROOT / "extras" / "zbpp_light"


def started(release):
    try:
        releases.path_of(release)
    except SystemExit as error:
        (pytest.fail if os.environ.get("CI") and os.getuid() == 0 else pytest.skip)(str(error))
    return ReleaseProcess(release)


@pytest.fixture(scope="module", params=releases.RELEASES)
def process(request):
    with started(request.param) as running:
        yield running


@pytest.mark.parametrize(
    "case", [*TWO_RANKS, *FOUR_RANKS], ids=lambda case: f"{case.ranks} ranks, {case.name}"
)
def test_twenty_steps_have_the_bits_of_1f1b(process, case, tmp_path):
    assert not prove.differences(case, process, prove.SCHEDULES, tmp_path)


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


def test_the_patch_has_the_bits_of_1f1b():
    with started(releases.NEWEST):
        pass
    assert [line for line, right in prove.prove_patch() if not right] == []


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
