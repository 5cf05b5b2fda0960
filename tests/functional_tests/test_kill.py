"""kill -9 at any moment, of training and of saving: the run always resumes and ends in the undisturbed run's bits."""

import functools
import json
import random
import signal
import time

import pytest

from tests.harness import launch
from tests.harness.faults import check_survivor_of_a_sleeping_peer

FAULTY = "tests/functional_tests/trainers/faulty.py"
ITERATIONS = 16
FLAGS = [
    *launch.TINY,
    "--train-iters",
    str(ITERATIONS),
    "--save",
    "ck",
    "--load",
    "ck",
    "--save-interval",
    "1",
]


# FSDP2 x ZBV2. Every third step is clipped for the second pipeline rank's gradients: the first one finds out afterwards
# and takes it back.
FAULTY_STEPS = "tests/functional_tests/trainers/faulty_steps.py"
FAULTS = " ".join(f"{iteration}:0.5:4096" for iteration in range(2, ITERATIONS + 1, 3))
SHARDED_PIPELINES = (
    "--num-layers 4 --untie-embeddings-and-output-weights --pipeline-model-parallel-size 2 --pipeline-schedule zbv "
    "--use-custom-fsdp --data-parallel-sharding-strategy optim_grads_params --padded-vocab-size 128 --clip-grad 4 "
    f"--enable-optimizer-post-validation --post-validation-after 0 --faults {FAULTS}"
)

# Experts whose biases move with every step, and go back with those that are taken back.
BIASED_EXPERTS = (
    "--num-layers 4 --pipeline-model-parallel-size 2 --enable-zero-bubble --padded-vocab-size 128 --clip-grad 4 "
    "--untie-embeddings-and-output-weights --enable-optimizer-post-validation --post-validation-after 0 "
    f"--faults {FAULTS.replace(':0.5:', ':1:')} --save-interval 3 --num-experts 4 "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.05 "
    "--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.01 --moe-expert-capacity-factor 1"
)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """undisturbed(ranks, flags): what the run ends in; and how long it trains."""

    @functools.cache
    def one(ranks, flags="", script=launch.GPT):
        folder = tmp_path_factory.mktemp(f"undisturbed{ranks}")
        with launch.forked([*FLAGS, *flags.split()], ranks=ranks, script=script, cwd=folder) as group:
            group.wait_for(r"training \.\.\.")
            start = time.monotonic()
            run = launch.ok(group.wait())
        return launch.digests(folder / "ck", ITERATIONS), run.losses(), time.monotonic() - start

    return one


def killed_and_resumed(folder, undisturbed, seed, ranks=None, more="", script=launch.GPT):
    """One kill at a random moment; returns what was met, for the figures."""
    dice = random.Random(seed)
    ranks = ranks or dice.choice((1, 2, 2))
    # none named: all at once
    victims = () if ranks == 1 else dice.choice(((), *((rank,) for rank in range(ranks))))
    flags = [*FLAGS, *more.split(), *dice.choice(((), ("--async-save",)))]
    flags += dice.choice(((), ("--num-workers", "1")))
    digests, losses, train_s = undisturbed(ranks, more, script)
    with launch.forked(flags, ranks=ranks, script=script, cwd=folder) as group:
        group.wait_for(r"training \.\.\.")
        time.sleep(dice.random() * train_s)
        left = sorted((folder / "ck").glob("iter_*.tmp-*"))
        group.kill(*victims)
        run = group.wait(timeout_s=20)
    survivors = [status for status in run.statuses if status != -signal.SIGKILL]
    assert all(status in (0, 6) for status in survivors), run.output
    again = launch.ok(launch.run_forked(flags, ranks=ranks, script=script, cwd=folder, timeout_s=180.0))
    assert launch.digests(folder / "ck", ITERATIONS) == digests, f"seed {seed}\n{run.output}\n{again.output}"
    assert {**run.losses(), **again.losses()} == losses, f"seed {seed}"
    assert not list((folder / "ck").glob("iter_*.tmp-*"))  # the next save cleans up
    lines = launch.metrics_lines(folder / "ck")
    assert [line["iteration"] for line in lines if "lm loss" in line] == list(range(1, ITERATIONS + 1))
    return {
        "seed": seed, "ranks": ranks, "victims": victims or "all", "async": "--async-save" in flags,
        "reached": max(run.losses(), default=0), "while saving": bool(left),
        "resumed from": min(again.losses(), default=ITERATIONS + 1) - 1,
    }  # fmt: skip


