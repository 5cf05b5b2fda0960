"""What a run prints and records, as scripts written for Megatron-LM read it: one run of two ranks."""

import json
import re
import subprocess
import sys

import pytest

from tests.harness import launch

# As in scripts that users have: names, order and separators are Megatron's.
ITERATION = re.compile(
    r"^ \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}\] iteration +(\d+)/ +(\d+) \| consumed samples: +(\d+) \| "
    r"elapsed time per iteration \(ms\): (\d+\.\d) \| throughput per GPU \(TFLOP/s/GPU\): (\d+\.\d+) \| "
    r"learning rate: (\d\.\d{6}E[+-]\d\d) \| global batch size: +(\d+) \| lm loss: (\d\.\d{6}E[+-]\d\d) \| "
    r"loss scale: (\d+\.\d) \| grad norm: (\d\.\d{6}E[+-]\d\d) \| num zeros: (\d+) \| params norm: (\S+) \| "
    r"number of skipped iterations: +(\d+) \| number of nan iterations: +(\d+) \|$",
    re.MULTILINE,
)
VALIDATION = re.compile(
    r"^(-+)\n validation loss at (iteration \d+(?: on \w+ set)?) \| lm loss value: (\S+) \| lm loss PPL: (\S+) \| \n"
    r"(-+)$",
    re.MULTILINE,
)
TIMER = re.compile(r"^ {4}(\S+) \.+: \((\d+\.\d\d), (\d+\.\d\d)\)$", re.MULTILINE)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lines")
    flags = (
        "--train-iters 10 --log-interval 5 --save ck --save-interval 5 --eval-interval 5 --eval-iters 2 "
        "--timing-log-level 2 --log-throughput --log-params-norm --log-num-zeros-in-grad --log-progress "
        "--tensorboard-dir tb --log-timers-to-tensorboard --log-memory-to-tensorboard "
        "--log-validation-ppl-to-tensorboard --log-world-size-to-tensorboard --manual-gc --manual-gc-interval 4 "
        "--report-theoretical-memory"
    ).split()
    return folder, launch.ok(launch.run_forked([*launch.TINY, *flags], ranks=2, cwd=folder)).output


def test_iteration_lines(two_ranks):
    lines = ITERATION.findall(two_ranks[1])
    assert [int(line[0]) for line in lines] == [1, 5, 10]  # the first iteration whatever the interval
    assert [int(line[2]) for line in lines] == [8, 40, 80]
    assert {(line[1], line[5], line[6], line[8], line[12], line[13]) for line in lines} == {
        ("10", "1.000000E-02", "8", "1.0", "0", "0")
    }
    assert all(float(line[11]) > 0 for line in lines)


def test_interval_covers_the_first_iteration(two_ranks):
    folder, output = two_ranks
    records = [line for line in launch.metrics_lines(folder / "ck") if "lm loss" in line]
    assert [record["iteration"] for record in records] == list(range(1, 11))  # --tensorboard-log-interval 1
    mean = sum(record["lm loss"] for record in records[:5]) / 5
    assert float(ITERATION.findall(output)[1][7]) == pytest.approx(mean, rel=1e-6)


def test_start_up_lines(two_ranks):
    output = two_ranks[1]
    expected = (
        r"^ > number of parameters on \(tensor, pipeline\) model parallel rank \(0, 0\): 30592$",
        r"^ > padded vocab \(size: 128\) with 0 dummy tokens \(new size: 128\)$",
        r"^ > threads per rank: \d+ \(\d+ cores?, 2 local ranks\)$",
        r"^> building train, validation, and test datasets for GPT \.\.\.\n > datasets target sizes \(minimum size\):\n"
        r"    train:      80\n    validation: 48\n    test:       16\n> finished creating GPT datasets \.\.\.$",
        r"^training \.\.\.\n\[before the start of training step\] datetime: \d{4}-\d\d-\d\d \d\d:\d\d:\d\d $",
        r"^saving checkpoint at iteration       5 to ck in torch_dist format$",
        r"^  successfully saved checkpoint from iteration      10 to ck \[ t 1/1, p 1/1 \]$",
    )
    for pattern in expected:
        assert len(re.findall(pattern, output, re.MULTILINE)) == 1, pattern


def test_plan_line(two_ranks):
    plans = re.findall(r"^ > plan: (\{.*\})$", two_ranks[1], re.MULTILINE)
    assert len(plans) == 1
    plan = json.loads(plans[0])
    assert plan["ops_per_rank"] == [{"F": 2, "B": 0, "W": 0, "BW": 2}] * 2
    assert plan["sharding"] == "no_shard"
    assert plan["persistent_bytes_per_rank"][0] >= 30592 * 16  # weights, gradients, two moments in fp32
    assert set(plan) == {
        "schedule", "hash", "ops_per_rank", "sharding", "persistent_bytes_per_rank", "post_validation",
        "expert_parallel", "context_parallel",
    }  # fmt: skip


def test_validation_lines(two_ranks):
    found = VALIDATION.findall(two_ranks[1])
    assert [where for _, where, *_ in found] == [
        "iteration 5", "iteration 10", "iteration 10 on validation set", "iteration 10 on test set",
    ]  # fmt: skip
    assert all(above == below for above, *_, below in found)


