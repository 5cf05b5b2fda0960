"""Checkpoints that are damaged, missing or foreign: refused naming the file, status 3; or from scratch, told."""

import shutil

import pytest

from tests.harness import launch

LONGER = ["--train-iters", "5", "--override-opt_param-scheduler"]
FLAGS = [*launch.TINY, "--train-iters", "4", "--save-interval", "2", "--save", "ck", "--load", "ck"]


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    run = launch.ok(launch.run_forked(FLAGS, cwd=folder))
    assert (
        "no checkpoint in ck: no latest_checkpointed_iteration.txt, no iter_*; starting from scratch"
        in run.output
    )
    return folder / "ck"


@pytest.fixture
def copy(good, tmp_path):
    shutil.copytree(good, tmp_path / "ck")
    return tmp_path


def refused(folder, *flags, ranks=1):
    run = launch.ended(launch.run_forked([*FLAGS, *flags], cwd=folder, ranks=ranks), 3)
    record = launch.exit_record(folder / "ck")
    assert record["status"] == 3
    assert not record["requeue"]
    assert record["reason"] in run.output
    assert "Traceback" not in run.output
    return run.output


@pytest.mark.grid
@pytest.mark.parametrize("ranks", [1, 2])
def test_flipped_bit(copy, ranks):
    path = copy / "ck" / "iter_0000004" / "shard_00000.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) * 2 // 3] ^= 4
    path.write_bytes(data)
    output = refused(copy, ranks=ranks)
    assert "ck/iter_0000004/shard_00000.safetensors: SHA-256 is " in output
    assert output.count("error (checkpoint, exit status 3)") == 1  # once, not by every rank


def test_truncated_shard(copy):
    path = copy / "ck" / "iter_0000004" / "shard_00000.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    output = refused(copy)
    assert "ck/iter_0000004/shard_00000.safetensors: " in output
    assert "--ckpt-step 2 goes on from there" in output
    launch.ok(launch.run_forked([*FLAGS, "--ckpt-step", "2"], cwd=copy))


@pytest.mark.grid
def test_step_that_is_not_there(copy):
    assert "--ckpt-step 3 is not in ck (iterations there: 2, 4)" in refused(copy, "--ckpt-step", "3")


@pytest.mark.grid
def test_another_model(copy):
    output = refused(copy, "--hidden-size", "64")
    assert "hidden_size: checkpoint 32, this run 64" in output


def test_missing_checkpoint_may_be_an_error(tmp_path):
    run = launch.ended(launch.run_forked([*FLAGS, "--exit-on-missing-checkpoint"], cwd=tmp_path), 3)
    assert "--exit-on-missing-checkpoint" in run.output


@pytest.mark.grid
def test_nothing_valid_is_not_scratch(copy):
    for name in ("iter_0000002", "iter_0000004"):
        (copy / "ck" / name / "manifest.json").unlink()
    assert "manifest.json: missing" in refused(copy)


def test_tracker_garbage(copy):
    (copy / "ck" / "latest_checkpointed_iteration.txt").write_bytes(b"\xff garbage")
    run = launch.ok(launch.run_forked([*FLAGS, *LONGER], cwd=copy))
    assert "expected an iteration number" in run.output
    assert "loading iteration 4, the newest valid one of ck" in run.output
    assert list(run.losses()) == [5]
    assert (copy / "ck" / "latest_checkpointed_iteration.txt").read_text() == "5"


def test_tracker_of_a_missing_directory(copy):
    shutil.rmtree(copy / "ck" / "iter_0000004")
    run = launch.ok(launch.run_forked(FLAGS, cwd=copy))
    assert "names iteration 4, but ck/iter_0000004 is missing" in run.output
    assert list(run.losses()) == [3, 4]


@pytest.mark.grid
def test_optimizer_that_was_not_saved(tmp_path):
    launch.ok(launch.run_forked([*FLAGS, "--no-save-optim", "--no-save-rng"], cwd=tmp_path))
    assert "no optimizer state (saved with --no-save-optim?)" in refused(tmp_path, *LONGER)
    more = ["--no-load-optim", "--no-load-rng", *LONGER]
    assert list(launch.ok(launch.run_forked([*FLAGS, *more], cwd=tmp_path)).losses()) == [5]
