"""One iteration has one validation loss, and each line says of which samples it is."""

import re

import pytest

from tests.harness import launch
from tests.harness.runs import VALIDATION

FLAGS = [
    *launch.TINY,
    *"--train-iters 4 --eval-interval 2 --eval-iters 2 --save ck --load ck --save-interval 100".split(),
]
LONGER = "--train-iters 6 --override-opt_param-scheduler"
READ = re.compile(r"^ > evaluated on (.*)$", re.MULTILINE)


def run(tmp_path, words=""):
    return launch.ok(launch.run_forked([*FLAGS, *words.split()], cwd=tmp_path)).output


def test_the_evaluation_at_the_end_is_that_of_the_last_iteration(tmp_path):
    output = run(tmp_path)
    losses = dict(VALIDATION.findall(output))
    assert list(losses) == [
        "iteration 2", "iteration 4", "iteration 4 on validation set", "iteration 4 on test set"
    ]  # fmt: skip
    assert losses["iteration 4"] == losses["iteration 4 on validation set"]
    assert losses["iteration 4"] != losses["iteration 2"]
    assert READ.findall(output) == [
        "samples 0 to 15 of the validation set",
        "samples 16 to 31 of the validation set",
        "samples 16 to 31 of the validation set",
        "samples 0 to 15 of the test set",
    ]
    # The rules of dashes are where Megatron has them.
    assert re.search(
        r" > evaluated on .*\n(-+)\n validation loss at iteration 4 on test set \| .*\n\1\n", output
    )


def test_records_of_one_iteration_agree(tmp_path):
    """Under one tag; what the test set has is not the validation set's."""
    run(tmp_path, "--tensorboard-dir tb")
    records = [line for line in launch.metrics_lines(tmp_path / "ck") if line["iteration"] == 4]
    validation = {line["lm loss validation"] for line in records if "lm loss validation" in line}
    (test,) = {line["lm loss test"] for line in records if "lm loss test" in line}
    assert len(validation) == 1
    assert test not in validation
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert len({(e.step, e.value) for e in events.Scalars("lm loss validation")}) == 2
    assert [e.step for e in events.Scalars("lm loss test")] == [4]


@pytest.mark.grid
def test_a_finished_run_started_again_says_the_same(tmp_path):
    first = dict(VALIDATION.findall(run(tmp_path)))
    output = run(tmp_path)
    again = dict(VALIDATION.findall(output))
    assert "nothing to train" in output
    assert again == {where: loss for where, loss in first.items() if where.endswith("set")}
    # Longer: the next evaluation goes on reading behind the last one.
    assert "samples 32 to 47 of the validation set" in READ.findall(run(tmp_path, LONGER))


@pytest.mark.grid
def test_an_end_without_an_evaluation_due_reads_on(tmp_path):
    output = run(tmp_path, "--train-iters 3")
    assert READ.findall(output)[:2] == [
        "samples 0 to 15 of the validation set",
        "samples 16 to 31 of the validation set",
    ]
    assert [where for where, _ in VALIDATION.findall(output)] == [
        "iteration 2", "iteration 3 on validation set", "iteration 3 on test set"
    ]  # fmt: skip


@pytest.mark.grid
def test_an_evaluation_of_its_own_says_what_it_reads(tmp_path):
    """--skip-train starts at the beginning: another loss for iteration 4, and the line says why."""
    trained, evaluated = run(tmp_path), run(tmp_path, "--skip-train")
    assert READ.findall(evaluated) == [
        "samples 0 to 15 of the validation set",
        "samples 0 to 15 of the test set",
    ]
    key = "iteration 4 on validation set"
    assert dict(VALIDATION.findall(trained))[key] != dict(VALIDATION.findall(evaluated))[key]
