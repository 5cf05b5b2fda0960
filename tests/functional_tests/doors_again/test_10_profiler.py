"""E2, number 10: a window of iterations is profiled, and the operations of the plan are ranges of its trace."""

import contextlib
import json
from types import SimpleNamespace

import pytest
import torch

from megatron.core.device import Device
from megatron.core.pipeline_parallel.plan import ir
from megatron.core.pipeline_parallel.plan.measuring.timeline_files import read_timeline
from megatron.training.run.arguments import parse_config
from tests.harness.launch import TINY, ended, metrics_lines, ok, run_folder, run_forked
from tests.harness.scripts import run_script

SMALL = "--micro-batch-size 1 --global-batch-size 4 --train-iters 4 --log-pipeline-timeline timeline".split()
ZERO_BUBBLE = "--pipeline-model-parallel-size 2 --enable-zero-bubble".split()
SHARDED = "--use-custom-fsdp --data-parallel-sharding-strategy optim_grads_params".split()
WINDOW = "--profile --profile-step-start 1 --profile-step-end 3 --profile-ranks 0 1".split()
# An evaluation lies between the iterations of the window: its operations are none of a step's.
EVALUATED = "--eval-interval 2 --eval-iters 1".split()


def train(folder, *flags):
    """The run's folder, and what it said; two ranks, of which iterations 2 and 3 are profiled."""
    words = [*TINY, *SMALL, *WINDOW, "--use-pytorch-profiler", *flags]
    output = ok(run_forked(words, ranks=2, cwd=folder)).output
    return SimpleNamespace(folder=folder, run=run_folder(folder), output=output)


def trace(done, rank):
    return done.run / "profile" / f"rank-{rank}-iterations-2-to-3.pt.trace.json"


def ranges(path):
    """Names of operations and iterations in a trace, in the order in which they began; events of the file."""
    events = json.loads(path.read_text())["traceEvents"]
    named = [event for event in events if event.get("cat") == "user_annotation" and is_ours(event["name"])]
    return [event["name"] for event in sorted(named, key=lambda one: (one["ts"], -one["dur"]))], events


def is_ours(name):
    with contextlib.suppress(ir.PlanError):
        return bool(ir.parse_op(name))
    return name.startswith("iteration ")


@pytest.fixture(scope="module")
def pipelined(tmp_path_factory):
    return train(tmp_path_factory.mktemp("pipelined"), *ZERO_BUBBLE, *EVALUATED, "--log-memory-interval", "3")


@pytest.mark.grid
def test_a_zero_bubble_trace_has_the_plans_operations_in_the_plans_order_and_no_others(pipelined):
    plan = read_timeline(pipelined.folder / "timeline")[-1].plan
    for rank in range(2):
        texts = [ir.op_text(op) for op in plan.rows[rank]]
        assert {"F", "B", "W"} <= {ir.NAMES[op[0]] for op in plan.rows[rank]}
        found, _ = ranges(trace(pipelined, rank))
        assert found == ["iteration 2", *texts, "iteration 3", *texts]


def test_traces_are_named_in_the_log_and_in_the_report(pipelined):
    assert (
        f" > profile of iterations 2 to 3: {trace(pipelined, 0).relative_to(pipelined.folder)}"
        in pipelined.output
    )
    assert "USDT" not in pipelined.output  # what torch's profiler says to its makers
    (event,) = [one for one in metrics_lines(pipelined.folder) if one.get("event") == "profile"]
    assert event["traces"] == [str(trace(pipelined, rank).relative_to(pipelined.folder)) for rank in range(2)]
    assert run_script("tools/report.py", pipelined.run).returncode == 0
    assert event["traces"][1] in (pipelined.run / "report.html").read_text()


def test_memory_is_said_at_each_interval(pipelined):
    said = [line for line in pipelined.output.splitlines() if "memory (MB)" in line]
    assert sorted(line.split(" |")[0] for line in said) == [
        f"[Rank {rank}] (after 3 iterations) memory (MB)" for rank in range(2)
    ]


