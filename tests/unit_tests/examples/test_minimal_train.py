"""examples/minimal/train.py does what it says: it learns, and ranks share the same run."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from megatron.core.device import Device
from megatron.core.transport.parallel_state import single_process
from tests.harness import launch
from tests.harness.ranks import run_ranks

SCRIPT = Path(__file__).parents[3] / "examples" / "minimal" / "train.py"


def load(steps):
    """The example as a module, shortened."""
    spec = importlib.util.spec_from_file_location("minimal_train", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.STEPS = steps
    return module


def test_learns():
    losses = load(steps=12).train(single_process(Device("cpu")))
    assert len(losses) == 12
    assert losses[0] == pytest.approx(5.5, abs=0.3)  # ln 256: nothing learnt yet
    assert losses[-1] < 0.7 * losses[0]


def test_two_ranks_have_the_losses_of_one():
    alone = load(steps=4).train(single_process(Device("cpu")))
    by_rank = run_ranks(lambda ctx: load(steps=4).train(ctx.ps), 2)
    assert by_rank[0] == by_rank[1]
    assert by_rank[0] == pytest.approx(alone, rel=1e-5)


def test_runs_as_a_script_and_is_one_page(tmp_path):
    text = SCRIPT.read_text()
    assert len(text.splitlines()) < 100
    short = text.replace(" = 40, 8, 2,", " = 1, 8, 2,")
    assert short != text
    (tmp_path / "short.py").write_text(short)
    done = launch.ok(launch.run_forked([], script=str(tmp_path / "short.py"), cwd=tmp_path))
    assert "step   0 | loss " in done.output
