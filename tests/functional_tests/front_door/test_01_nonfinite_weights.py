"""Weights that an update has made NaN or infinite end the run with 5: the step does not count, and is never saved."""

import re

import pytest

from tests.harness import launch

BAD_UPDATE = "tests/functional_tests/trainers/bad_update.py"
FAULTY_STEPS = "tests/functional_tests/trainers/faulty_steps.py"
FLAGS = [*launch.TINY, "--train-iters", "4", "--save", "ck", "--save-interval", "1"]
PP = "--pipeline-model-parallel-size 2"
VALIDATED = f"{PP} --enable-optimizer-post-validation --post-validation-after 0"
OPTIMISTIC = f"{VALIDATED} --clip-grad 0"  # no step is taken back
FSDP = "--use-custom-fsdp --data-parallel-sharding-strategy"


def run(tmp_path, words, **options):
    return launch.run_forked([*FLAGS, *words.split()], cwd=tmp_path, **options)


def saved(tmp_path):
    """Names of checkpoints, and what the tracker says."""
    tracker = tmp_path / "ck" / "latest_checkpointed_iteration.txt"
    names = sorted(path.name for path in (tmp_path / "ck").glob("iter_*"))
    return names, tracker.read_text().strip() if tracker.exists() else None


@pytest.mark.parametrize(
    "words", ["--adam-eps 0 --init-method-std 0", "--lr 1e38 --nan-policy skip", "--lr 1e300"]
)
def test_the_first_step_makes_bad_weights(tmp_path, words):
    finished = launch.ended(run(tmp_path, words), 5)
    record = launch.exit_record(tmp_path / "ck")
    assert re.search(
        r"iteration 1: the weight of \S+ is (NaN|infinite) on rank 0 after the", record["reason"]
    )
    assert (record["iteration"], record["checkpoint"], record["requeue"]) == (0, None, False)
    assert saved(tmp_path) == ([], None)
    assert "iteration        1/" not in finished.output
    assert "Traceback" not in finished.output


@pytest.mark.grid
def test_an_earlier_good_checkpoint_stays_the_newest(tmp_path):
    launch.ok(run(tmp_path, "--train-iters 2"))
    launch.ended(run(tmp_path, "--load ck --no-load-optim --lr 1e38"), 5)
    record = launch.exit_record(tmp_path / "ck")
    assert (record["iteration"], record["checkpoint"]) == (2, "ck/iter_0000002")
    assert saved(tmp_path) == (["iter_0000001", "iter_0000002"], "2")


def test_a_good_checkpoint_that_is_still_being_written_is_committed(tmp_path):
    launch.ended(run(tmp_path, "--async-save --bad-update 2", script=BAD_UPDATE), 5)
    assert launch.exit_record(tmp_path / "ck")["checkpoint"] == "ck/iter_0000001"
    assert saved(tmp_path) == (["iter_0000001"], "1")


@pytest.mark.grid
@pytest.mark.parametrize(
    ("words", "rank", "value"),
    [
        (PP, 1, "inf"),
        ("--use-distributed-optimizer --bf16", 1, "nan"),
        (f"{FSDP} optim_grads_params", 1, "inf"),
        (OPTIMISTIC, 0, "inf"),
        pytest.param(OPTIMISTIC, 1, "nan", marks=pytest.mark.full),
        pytest.param(f"{PP} --optimizer sgd", 0, "nan", marks=pytest.mark.full),
        pytest.param("", 1, "-inf", marks=pytest.mark.full),
        pytest.param("--tensor-model-parallel-size 2", 1, "nan", marks=pytest.mark.full),
        pytest.param(f"{OPTIMISTIC} --enable-zero-bubble", 1, "inf", marks=pytest.mark.full),
        *(
            pytest.param(f"{FSDP} {strategy} --bf16", 1, "inf", marks=pytest.mark.full)
            for strategy in ("no_shard", "optim", "optim_grads")
        ),
    ],
)
def test_all_ranks_end_where_only_one_has_a_bad_weight(tmp_path, words, rank, value):
    flags = f"{words} --bad-update 3 --bad-rank {rank} --bad-value={value}"
    finished = launch.ended(run(tmp_path, flags, ranks=2, script=BAD_UPDATE), 5)
    reason = launch.exit_record(tmp_path / "ck")["reason"]
    assert re.match(rf"iteration 3: the weight of \S+ is (NaN|infinite) on rank {rank} after the", reason)
    assert finished.output.count("error (non finite") == 1
    assert max(finished.losses()) == 2
    assert saved(tmp_path) == (["iter_0000001", "iter_0000002"], "2")


@pytest.mark.full
@pytest.mark.parametrize(("rollback", "status"), [("snapshot", 0), ("inverse", 5)])
def test_a_bad_update_that_is_taken_back(tmp_path, rollback, status):
    """A copy brings the weights before back; arithmetic has no number to come back from."""
    words = f"{VALIDATED} --clip-grad 0.8 --post-validation-rollback {rollback} --bad-update 1"
    finished = launch.ended(run(tmp_path, words, ranks=2, script=BAD_UPDATE), status)
    assert "rollbacks: 1" in finished.output or "iteration 1: the weight of" in finished.output
    assert saved(tmp_path)[1] == (None if status else "4")


@pytest.mark.grid
@pytest.mark.parametrize(("dtype", "value"), [("bf16", 3.4e38), ("fp16", 7e4)])
def test_a_finite_weight_that_the_model_cannot_hold(tmp_path, dtype, value):
    """The main weight is finite in fp32, the model's is not."""
    name = {"bf16": "bfloat16", "fp16": "float16"}[dtype]
    words = f"--{dtype} --initial-loss-scale 8 --bad-update 2 --bad-value {value}"
    finished = launch.ended(run(tmp_path, words, script=BAD_UPDATE), 5)
    assert f"is larger than torch.{name} can hold on rank 0" in finished.output
    assert saved(tmp_path) == (["iter_0000001"], "1")


@pytest.mark.grid
def test_moments_that_overflow_are_not_saved(tmp_path):
    """A square that fp32 cannot hold: the weight stays where it is for ever after."""
    finished = launch.ended(run(tmp_path, "--clip-grad 0 --faults 2:0:1e25", script=FAULTY_STEPS), 5)
    assert re.search(
        r"iteration 2: optimizer\.exp_avg_sq\.\S+ is infinite on rank 0: no checkpoint", finished.output
    )
    assert saved(tmp_path) == (["iter_0000001"], "1")


@pytest.mark.grid
def test_weights_without_a_step_are_not_saved(tmp_path):
    finished = launch.ended(run(tmp_path, "--init-method-std 3e38 --iterations-to-skip 1"), 5)
    assert re.search(
        r"iteration 1: model\.\S+ is (NaN|infinite) on rank 0: no checkpoint of it", finished.output
    )
    assert saved(tmp_path) == ([], None)