def test_memory_and_timers(two_ranks):
    output = two_ranks[1]
    memory = re.findall(
        r"^\[Rank (\d)\] \(after (\d+) iterations\) memory \(MB\) \| allocated: [\d.]+ \| max allocated: [\d.]+ \| "
        r"reserved: [\d.]+ \| max reserved: [\d.]+$",
        output,
        re.MULTILINE,
    )
    assert sorted(memory) == [("0", "5"), ("1", "5")]
    assert output.count("(min, max) time across ranks (ms):\n") == 2
    timers = {name for name, low, high in TIMER.findall(output) if float(low) <= float(high)}
    assert {
        "forward-backward", "optimizer", "save-checkpoint", "forward-compute", "backward-compute", "batch-generator",
    } <= timers  # fmt: skip


def test_tensorboard_tags(two_ranks):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = event_accumulator.EventAccumulator(str(two_ranks[0] / "tb"))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    expected = {
        "lm loss", "lm loss vs samples", "learning-rate", "learning-rate vs samples", "batch-size", "loss-scale",
        "grad-norm", "grad-norm vs samples", "num-zeros", "params-norm", "iteration-time", "throughput", "world-size",
        "mem-reserved-bytes", "mem-allocated-bytes", "mem-max-allocated-bytes", "lm loss validation",
        "lm loss validation ppl", "forward-backward-time",
    }  # fmt: skip
    assert expected <= tags, expected - tags
    losses = events.Scalars("lm loss")
    assert [event.step for event in losses] == list(range(1, 11))
    assert [event.step for event in events.Scalars("lm loss vs samples")][-1] == 80
    records = [line for line in launch.metrics_lines(two_ranks[0] / "ck") if "lm loss" in line]
    assert [event.value for event in losses] == pytest.approx([r["lm loss"] for r in records], rel=1e-6)


def test_records(two_ranks):
    folder, _ = two_ranks
    record = launch.exit_record(folder / "ck")
    assert record == {
        "status": 0, "reason": "trained to the end", "iteration": 10, "checkpoint": "ck/iter_0000010", "rank": 0,
        "requeue": False,
    }  # fmt: skip
    lines = launch.metrics_lines(folder / "ck")
    assert [(line["event"], line["iteration"]) for line in lines if "event" in line] == [
        ("start", 0), ("memory", 2), ("checkpoint", 5), ("checkpoint", 10), ("exit", 10),
    ]  # fmt: skip
    assert (folder / "ck" / "latest_checkpointed_iteration.txt").read_text() == "10"
    progress = [line.split("\t") for line in (folder / "ck" / "progress.txt").read_text().splitlines()]
    assert [fields[3] for fields in progress] == ["Starting job", "Saved checkpoint", "Saved checkpoint"]


def test_nothing_is_timed_or_measured_unasked(tmp_path):
    run = launch.ok(launch.run_forked([*launch.TINY, "--train-iters", "2"], cwd=tmp_path))
    assert "time across ranks" not in run.output
    assert "params norm" not in run.output
    assert "num zeros" not in run.output
    assert "throughput" not in run.output
    assert launch.metrics_lines(tmp_path)
    assert launch.exit_record(tmp_path)["checkpoint"] is None


def test_timers_of_level_1(tmp_path):
    flags = "--train-iters 4 --log-interval 2 --timing-log-level 1 --timing-log-option max".split()
    output = launch.ok(
        launch.run_forked([*launch.TINY, *flags], cwd=tmp_path)
    ).output  # the last --log-interval wins
    assert "forward-backward" in output
    assert "max time across ranks (ms):" in output
    assert "forward-compute" not in output


def test_what_was_planned_to_be_held_stands_beside_what_is(two_ranks):
    folder, output = two_ranks
    line = (
        r"^Theoretical memory footprints of pipeline rank 0: weight and optimizer=(\S+) MB, activation=(\S+) MB, "
        r"total=(\S+) MB$"
    )
    rest, more, total = map(float, re.search(line, output, re.MULTILINE).groups())
    assert rest + more == pytest.approx(total, abs=0.02)
    lines = [json.loads(one) for one in (folder / "ck" / "metrics.jsonl").read_text().splitlines()]
    (event,) = [one for one in lines if one.get("event") == "memory"]
    both = event["planned"].keys() & event["measured"].keys()
    assert both == {"weights", "moments", "main_grads", "extra_grads", "figures"}
    assert {kind: event["planned"][kind] for kind in both} == {kind: event["measured"][kind] for kind in both}
    assert event["iteration"] == 2
    assert " memory of pipeline rank 0 by iteration 2, planned / measured: " in output


@pytest.mark.grid
def test_who_runs_out_of_memory_says_what_was_held_where(tmp_path):
    """Half a GiB of data: activations of a long sequence do not fit."""
    words = [
        launch.ROOT / launch.GPT,
        *launch.TINY,
        "--seq-length",
        "2048",
        "--max-position-embeddings",
        "2048",
    ]
    limited = 'ulimit -d 700000; exec "$0" "$@"'
    flags = ("--train-iters", "2", "--report-theoretical-memory", "--threads-per-rank", "1")
    command = ["bash", "-c", limited, sys.executable, *map(str, words), *flags]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 2, run.stderr
    assert re.search(r"out of memory .*\npipeline rank 0, stage 0, iteration 1, 0(F|BW)\d", run.stderr)
    assert re.search(r"\nit holds [\d.]+ MiB, of which the engine moments ", run.stderr)
    assert re.search(
        r"\nplanned: pipeline rank 0 holds the most in 0BW\d: .*\n  [\d.]+ \S+ activations of decoder",
        run.stderr,
    )
