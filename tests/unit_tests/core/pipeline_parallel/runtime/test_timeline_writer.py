"""What a run writes about its timeline is what plan/measuring/timeline_files.py reads."""

from __future__ import annotations

import json
import time

import pytest
import torch

from megatron.core.device import Device
from megatron.core.pipeline_parallel.plan.build import build_plan
from megatron.core.pipeline_parallel.plan.ir import Plan, op_text, parse_row
from megatron.core.pipeline_parallel.plan.measuring.timeline_files import read_timeline
from megatron.core.pipeline_parallel.plan.placement import LINEAR, Placement
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.runtime.data_parallel_lane import UnitBoundaries
from megatron.core.pipeline_parallel.runtime.executor import Executor
from megatron.core.pipeline_parallel.runtime.p2p import P2P
from megatron.core.pipeline_parallel.runtime.recorder import Recorder
from megatron.core.pipeline_parallel.runtime.stage import ModelStage
from megatron.core.pipeline_parallel.runtime.timeline_writer import TimelineWriter
from megatron.core.transport.parallel_state import single_process
from tests.harness.ranks import run_ranks
from tests.harness.telling_stages import Log, NoChannel, TellingStage, units_of
from tests.harness.toy_pipeline import ToyChunk, lowered

SLOW_S = 0.03


def test_two_pipelines_write_and_are_read_back(tmp_path):
    """Two data parallel copies of a pipeline of 2; stage 1's forwards are slow."""
    plans = [lowered(build_plan("1f1b", Request(2, m))) for m in (3, 2)]

    def check(ctx):
        ps = ctx.make_ps(pp=2, dp=2)
        writer = TimelineWriter(tmp_path / "timeline", ps)
        channel = P2P(ps)
        chunk = ToyChunk(ps.pp_rank, 2)

        def run(microbatch, hidden):
            time.sleep(SLOW_S * ps.pp_rank)
            return chunk.run(microbatch, hidden)

        stage = ModelStage(run, chunk.sink, begins=chunk.begins, ends=chunk.ends)
        recorder = Recorder(ps.device, [writer])
        executors = [Executor(p, ps.pp_rank, {ps.pp_rank: stage}, channel, recorder=recorder) for p in plans]
        for iteration, executor in ((7, executors[0]), (8, executors[1]), (9, executors[0])):
            executor.run(iteration)
        recorder.close()
        return ps.pp_group.ranks

    pipelines = sorted(set(run_ranks(check, 4)))
    steps = read_timeline(tmp_path / "timeline")
    assert [(step.iteration, step.pipeline) for step in steps] == [
        (i, p) for i in (7, 8, 9) for p in pipelines
    ]
    for step in steps:
        plan = plans[step.iteration % 7 % 2]
        assert step.plan == plan
        for row, spans in zip(plan.rows, step.spans, strict=True):
            assert len(spans) == len(row)
            ends = [0.0]
            for span in spans:
                assert span.start_s >= 0
                assert 0 <= span.wait_s <= span.end_s - span.start_s + 1e-6
                assert span.end_s >= ends[-1]
                ends.append(span.end_s)
        assert max(span.end_s for row in step.spans for span in row) >= SLOW_S * plan.num_microbatches
        times = {
            op_text(op): span
            for row, spans in zip(plan.rows, step.spans, strict=True)
            for op, span in zip(row, spans, strict=True)
        }
        assert times["1F0"].busy_s >= SLOW_S * 0.9  # its own time is not waiting
        # One clock: what is received ends after it was computed.
        assert times["1F0"].end_s > times["0F0"].end_s
        assert times["0BW0"].end_s > times["1BW0"].end_s


def test_an_earlier_timeline_is_moved_aside_whole_and_still_readable(tmp_path):
    """Also of a run that had more ranks: its files would be taken for this run's."""
    plan = build_plan("1f1b", Request(1, 2))

    def run(ctx, iteration):
        ps = ctx.make_ps(dp=ctx.world_size)
        writer = TimelineWriter(tmp_path, ps)
        stage = ModelStage(lambda m, h: torch.ones((), requires_grad=True), None, begins=True, ends=True)
        Executor(plan, 0, {0: stage}, P2P(ps), recorder=Recorder(ps.device, [writer])).run(iteration)
        writer.close()

    for iteration, ranks in enumerate((2, 3, 1, 2)):
        run_ranks(run, ranks, iteration)
    for folder, iteration, ranks in ((".", 3, 2), ("old-1", 0, 2), ("old-2", 1, 3), ("old-3", 2, 1)):
        steps = read_timeline(tmp_path / folder)
        assert [(step.iteration, step.pipeline) for step in steps] == [
            (iteration, (r,)) for r in range(ranks)
        ]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("old-1", "old-2", "old-3", "rank-00000.jsonl", "rank-00001.jsonl")
    ]


