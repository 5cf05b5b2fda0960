"""Checkpoints of sharded runs: written under any strategy and number of ranks, gone on from under any other.

Which tensors are saved and loaded bit for bit by which pair of layouts is shown in tests/parity and in
test_checkpoint_matrix; here are whole runs, stopped in the ways in which runs are stopped.
"""

import functools
import itertools
import signal
import time

import pytest

from megatron.core.dist_checkpointing.saving import PendingSave
from tests.harness import launch
from tests.harness.runs import common_state, copy_checkpoint

FSDP = "--use-custom-fsdp --data-parallel-sharding-strategy"
ZERO3 = f"{FSDP} optim_grads_params"
LAYOUTS = {
    "no_shard": (2, ""),
    "optim": (2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
    "optim_grads": (2, f"{FSDP} optim_grads --fsdp-reshard-policy step"),
    "ZeRO-3": (2, f"{ZERO3} --fsdp-double-buffer"),
    "one": (1, ""),
    "ZeRO-3 of one": (1, ZERO3),
    "ZeRO-3 of four": (4, f"{ZERO3} --init-model-with-meta-device"),
    "HFSDP": (4, f"{ZERO3} --num-distributed-optimizer-instances 2 --outer-dp-sharding-strategy optim"),
    "TP2": (2, "--tensor-model-parallel-size 2"),
}
# What --use-checkpoint-args takes from the checkpoint, and what it leaves to the command.
SHAPE = ["--num-layers", "4", *launch.TINY[2:10]]
REST = launch.TINY[10:]
SAVING = "--padded-vocab-size 128 --save ck --save-interval 3 --load ck".split()
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0".split()
full = pytest.mark.full


def words_for(layout, *more):
    return [*SHAPE, *REST, *SAVING, *LAYOUTS[layout][1].split(), *more]


def train(folder, layout, *more):
    return launch.ok(launch.run_forked(words_for(layout, *more), ranks=LAYOUTS[layout][0], cwd=folder))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """trained(layout, flags) -> folder and run of six iterations that nobody stopped, saved every third."""

    @functools.cache
    def one(layout, *flags):
        folder = tmp_path_factory.mktemp("trained")
        return folder, train(folder, layout, "--train-iters", "6", *flags)

    return one


# --- going on


@pytest.mark.grid
@pytest.mark.parametrize(
    "flags",
    [
        (),
        pytest.param(("--bf16", "--megatron-fsdp-grad-comm-dtype", "bf16"), marks=full),
        pytest.param(
            "--fp16 --initial-loss-scale 131072 --hysteresis 1 --loss-scale-window 2".split(), marks=full
        ),
        pytest.param(("--recompute-granularity", "selective", "--optimizer", "sgd"), marks=full),
    ],
)
def test_the_same_layout_goes_on_bit_for_bit(trained, tmp_path, flags):
    straight, run = trained("ZeRO-3", *flags)
    copy_checkpoint(straight, tmp_path, 3)
    resumed = train(tmp_path, "ZeRO-3", "--train-iters", "6", *flags)
    assert resumed.losses()
    assert resumed.losses() == {n: text for n, text in run.losses().items() if n > 3}
    assert launch.digests(tmp_path / "ck", 6) == launch.digests(straight / "ck", 6)
    for key in ("train_state", "scheduler", "scaler", "optimizer"):
        assert common_state(tmp_path, 6)[key] == common_state(straight, 6)[key]


@pytest.mark.grid
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("ZeRO-3", "ZeRO-3 of four"),
        ("no_shard", "ZeRO-3"),
        pytest.param("ZeRO-3", "optim", marks=full),
        pytest.param("ZeRO-3", "one", marks=full),
        pytest.param("ZeRO-3", "no_shard", marks=full),
        pytest.param("ZeRO-3", "optim_grads", marks=full),
        pytest.param("ZeRO-3", "HFSDP", marks=full),
        pytest.param("ZeRO-3", "TP2", marks=full),
        pytest.param("ZeRO-3 of four", "ZeRO-3", marks=full),
        pytest.param("HFSDP", "ZeRO-3 of one", marks=full),
        pytest.param("TP2", "ZeRO-3", marks=full),
    ],
)
def test_any_other_layout_goes_on(trained, tmp_path, source, target):
    """The losses of the run that nobody stopped, but for rounding. No dropout: TP ranks have masks of their own."""
    straight, run = trained(source, *NO_DROPOUT)
    copy_checkpoint(straight, tmp_path, 3)
    resumed = train(tmp_path, target, "--train-iters", "6", *NO_DROPOUT)
    assert "loading checkpoint from ck at iteration 3" in resumed.output
    assert list(resumed.losses()) == [4, 5, 6]
    for iteration, text in resumed.losses().items():
        expected = [float(word) for word in run.losses()[iteration].split()]
        assert [float(word) for word in text.split()] == pytest.approx(expected, rel=2e-5), iteration


