"""examples/fsdp_zero_bubble/pretrain.sh trains on CPU ranks, with the losses of ZeRO-1 under 1F1B, and moves what it
planned."""

from __future__ import annotations

import pytest

from tests.harness import launch
from tests.harness.scripts import launched_by

SCRIPT = launch.ROOT / "examples" / "fsdp_zero_bubble" / "pretrain.sh"
README = SCRIPT.with_name("README.md")
SHORT = {"CPU": "1", "TRAIN_ITERS": "2", "LOG_INTERVAL": "1"}
COUNTED = ("gathers", "reductions", "moved-bytes")


def trained(folder, *, without="", **variables):
    """What the ranks say that the script starts. without: a flag that they do not get."""
    words, ranks = launched_by(SCRIPT, folder, "--data-cache-path", launch.TINY[-1], **SHORT, **variables)
    assert ranks == 4
    kept = [word for word in words if word != without]
    return launch.ok(launch.run_forked(kept, ranks=ranks)).output


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
    folder = tmp_path_factory.mktemp("plain")
    output = trained(folder, without="--zero-bubble-v-schedule", STRATEGY="optim")
    assert '"schedule": "1f1b"' in output
    assert len(losses(output)) == 2
    return losses(output)


@pytest.mark.grid
def test_it_has_the_losses_of_a_sharded_optimizer_under_1f1b_and_moves_what_it_planned(tmp_path, plain):
    said = trained(tmp_path, POLICY="step")
    assert '"schedule": "zbv"' in said
    assert " > residency: zbv, optim_grads_params over 2 ranks, policy step; " in said
    assert losses(said) == plain
    planned, measured = moved(tmp_path)
    assert planned == measured
    assert (
        planned["gathers"] == planned["reductions"] == 6
    )  # the first rank's units: 4 layers, embedding and head


@pytest.mark.grid
def test_policy_memory_moves_more_and_says_what_the_readme_quotes(tmp_path, plain):
    said = trained(tmp_path)
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
