"""examples/fsdp_zero_bubble/pretrain.sh trains on CPU ranks, with the losses of ZeRO-1 under 1F1B, and moves what it
planned."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

import pytest

from tests.harness import launch

SCRIPT = launch.ROOT / "examples" / "fsdp_zero_bubble" / "pretrain.sh"
README = SCRIPT.with_name("README.md")
SHORT = {"CPU": "1", "TRAIN_ITERS": "2", "LOG_INTERVAL": "1"}
COUNTED = ("gathers", "reductions", "moved-bytes")


def script(folder, **variables):
    """What the script says."""
    here = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHON": sys.executable, "RUN_DIR": str(folder)}
    done = subprocess.run(
        ["bash", str(SCRIPT), "--data-cache-path", launch.TINY[-1]],
        capture_output=True,
        text=True,
        env={**here, **SHORT, **variables},
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def words_of(folder, **variables):
    """The trainer's flags."""
    command = shlex.split(script(folder, DRY_RUN="1", **variables))
    return command[command.index(launch.GPT) + 1 :]


def losses(output):
    """iteration -> loss and norm, as printed."""
    return {m[1]: f"{m[3]} {m[4]}" for m in launch.ITERATION.finditer(output)}


def moved(folder):
    """(planned, measured) of the last record."""
    record = [line for line in launch.metrics_lines(folder) if "lm loss" in line][-1]
    return tuple({name: record[f"{which}-{name}"] for name in COUNTED} for which in ("planned", "measured"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The losses of a sharded optimizer under 1F1B."""
    words = words_of(tmp_path_factory.mktemp("plain"), STRATEGY="optim")
    words.remove("--zero-bubble-v-schedule")
    output = launch.ok(launch.run_forked(words, ranks=4)).output
    assert '"schedule": "1f1b"' in output
    assert len(losses(output)) == 2
    return losses(output)


def test_it_has_the_losses_of_a_sharded_optimizer_under_1f1b_and_moves_what_it_planned(tmp_path, plain):
    said = script(tmp_path, POLICY="step")
    assert '"schedule": "zbv"' in said
    assert " > residency: zbv, optim_grads_params over 2 ranks, policy step; " in said
    assert losses(said) == plain
    planned, measured = moved(tmp_path)
    assert planned == measured
    assert (
        planned["gathers"] == planned["reductions"] == 6
    )  # the first rank's units: 4 layers, embedding and head


def test_policy_memory_moves_more_and_says_what_the_readme_quotes(tmp_path, plain):
    said = launch.ok(launch.run_forked(words_of(tmp_path), ranks=4)).output
    quoted = [line for line in README.read_text().splitlines() if line.startswith(" > ")]
    assert quoted == [
        line for line in said.splitlines() if line.startswith((" > residency: ", " > a step moves "))
    ]
    for now, then in zip(losses(said).values(), plain.values(), strict=True):
        assert [float(one) for one in now.split()] == pytest.approx(
            [float(one) for one in then.split()], 1e-5
        )
    planned, measured = moved(tmp_path)
    assert planned == measured
    assert planned["gathers"] > planned["reductions"] == 6 * 8  # each of 8 microbatches