def test_a_rank_moves_its_own_file_where_the_first_one_does_not_see_it(tmp_path):
    def check(ctx):
        folder = tmp_path / f"machine{ctx.rank}"
        for _ in range(2):
            TimelineWriter(folder, ctx.make_ps(dp=2)).close()
        return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.jsonl"))

    for rank, found in enumerate(run_ranks(check, 2)):
        assert found == [f"old-1/rank-0000{rank}.jsonl", f"rank-0000{rank}.jsonl"]


def test_what_cannot_be_moved_ends_every_rank(tmp_path):
    (tmp_path / "rank-00000.jsonl").touch()
    (tmp_path / "old-1").touch()  # no folder

    def check(ctx):
        with pytest.raises(OSError, match="old-1"):
            TimelineWriter(tmp_path, ctx.make_ps(dp=2))

    run_ranks(check, 2)
    assert (tmp_path / "rank-00000.jsonl").exists()


def test_a_step_that_breaks_off_is_written_as_far_as_it_came(tmp_path):
    def run(microbatch, hidden):
        if microbatch == 2:
            raise FloatingPointError("no number")
        return torch.ones((), requires_grad=True)

    writer = TimelineWriter(tmp_path, single_process())
    stage = ModelStage(run, None, begins=True, ends=True)
    recorder = Recorder(Device("cpu"), [writer])
    executor = Executor(build_plan("1f1b", Request(1, 3)), 0, {0: stage}, None, recorder=recorder)
    with pytest.raises(FloatingPointError):
        executor.run(4)
    writer.close()
    header, *lines = map(json.loads, (tmp_path / "rank-00000.jsonl").read_text().splitlines())
    assert header["schedule"] == "1f1b"
    assert header["stages"] == [0]
    assert [line["op"] for line in lines] == ["0F0", "0BW0", "0F1", "0BW1"]
    assert read_timeline(tmp_path) == []


def test_waiting_for_a_message_is_told_apart():
    """By a clock that only waits (5 s) and computations (1 s) move."""
    clock = [0.0]
    told = []

    class Times:
        now = staticmethod(lambda: clock[0])
        begin_step = staticmethod(lambda plan, rank, iteration: told.append((plan.schedule, rank, iteration)))
        record = staticmethod(lambda *times: told.append(times))
        end_step = staticmethod(lambda: told.append("end"))

    class Arrival:
        def wait(self):
            clock[0] += 5
            return torch.zeros(1)

    class Channel:
        post = staticmethod(lambda messages: [Arrival() for _, tensor in messages if tensor is None])
        drain = staticmethod(lambda: None)

    def run(microbatch, hidden):
        clock[0] += 1
        return hidden.sum()

    stage = ModelStage(run, None, begins=False, ends=True)
    plan = lowered(build_plan("1f1b", Request(2, 1)))
    Executor(plan, 1, {1: stage}, Channel(), recorder=Times()).run(3)
    times = [(0, 0, 0, 0, 0), (1, 0, 6, 5, 0), (2, 6, 6, 0, 0), (3, 6, 6, 0, 0)]
    assert told == [("1f1b", 1, 3), *times, "end"]


def test_operations_in_the_middle_of_computations_are_written_in_the_order_of_the_row(tmp_path):
    """They are recorded as they end: inside a computation, which comes behind them."""
    writer = TimelineWriter(tmp_path, single_process())
    row = parse_row("0UNSHARD[0:4] 0RESHARD[0:4].4 0F0 0REDUCE[3:4].2 0BW0".split())
    plan = Plan("by hand", Placement(LINEAR, 1), 1, (row,))
    log, boundaries = Log(), UnitBoundaries()
    stage = TellingStage(log, boundaries)
    units = {0: units_of()}
    recorder = Recorder(Device("cpu"), [writer])
    executor = Executor(
        plan, 0, {0: stage}, NoChannel(), log, units=units, boundaries=boundaries, recorder=recorder
    )
    executor.run(1)
    executor.run(2)
    writer.close()
    header, *lines = map(json.loads, (tmp_path / "rank-00000.jsonl").read_text().splitlines())
    assert header["num_ops"] == len(row)
    assert [line["op"] for line in lines] == [op_text(op) for op in row] * 2
    assert [set(line) - {"iteration", "op", "start_s", "end_s", "wait_s"} for line in lines] == [
        set(),
        set(),
        {"lane_s"},
        set(),
        {"lane_s"},
    ] * 2
    gather, freed, forward, *_ = lines
    assert gather["start_s"] <= forward["start_s"] <= freed["start_s"] <= gather["end_s"] <= forward["end_s"]
