"""A model of a user's own under --rank-memory-limit: seen before plans are made, trained by one that keeps to it, and
resumed; what cannot be seen, and what does not fit, is refused with its fix."""

import re

import pytest

from tests.harness import launch

PLAIN = "tests/functional_tests/trainers/plain_pipeline.py"
SIZE = "--num-layers 4 --padded-vocab-size 128 --log-interval 1 --global-batch-size 16 --lr-decay-iters 9"
WORDS = [*launch.TINY, *SIZE.split()]
PP = "--pipeline-model-parallel-size 2"
AUTO = "--use-custom-fsdp --data-parallel-sharding-strategy auto --fsdp-unit-modules Residual"
LIMIT = 600_000


def train(folder, words, *, ranks=4, status=0):
    run = launch.run_forked([*WORDS, *words.split()], ranks=ranks, script=PLAIN, cwd=folder)
    return launch.ended(run, status) if status else launch.ok(run)


def held(output, limit):
    """Bytes that the plan's fullest rank holds."""
    (told,) = re.findall(
        r"^ > at once pipeline rank \d holds at most ([\d.]+) KiB of the ", output, re.MULTILINE
    )
    assert float(told) * 1024 <= limit
    return float(told)


def kinds(output):
    """Kind -> planned and measured, of the line after two steps."""
    (told,) = re.findall(r"by iteration 2, planned / measured: ([^;]*)", output)
    return {one.split()[0]: tuple(one.partition(" ")[2].split(" / ")) for one in told.split(", ")}


@pytest.mark.grid
@pytest.mark.parametrize(("ranks", "more"), [(4, PP), (2, "")])
def test_it_trains_within_the_limit_and_resumes(ranks, more, tmp_path):
    """As without a limit, but for the order in which sums are rounded. Its provider waits for all ranks: all of them
    look at the model."""
    limited = (
        f"{more} {AUTO} --rank-memory-limit {LIMIT} --save ck --save-interval 3 --load ck --train-iters 8"
    )
    (tmp_path / "plain").mkdir()
    plain = train(tmp_path / "plain", f"{more} --train-iters 8", ranks=ranks)
    assert (
        " activations of iteration" not in plain.output
    )  # nobody asks, and those of the flags' GPT are none of its
    run = train(tmp_path, f"{limited} --exit-interval 3", ranks=ranks)
    assert " activations of iteration" in run.output
    assert re.search(rf"^ > --rank-memory-limit {LIMIT}: \S+, optim\w*: chosen$", run.output, re.MULTILINE)
    assert "zb-h1: not possible: " in run.output or not more
    held(run.output, LIMIT)
    told = kinds(run.output)
    assert {"weights", "main_grads", "moments", "activations"} <= told.keys()
    for kind in ("weights", "main_grads", "moments"):
        assert told[kind][0] == told[kind][1], (kind, told)
    again = train(tmp_path, f"{limited} --exit-interval 6 --meets", ranks=ranks)
    held(again.output, LIMIT)
    without = limited.replace(f"--rank-memory-limit {LIMIT}", "").replace("strategy auto", "strategy optim")
    free = train(tmp_path, without, ranks=ranks)
    assert "--rank-memory-limit" not in free.output
    assert [list(one.losses()) for one in (run, again, free)] == [[1, 2, 3], [4, 5, 6], [7, 8]]
    losses = run.losses() | again.losses() | free.losses()
    for number, text in plain.losses().items():
        assert float(losses[number].split()[0]) == pytest.approx(float(text.split()[0]), rel=1e-5)


@pytest.mark.grid
def test_code_that_needs_values_is_refused_under_a_limit_and_measured_without(tmp_path):
    limited = train(
        tmp_path,
        f"{PP} {AUTO} --rank-memory-limit {LIMIT} --reads-values --train-iters 2",
        status=2,
    )
    (error,) = re.findall(r"^.*\[own-model\] --rank-memory-limit: .*$", limited.output, re.MULTILINE)
    assert "provider or forward step on tensors without memory raised (RuntimeError: " in error
    assert "leave the limit out" in limited.output
    assert "--fsdp-memory-budget BYTES" in limited.output
    assert not limited.losses()
    chosen = train(tmp_path, "--pipeline-schedule auto --reads-values --train-iters 2", ranks=1)
    (line,) = re.findall(r"^ > planned as of equal stages: .*$", chosen.output, re.MULTILINE)
    assert line.endswith("Times are measured in steps, activations are in no plan")
    assert list(chosen.losses()) == [1, 2]


@pytest.mark.grid
def test_a_limit_that_nothing_fits_is_refused_with_what_the_least_is(tmp_path):
    run = train(tmp_path, f"{PP} {AUTO} --rank-memory-limit 20K --train-iters 2", status=2)
    assert "nothing fits; the least is that of" in run.output
    assert "of a microbatch's activations" in run.output
    assert not run.losses()


@pytest.mark.grid
def test_auto_chooses_what_the_model_has_backwards_for(tmp_path):
    run = train(tmp_path, f"{PP} --pipeline-schedule auto --train-iters 2")
    assert list(run.losses()) == [1, 2]
    told = re.findall(r"^ > --pipeline-schedule auto: (\S+): (.*)$", run.output, re.MULTILINE)
    reasons = dict(told)
    assert "accumulated by autograd" in reasons["zb-h1"]
    (chosen,) = (name for name, why in told if why.endswith(": chosen"))
    assert chosen == "1f1b"
