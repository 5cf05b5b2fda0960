"""A resumed run is the undisturbed run: the same printed losses, the same bits in every saved tensor."""

import itertools
import json
import shutil

import pytest

from tests.harness import launch

FAULTY = "tests/functional_tests/trainers/faulty.py"
PRECISION = {
    "fp32": (),
    "bf16": ("--bf16",),
    # Starts with overflows, then grows every three steps: the scaler's state matters.
    "fp16": "--fp16 --initial-loss-scale 1048576 --loss-scale-window 3 --hysteresis 1".split(),
    "fp64": ("--fp64",),
}
LENGTH = {
    "iterations": "--train-iters 12 --lr-decay-style cosine --lr-decay-iters 12 --lr-warmup-iters 2".split(),
    # Batches of 4 samples, then of 8.
    "samples": (
        "--train-samples 70 --rampup-batch-size 4 4 24 --lr-decay-style linear --lr-decay-samples 70".split()
    ),
}


def straight_and_resumed(tmp_path, ranks, flags):
    """A run of 12 iterations that saves every 6, and one that goes on from the sixth in a folder of its own."""
    flags = [*launch.TINY, *flags, "--save", "ck", "--save-interval", "6", "--load", "ck"]
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    straight.mkdir()
    (resumed / "ck").mkdir(parents=True)
    first = launch.ok(launch.run_forked(flags, ranks=ranks, cwd=straight))
    shutil.copytree(straight / "ck" / "iter_0000006", resumed / "ck" / "iter_0000006")
    (resumed / "ck" / "latest_checkpointed_iteration.txt").write_text("6")
    second = launch.ok(launch.run_forked(flags, ranks=ranks, cwd=resumed))
    return first, second, straight / "ck", resumed / "ck"


def assert_bit_for_bit(tmp_path, ranks, flags):
    first, second, straight, resumed = straight_and_resumed(tmp_path, ranks, flags)
    losses = first.losses()
    assert second.losses() == {n: losses[n] for n in losses if n > 6}
    assert second.losses(), second.output
    last = max(losses)
    digests = launch.digests(straight, last)
    assert launch.digests(resumed, last) == digests
    states = [
        json.loads((ck / f"iter_{last:07d}" / "manifest.json").read_text())["common"]
        for ck in (straight, resumed)
    ]
    for key in ("train_state", "scheduler", "scaler", "optimizer", "nan_policy"):
        assert states[0][key] == states[1][key], key
    return first


SAMPLE = [
    (1, "fp32", "iterations", ""),
    (1, "fp16", "samples", "--dataloader-type cyclic --async-save"),
    (2, "bf16", "iterations", "--async-save --num-workers 2"),
    (2, "fp32", "samples", "--optimizer sgd --recompute-granularity full --recompute-method uniform "
     "--recompute-num-layers 1"),
]  # fmt: skip
GRID = [
    (ranks, precision, length, f"--dataloader-type {loader} {save}")
    for ranks, precision, length, loader, save in itertools.product(
        (1, 2), PRECISION, LENGTH, ("single", "cyclic"), ("", "--async-save")
    )
]


@pytest.mark.grid
@pytest.mark.parametrize(("ranks", "precision", "length", "more"), SAMPLE)
def test_bit_for_bit(tmp_path, ranks, precision, length, more):
    run = assert_bit_for_bit(tmp_path, ranks, [*PRECISION[precision], *LENGTH[length], *more.split()])
    if precision == "fp16":
        assert "loss scale: 1048576.0 | number of skipped iterations:   1" in run.output


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "precision", "length", "more"), GRID)
def test_bit_for_bit_grid(tmp_path, ranks, precision, length, more):
    assert_bit_for_bit(tmp_path, ranks, [*PRECISION[precision], *LENGTH[length], *more.split()])


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """One rank to the end, noting the samples."""
    folder = tmp_path_factory.mktemp("one")
    flags = [*launch.TINY, "--train-iters", "9", "--save", "ck", "--save-interval", "3", "--load", "ck"]
    run = launch.ok(launch.run_forked([*flags, "--record-samples", "samples"], script=FAULTY, cwd=folder))
    return folder, flags, run


