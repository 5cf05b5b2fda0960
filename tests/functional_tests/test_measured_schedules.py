"""Runs that measure themselves and solve their schedule again keep the bits of those that do not."""

import json
import re

import pytest

from megatron.core.pipeline_parallel.plan.ir import plan_hash
from megatron.core.pipeline_parallel.plan.text import from_json
from tests.harness import launch

FLAGS = [
    *launch.TINY,
    *"--num-layers 5 --train-iters 7 --padded-vocab-size 128 --allow-padding-num-layers".split(),
    *"--pipeline-model-parallel-size 2 --eval-interval 5 --eval-iters 1".split(),
]
TIMERS = "--zero-bubble-pipeline-timers-start-iter 2 --zero-bubble-pipeline-timers-end-iter 4"
AGAIN = re.compile(
    r"^ > pipeline solved again after iteration (\d+) \((.*?)\): F \S+, B \S+, W \S+ ms a stage.*$", re.M
)
BUBBLE = re.compile(r"^ pipeline bubble of iteration (\d+): planned (\S+)%, measured (\S+)%$", re.M)


FAULTY_STEPS = "tests/functional_tests/trainers/faulty_steps.py"
# FSDP2 x ZBV2. The first rank does not know of the second one's large gradients before it has stepped.
SHARDED = (
    "--num-layers 4 --untie-embeddings-and-output-weights --pipeline-schedule zbv --clip-grad 4 "
    "--faults 4:0.5:4096 6:0.5:4096 --use-custom-fsdp --data-parallel-sharding-strategy optim_grads_params"
)
VALIDATED = "--enable-optimizer-post-validation --post-validation-after 0"


def train(folder, *flags, ranks=2, script=launch.GPT):
    folder.mkdir()
    return launch.ok(launch.run_forked([*FLAGS, *flags], ranks=ranks, script=script, cwd=folder))


def records(folder):
    return [json.loads(line) for line in (folder / "ck" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.grid
@pytest.mark.parametrize("schedule", ["--zero-bubble-v-schedule", "--pipeline-schedule auto"])
def test_solved_again_with_the_same_bits(tmp_path, schedule):
    words = [
        *schedule.split(),
        "--save",
        "ck",
        "--save-interval",
        "100",
        "--log-pipeline-timeline",
        "timeline",
    ]
    plain = train(tmp_path / "plain", *words)
    run = train(tmp_path / "run", *words, *TIMERS.split())
    assert not AGAIN.search(plain.output)
    assert AGAIN.findall(run.output)[0] == ("3", "iterations 2-3")
    assert run.losses() == plain.losses()
    assert list(run.losses()) == [*range(1, 8)]
    assert launch.digests(tmp_path / "run" / "ck", 7) == launch.digests(tmp_path / "plain" / "ck", 7)
    assert [int(found[1]) for found in BUBBLE.finditer(run.output)] == [*range(1, 8)]
    written = records(tmp_path / "run")
    steps = [one for one in written if "planned-bubble" in one]
    assert [one["iteration"] for one in steps] == [*range(1, 8)]
    assert all(0 <= one[name] < 1 for one in steps for name in ("planned-bubble", "measured-bubble"))
    plans = [one for one in written if one.get("event") == "plan"]
    assert plans[0]["iteration"] == 3
    assert all(value > 0 for value in plans[0]["f_ms"])
    taken = [one for one in plans if one["kept"] is None]
    if taken:
        saved = from_json((tmp_path / "run" / "ck" / "pipeline-plan.json").read_text())
        assert plan_hash(saved) == taken[-1]["hash"]


@pytest.mark.grid
def test_sharded_steps_that_are_taken_back_and_solved_again_have_the_bits_of_others(tmp_path):
    words = [*SHARDED.split(), "--save", "ck", "--save-interval", "100"]
    plain = train(tmp_path / "plain", *words, ranks=4, script=FAULTY_STEPS)
    again = [*VALIDATED.split(), *TIMERS.split()]
    run = train(tmp_path / "run", *words, *again, ranks=4, script=FAULTY_STEPS)
    assert AGAIN.findall(run.output)[0] == ("3", "iterations 2-3")
    assert re.findall(r" rollbacks: (\d+) \|", run.output) == ["0", "0", "0", "1", "0", "1", "0"]
    assert run.losses() == plain.losses()
    assert list(run.losses()) == [*range(1, 8)]
    assert launch.digests(tmp_path / "run" / "ck", 7) == launch.digests(tmp_path / "plain" / "ck", 7)