@pytest.mark.grid
@pytest.mark.parametrize("seed", [1, 2])
def test_kill(tmp_path, undisturbed, seed):
    killed_and_resumed(tmp_path, undisturbed, seed)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_twenty_kills(tmp_path, undisturbed, record_property):
    met = []
    for seed in range(100, 120):
        folder = tmp_path / str(seed)
        folder.mkdir()
        met.append(killed_and_resumed(folder, undisturbed, seed))
        print(json.dumps(met[-1]))
    assert any(kill["async"] for kill in met)
    assert any(0 < kill["reached"] < ITERATIONS for kill in met)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_ten_kills_of_sharded_pipelines(tmp_path, undisturbed):
    met = []
    for seed in range(200, 210):
        folder = tmp_path / str(seed)
        folder.mkdir()
        met.append(killed_and_resumed(folder, undisturbed, seed, 4, SHARDED_PIPELINES, FAULTY_STEPS))
        print(json.dumps(met[-1]))
    assert any(0 < kill["reached"] < ITERATIONS for kill in met)


@pytest.mark.grid
def test_a_kill_of_experts_with_biases(tmp_path, undisturbed):
    met = killed_and_resumed(tmp_path, undisturbed, 5, 2, BIASED_EXPERTS, FAULTY_STEPS)
    assert 0 < met["resumed from"] < ITERATIONS, met
    rollbacks = [line["rollbacks"] for line in launch.metrics_lines(tmp_path / "ck") if "rollbacks" in line]
    assert sum(rollbacks) > 0


@pytest.mark.full
def test_kill_after_kill(tmp_path, undisturbed):
    """Five kills of one run, one after the other."""
    digests, _, train_s = undisturbed(2)
    dice = random.Random(5)
    for _ in range(5):
        with launch.forked(FLAGS, ranks=2, cwd=tmp_path) as group:
            group.wait_for(r"training \.\.\.|nothing to train")
            time.sleep(dice.random() * train_s / 3)
            group.kill()
            group.wait()
    launch.ok(launch.run_forked(FLAGS, ranks=2, cwd=tmp_path))
    assert launch.digests(tmp_path / "ck", ITERATIONS) == digests


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.grid)])
def test_survivor_of_a_killed_peer(tmp_path, victim):
    """The others end within seconds, with status 6, and say who was lost."""
    flags = [*FLAGS, "--kill-iteration", "4", "--fault-rank", str(victim)]
    with launch.forked(flags, ranks=2, script=FAULTY, cwd=tmp_path) as group:
        group.wait_for("iteration        3/")
        start = time.monotonic()
        run = group.wait(timeout_s=20)
        assert time.monotonic() - start < 8.0
    survivor = 1 - victim
    assert run.statuses[victim] == -signal.SIGKILL
    assert run.statuses[survivor] == 6, run.output
    record = launch.exit_record(tmp_path / "ck")
    assert (record["status"], record["rank"], record["requeue"]) == (6, survivor, True)
    if victim == 1:
        assert "rank 1 (host " in record["reason"]
        assert "step 4, phase forward-backward" in record["reason"]
    else:  # without a launcher rank 0 is also the store's host
        assert "the store is gone" in record["reason"]


@pytest.mark.grid
@pytest.mark.parametrize("after_s", [0.0, 0.03])
def test_survivor_of_a_peer_that_dies_at_start_up(tmp_path, after_s):
    """Before or while the ranks meet and make their groups: the other gives up after the timeout, status 6."""
    flags = [*FLAGS, "--timeout-s", "1"]
    with launch.forked(flags, ranks=2, script=FAULTY, cwd=tmp_path) as group:
        time.sleep(after_s)
        group.kill(1)
        run = group.wait(timeout_s=20)
    assert run.statuses == (6, -signal.SIGKILL), run.output
    assert "lost a peer in " in run.output
    assert launch.exit_record(tmp_path / "ck")["status"] == 6


@pytest.mark.grid
def test_survivor_of_a_sleeping_peer(tmp_path):
    check_survivor_of_a_sleeping_peer(FLAGS, script=FAULTY, folder=tmp_path, within_s=12.0)


@pytest.mark.grid
def test_torchrun_restarts_by_itself(tmp_path, undisturbed):
    """--max-restarts: a rank is killed once, the next attempt goes on from the last checkpoint."""
    flags = [*FLAGS, "--kill-iteration", "6", "--fault-rank", "1"]
    run = launch.ok(launch.run(flags, script=FAULTY, ranks=2, cwd=tmp_path, launcher=("--max-restarts", "2")))
    assert "loading checkpoint from ck at iteration 5" in run.output
    digests, losses, _ = undisturbed(2)
    assert run.losses() == losses
    assert launch.digests(tmp_path / "ck", ITERATIONS) == digests
    assert launch.exit_record(tmp_path / "ck")["status"] == 0
