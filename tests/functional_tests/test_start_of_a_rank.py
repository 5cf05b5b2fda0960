"""What a rank imports before its first step ends: seconds of CPU at every start of every rank."""

import subprocess
import sys

import pytest

from tests.harness import launch

SLOW = (
    "sympy",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor",
)
RUN = f"""
import runpy, sys
try:
    runpy.run_path({launch.GPT!r}, run_name="__main__")
finally:
    print("slow:", [name for name in {SLOW} if name in sys.modules])
"""


@pytest.mark.grid
def test_a_run_that_neither_saves_nor_loads_imports_nothing_slow(tmp_path):
    """A Python of its own: the suite's forks have imported everything already."""
    flags = [*launch.TINY, "--train-iters", "1", "--metrics-file", str(tmp_path / "metrics.jsonl")]
    done = subprocess.run(
        [sys.executable, "-c", RUN, *flags], cwd=launch.ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "iteration        1/       1" in done.stdout
    assert done.stdout.endswith("slow: []\n")