def samples_of(path):
    """Steps of eight samples, each step in the order of the samples' numbers: ranks write side by side."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return sorted((line["index"], line["tokens"]) for line in lines)


@pytest.mark.grid
def test_data_parallel_size_may_change(recorded, tmp_path):
    """1 -> 2 -> 4 ranks: each sample once, in the same steps; losses as with one rank but for rounding."""
    folder, flags, run = recorded
    shutil.copytree(folder / "ck", tmp_path / "ck")
    for name in ("iter_0000006", "iter_0000009"):
        shutil.rmtree(tmp_path / "ck" / name)
    (tmp_path / "ck" / "latest_checkpointed_iteration.txt").write_text("3")
    shutil.copy(folder / "ck" / "metrics.jsonl", tmp_path / "ck" / "metrics.jsonl")
    losses = {n: text for n, text in run.losses().items() if n <= 3}
    seen = samples_of(folder / "samples")[:24]
    for ranks, last in ((2, 6), (4, 9)):
        note = tmp_path / f"samples-{ranks}"
        more = ["--exit-interval", str(last), "--record-samples", str(note)]
        part = launch.ok(launch.run_forked([*flags, *more], script=FAULTY, ranks=ranks, cwd=tmp_path))
        assert list(part.losses()) == [last - 2, last - 1, last]
        losses |= part.losses()
        seen += samples_of(note)
    assert seen == samples_of(folder / "samples")
    for iteration, text in run.losses().items():
        expected, found = ([float(word) for word in words.split()] for words in (text, losses[iteration]))
        assert found == pytest.approx(expected, rel=1e-5), iteration


@pytest.mark.grid
def test_loader_processes_change_nothing(recorded, tmp_path):
    folder, flags, run = recorded
    other = launch.ok(launch.run_forked([*flags, "--num-workers", "2"], cwd=tmp_path))
    assert other.losses() == run.losses()
    assert launch.digests(tmp_path / "ck", 9) == launch.digests(folder / "ck", 9)


def test_metrics_of_a_resumed_run_tell_one_story(recorded, tmp_path):
    folder, flags, _ = recorded
    shutil.copytree(folder / "ck", tmp_path / "ck")
    run = launch.ok(launch.run_forked([*flags, "--ckpt-step", "6"], cwd=tmp_path))
    assert "loading iteration 6 (--ckpt-step)" in run.output
    lines = launch.metrics_lines(tmp_path / "ck")
    assert [line["iteration"] for line in lines if "lm loss" in line] == list(range(1, 10))
    assert [line["iteration"] for line in lines if line.get("event") == "start"] == [0, 6]


def test_a_finished_run_has_nothing_to_train(recorded, tmp_path):
    folder, flags, _ = recorded
    shutil.copytree(folder / "ck", tmp_path / "ck")
    run = launch.ok(launch.run_forked(flags, cwd=tmp_path))
    assert "nothing to train: iteration 9 of 9 is done" in run.output
    assert not run.losses()


@pytest.mark.grid
def test_going_on_further_with_another_length(recorded, tmp_path):
    folder, flags, _ = recorded
    shutil.copytree(folder / "ck", tmp_path / "ck")
    longer = [*flags, "--train-iters", "11"]
    refused = launch.ended(launch.run_forked(longer, cwd=tmp_path), 2)
    assert "decay_samples: checkpoint 72, flags 88" in refused.output
    run = launch.ok(launch.run_forked([*longer, "--override-opt_param-scheduler"], cwd=tmp_path))
    assert list(run.losses()) == [10, 11]


@pytest.mark.grid
def test_finetune_and_partial_loads(recorded, tmp_path):
    """--finetune: weights only, from iteration 0. --no-load-optim, --no-load-rng: the rest is kept."""
    folder, flags, run = recorded
    flags = [flag for flag in flags if flag != "ck"]  # leaves --save and --load, given below
    flags = [flag for flag in flags if flag not in ("--save", "--load")]
    more = ["--load", str(folder / "ck"), "--save", "tuned"]
    tuned = launch.ok(launch.run_forked([*flags, *more, "--finetune", "--train-iters", "2"], cwd=tmp_path))
    assert list(tuned.losses()) == [1, 2]
    loss = {
        n: float(text.split()[0])
        for n, text in (tuned.losses() | {9: run.losses()[9], 0: run.losses()[1]}).items()
    }
    assert loss[1] < (loss[0] + loss[9]) / 2  # it starts with trained weights
    for flag in ("--no-load-optim", "--no-load-rng"):
        more = ["--load", str(folder / "ck"), "--save", flag[2:], "--ckpt-step", "6", flag]
        part = launch.ok(launch.run_forked([*flags, *more], cwd=tmp_path))
        assert list(part.losses()) == [7, 8, 9]
        assert (
            part.losses()[7].split()[0] == run.losses()[7].split()[0]
        )  # the same weights and the same batch
        # Without its moments Adam goes elsewhere; torch's generators do not matter to our models.
        assert (part.losses()[9] == run.losses()[9]) == (flag == "--no-load-rng")


@pytest.mark.grid
def test_model_shape_from_the_checkpoint(recorded, tmp_path):
    folder, _, run = recorded
    few = (
        "--micro-batch-size 2 --global-batch-size 8 --lr 1e-2 --lr-decay-style constant --weight-decay 0.1 --seed 7 "
        "--mock-data --num-workers 0 --log-interval 1 --no-create-attention-mask-in-dataloader --eval-iters 0 "
        "--train-iters 9 --use-checkpoint-args --ckpt-step 6"
    ).split()
    again = launch.ok(launch.run_forked([*few, "--load", str(folder / "ck")], cwd=tmp_path))
    assert again.losses() == {n: text for n, text in run.losses().items() if n > 6}
