"""examples/pretrain_zero_bubble.sh trains on CPU ranks, and zbv has the losses of 1F1B."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

from tests.harness import launch

SCRIPT = launch.ROOT / "examples" / "pretrain_zero_bubble.sh"
SMALL = {
    "CPU": "1",
    "TRAIN_ITERS": "3",
    "LAYERS": "3",
    "HIDDEN_SIZE": "32",
    "SEQ_LENGTH": "32",
}


def script(folder, **variables):
    """What the script says."""
    here = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHON": sys.executable, "RUN_DIR": str(folder)}
    words = ["bash", str(SCRIPT), "--data-cache-path", launch.TINY[-1], "--allow-padding-num-layers"]
    done = subprocess.run(
        words, capture_output=True, text=True, env={**here, **SMALL, **variables}, timeout=150
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(output):
    """iteration -> loss and norm, as printed."""
    return {m[1]: f"{m[3]} {m[4]}" for m in launch.ITERATION.finditer(output)}


def test_zbv_trains_on_two_cpu_ranks_with_the_losses_of_1f1b(tmp_path):
    said = script(tmp_path / "v", ZERO_BUBBLE_V_SCHEDULE="1")
    assert '"schedule": "zbv"' in said
    assert (tmp_path / "v" / "metrics.jsonl").exists()
    command = shlex.split(script(tmp_path / "plain", DRY_RUN="1"))
    words = command[command.index(launch.GPT) + 1 :]
    plain = launch.ok(launch.run_forked(words, ranks=2)).output
    assert '"schedule": "1f1b"' in plain
    assert len(losses(said)) == 3
    assert losses(said) == losses(plain)
