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
SMALL = {"CPU": "1", "TRAIN_ITERS": "3", "LOG_INTERVAL": "1", "HIDDEN_SIZE": "32", "SEQ_LENGTH": "32"}
COUNTED = ("gathers", "reductions", "moved-bytes")


def script(folder, **variables):
    """What the script says."""
    here = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHON": sys.executable, "RUN_DIR": str(folder)}
    done = subprocess.run(
        ["bash", str(SCRIPT), "--data-cache-path", launch.TINY[-1]],
        capture_output=True,
        text=True,
        env={**here, **SMALL, **variables},
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


def test_it_has_the_losses_of_a_sharded_optimizer_under_1f1b_and_moves_what_it_planned(tmp_path):
    step, memory = tmp_path / "step", tmp_path / "memory"
    said = script(step, POLICY="step")
    assert '"schedule": "zbv"' in said
    assert " > residency: zbv, optim_grads_params over 2 ranks, policy step; " in said
    assert said.count(" > a step moves on pipeline rank ") == 1

    words = words_of(tmp_path / "plain", STRATEGY="optim")
    words.remove("--zero-bubble-v-schedule")
    plain = launch.ok(launch.run_forked(words, ranks=4)).output
    assert '"schedule": "1f1b"' in plain
    assert len(losses(said)) == 3
    assert losses(said) == losses(plain)

    kept_nothing = launch.ok(launch.run_forked(words_of(memory), ranks=4)).output
    assert " policy memory; " in kept_nothing
    for now, then in zip(losses(kept_nothing).values(), losses(plain).values(), strict=True):
        assert [float(one) for one in now.split()] == pytest.approx(
            [float(one) for one in then.split()], 1e-5
        )

    assert moved(step)[0] == moved(step)[1]
    assert moved(memory)[0] == moved(memory)[1]
    assert all(moved(memory)[0][name] > moved(step)[0][name] for name in COUNTED)
