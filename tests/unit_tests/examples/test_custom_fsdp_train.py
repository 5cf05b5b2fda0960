"""examples/custom_fsdp/train.py does what it says: a plain model, sharded, trains as on one process."""

from __future__ import annotations

import ast
import math
import re
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.harness import launch

SCRIPT = Path(__file__).parents[3] / "examples" / "custom_fsdp" / "train.py"


@pytest.mark.grid
def test_two_ranks_hold_halves_and_train_as_one_process(tmp_path):
    output = launch.ok(launch.run_forked([], script=str(SCRIPT), ranks=2, cwd=tmp_path)).output
    first, last, held, whole = re.search(
        r"loss ([\d.]+) -> ([\d.]+); ([\d,]+) of ([\d,]+) weights", output
    ).groups()
    assert float(last) < 0.8 * float(first)
    held, whole = (int(number.replace(",", "")) for number in (held, whole))
    assert 0.45 * whole < held < 0.55 * whole  # padding of each unit lies on the last rank
    weights = load_file(tmp_path / "runs" / "custom_fsdp" / "model.safetensors")
    assert sum(math.prod(weight.shape) for weight in weights.values()) == whole
    losses_off, weights_off = re.search(r"losses (\S+), weights (\S+)", output).groups()
    assert float(losses_off) < 1e-12
    assert float(weights_off) < 1e-10


def test_it_is_one_page_and_the_model_is_torchs_own():
    text = SCRIPT.read_text()
    assert len(text.splitlines()) < 80
    ours = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and node.module.startswith("megatron")
    ]
    assert [name.name for node in ours for name in node.names] == ["fully_shard"]
