"""examples/pretrain_zero_bubble.sh trains on CPU ranks, and zbv has the losses of 1F1B."""

from __future__ import annotations

import pytest

from tests.harness import launch
from tests.harness.scripts import launched_by

SCRIPT = launch.ROOT / "examples" / "pretrain_zero_bubble.sh"
SMALL = {
    "CPU": "1",
    "TRAIN_ITERS": "3",
    "LAYERS": "3",
    "HIDDEN_SIZE": "32",
    "SEQ_LENGTH": "32",
}


def trained(folder, **variables):
    """What the ranks say that the script starts."""
    data = ("--data-cache-path", launch.TINY[-1], "--allow-padding-num-layers")
    words, ranks = launched_by(SCRIPT, folder, *data, **SMALL, **variables)
    assert ranks == 2
    return launch.ok(launch.run_forked(words, ranks=ranks)).output


def losses(output):
    """iteration -> loss and norm, as printed."""
    return {m[1]: f"{m[3]} {m[4]}" for m in launch.ITERATION.finditer(output)}


@pytest.mark.grid
def test_zbv_trains_on_two_cpu_ranks_with_the_losses_of_1f1b(tmp_path):
    said = trained(tmp_path / "v", ZERO_BUBBLE_V_SCHEDULE="1")
    assert '"schedule": "zbv"' in said
    assert (tmp_path / "v" / "metrics.jsonl").exists()
    plain = trained(tmp_path / "plain")
    assert '"schedule": "1f1b"' in plain
    assert len(losses(said)) == 3
    assert losses(said) == losses(plain)