@pytest.mark.grid
def test_the_model_as_the_checkpoint_has_it(trained, tmp_path):
    """--use-checkpoint-args: the shape is not repeated, and what is sharded is the command's, not the checkpoint's."""
    straight, run = trained("ZeRO-3")
    copy_checkpoint(straight, tmp_path, 3)
    words = [*REST, *SAVING, *LAYOUTS["optim"][1].split(), "--use-checkpoint-args", "--train-iters", "6"]
    resumed = launch.ok(launch.run_forked(words, ranks=2, cwd=tmp_path))
    assert list(resumed.losses()) == [4, 5, 6]
    assert '"sharding": "optim"' in resumed.output
    assert resumed.losses()[4].split()[0] == run.losses()[4].split()[0]


# --- stopped by a signal


@pytest.mark.grid
@pytest.mark.parametrize(
    "more", [(), pytest.param(("--async-save", "--fsdp-reshard-policy", "step"), marks=full)]
)
def test_stopped_by_a_signal(tmp_path, more):
    """Both ranks save after the same iteration; going on ends in the bits of the run that nobody stopped."""
    endless = words_for("ZeRO-3", "--train-iters", "100000", "--save-interval", "100000", *more)
    with launch.forked(endless, ranks=2, cwd=tmp_path) as group:
        group.wait_for("iteration        3/")
        group.signal(signal.SIGTERM, 1)  # one is enough
        run = launch.ended(group.wait(), 75)
    record = launch.exit_record(tmp_path / "ck")
    stopped = record["iteration"]
    assert (record["status"], record["requeue"], record["checkpoint"]) == (75, True, f"ck/iter_{stopped:07d}")
    assert max(run.losses()) == stopped
    last = ["--exit-interval", str(stopped + 2)]
    (tmp_path / "straight").mkdir()
    runs = [
        launch.ok(launch.run_forked([*endless, *last], ranks=2, cwd=folder))
        for folder in (tmp_path, tmp_path / "straight")
    ]
    assert list(runs[0].losses()) == [stopped + 1, stopped + 2]
    assert {**run.losses(), **runs[0].losses()} == runs[1].losses()
    found, expected = (
        launch.digests(folder / "ck", stopped + 2) for folder in (tmp_path, tmp_path / "straight")
    )
    assert found == expected


# --- written in the background


@pytest.mark.grid
@pytest.mark.parametrize(
    "layout", ["ZeRO-3", pytest.param("optim", marks=full), pytest.param("optim_grads", marks=full)]
)
def test_training_changes_nothing_that_is_being_written(tmp_path, monkeypatch, layout):
    """--async-save after every iteration, by a writer that reads only once the next step is done: each checkpoint holds
    its own iteration's bits."""
    write = PendingSave.write

    def write_late(pending):
        time.sleep(0.4)
        return write(pending)

    train(tmp_path, layout, "--train-iters", "4", "--save-interval", "1")
    expected = [launch.digests(tmp_path / "ck", iteration) for iteration in range(1, 5)]
    monkeypatch.setattr(PendingSave, "write", write_late)  # forked ranks have it too
    later = tmp_path / "later"
    later.mkdir()
    train(later, layout, "--train-iters", "4", "--save-interval", "1", "--async-save")
    assert [launch.digests(later / "ck", iteration) for iteration in range(1, 5)] == expected
    assert all(before != after for before, after in itertools.pairwise(expected))