@pytest.mark.grid
def test_gathers_and_reductions_are_ranges_with_shapes_and_call_stacks(tmp_path):
    more = ["--pytorch-profiler-collect-shapes", "--pytorch-profiler-collect-callstack"]
    done = train(tmp_path, *SHARDED, *more)
    plan = read_timeline(tmp_path / "timeline")[-1].plan
    for rank in range(2):
        found, events = ranges(trace(done, rank))
        texts = [ir.op_text(op) for op in plan.rows[0]]
        assert {"UNSHARD", "RESHARD", "REDUCE"} <= {ir.NAMES[op[0]] for op in plan.rows[0]}
        # Those in the middle of a computation stand before it in the plan, and begin behind it.
        assert sorted(found) == sorted(["iteration 2", *texts, "iteration 3", *texts])
        assert any("Input Dims" in event.get("args", {}) for event in events)
        assert any(event.get("cat") == "python_function" for event in events)


@pytest.mark.grid
def test_a_folder_that_cannot_be_written_does_not_end_the_run(tmp_path):
    (tmp_path / "ck").mkdir()
    (tmp_path / "ck" / "profile").write_text("in the way")
    words = [*TINY, *"--train-iters 3 --save ck --save-interval 3".split(), *WINDOW, "--use-pytorch-profiler"]
    done = ok(run_forked(words, cwd=tmp_path))
    assert "WARNING: rank 0 has no trace: [Errno 17] File exists: 'ck/profile'" in done.output
    assert list(done.losses()) == [1, 2, 3]


@pytest.mark.grid
def test_a_run_that_ends_inside_of_the_window_writes_what_there_is(tmp_path):
    words = [*TINY, *"--train-iters 2".split(), *WINDOW, "--use-pytorch-profiler"]
    done = ok(run_forked(words, cwd=tmp_path))
    assert "profile of iterations 2 to 2: " in done.output
    done = ok(run_forked([*words, "--train-iters", "1"], cwd=tmp_path))
    assert "iterations 2 to 3 were not reached: the last was 1" in done.output


def flags_of(*flags):
    return parse_config([*TINY, "--train-iters", "4", *flags])


@pytest.mark.parametrize(
    ("flags", "warning"),
    [
        ("--profile", "--profile has no effect on CPU: nsys records what a GPU does"),
        ("--use-pytorch-profiler", "--use-pytorch-profiler has no effect without --profile"),
        ("--record-memory-history", "--record-memory-history has no effect on CPU"),
        ("--memory-snapshot-path a.pickle", "--memory-snapshot-path a.pickle has no effect without --record"),
        ("--log-device-memory-used", "--log-device-memory-used has no effect on CPU"),
        ("--profile --profile-ranks 0 7", "there is no rank 7 among 1"),
        (
            "--profile --pytorch-profiler-collect-shapes",
            "shapes has no effect without --use-pytorch-profiler",
        ),
    ],
)
def test_what_is_not_recorded_is_said(flags, warning):
    assert any(warning in one for one in flags_of(*flags.split()).warnings)


@pytest.mark.grid
def test_megatrons_defaults_and_a_window_of_nothing(tmp_path):
    profiling = flags_of().profiling
    assert (profiling.profile_step_start, profiling.profile_step_end, profiling.profile_ranks) == (
        10,
        12,
        (0,),
    )
    refused = ended(run_forked([*TINY, "--train-iters", "4", "--profile", "--profile-step-end", "3"]), 2)
    assert "--profile-step-end 3 is not above --profile-step-start 10" in refused.output


def test_on_cuda_nsys_gets_ranges_between_start_and_stop_and_snapshots_are_written(monkeypatch):
    """Without a GPU: which calls of torch are made."""
    calls = []

    def note(name, answer=None):
        return lambda *args, **kwargs: calls.append((name, *args, *kwargs.values())) or answer

    monkeypatch.setattr(torch.cuda.profiler, "start", note("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", note("stop"))
    monkeypatch.setattr(torch.autograd.profiler, "emit_nvtx", note("emit", contextlib.nullcontext()))
    monkeypatch.setattr(torch.cuda.nvtx, "range", note("range", contextlib.nullcontext()))
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", note("history"))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", note("snapshot"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (30, 100))
    device = Device("cuda")
    with device.captured(), device.nvtx_range("0F0"):
        pass
    assert calls == [("start",), ("emit", True), ("range", "0F0"), ("stop",)]
    assert device.record_memory_history()
    device.write_memory_snapshot("there")
    assert calls[4:] == [("history", 100_000), ("snapshot", "there")]
    assert (device.used_bytes(), Device("cpu").used_bytes()) == (70, None)
    assert not Device("cpu").record_memory_history()
