"""The profiler beside an executor: what it keeps, what it says of times and memory, and how it goes with others."""

from __future__ import annotations

import json
import time

import pytest
import torch

from megatron.core.device import Device
from megatron.core.pipeline_parallel.plan.build import build_plan
from megatron.core.pipeline_parallel.plan.ir import IS_COMPUTE, Kind
from megatron.core.pipeline_parallel.plan.measuring.measured_costs import costs_of
from megatron.core.pipeline_parallel.plan.measuring.replan import Bubbles
from megatron.core.pipeline_parallel.plan.measuring.timeline_files import read_timeline
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.runtime.executor import Executor
from megatron.core.pipeline_parallel.runtime.p2p import P2P
from megatron.core.pipeline_parallel.runtime.profiler import MOST_STEPS, Profiler
from megatron.core.pipeline_parallel.runtime.recorder import Recorder
from megatron.core.pipeline_parallel.runtime.stage import ModelStage
from megatron.core.pipeline_parallel.runtime.timeline_writer import TimelineWriter
from megatron.core.tensor_parallel.parallel_layers import column_linear
from megatron.core.weight_grad import WeightGradAccumulator
from tests.harness.ranks import run_ranks
from tests.harness.toy_pipeline import ToyChunk, lowered
from tools.schedules.overlay import figures_of_ranks

SLOW_S = 0.02
ROWS, WIDTH, LAYERS = 512, 256, 6
TENSOR = 4 * ROWS * WIDTH


def test_two_ranks_measure_and_come_to_the_same_costs(tmp_path):
    """Stage 1 is slow in its forwards; the writer and the profiler record the same run."""
    plan = lowered(build_plan("zb-h1", Request(2, 4)))

    def check(ctx):
        ps = ctx.make_ps(pp=2)
        profiler = Profiler(ps.device, ps.pp_group.ranks, start=3, end=5)
        recorder = Recorder(ps.device, [TimelineWriter(tmp_path, ps), profiler])
        chunk = ToyChunk(ps.pp_rank, 2)

        def run(microbatch, hidden):
            time.sleep(SLOW_S * ps.pp_rank)
            return chunk.run(microbatch, hidden)

        stage = ModelStage(run, chunk.sink, begins=chunk.begins, ends=chunk.ends)
        channel = P2P(ps)
        assert channel.ping() == 0  # no link has carried anything
        executor = Executor(plan, ps.pp_rank, {ps.pp_rank: stage}, channel, recorder=recorder)
        for iteration in range(7):
            executor.run(iteration)
            if iteration == 3:
                recorder.message_takes(channel.ping())
        recorder.close()
        return profiler.local_figures(), profiler.figures_of_step(4)

    figures, of_step = zip(*run_ranks(check, 2), strict=True)
    assert [[step[0] for step in one["steps"]] for one in figures] == [[3, 4], [3, 4]]
    costs = costs_of(json.loads(json.dumps(figures)), plan.placement)
    assert costs == costs_of(figures[::-1], plan.placement)
    assert 0.9 * SLOW_S < costs.f[1] / 1e9 < 3 * SLOW_S
    assert costs.f[0] < 0.5 * costs.f[1]
    assert 0 < costs.comm < costs.f[1]
    assert min(costs.b + costs.w) > 0
    # the timeline of the same steps says the same
    step = next(one for one in read_timeline(tmp_path) if one.iteration == 3)
    busiest = sum(
        span.busy_s for op, span in zip(plan.rows[1], step.spans[1], strict=True) if IS_COMPUTE[op[0]]
    )
    assert figures[1]["steps"][0][2] == pytest.approx(1e9 * busiest, rel=1e-3, abs=1e5)
    # so do both bubbles of a step, whose times are rounded to nanoseconds
    said = Bubbles.of(json.loads(json.dumps(of_step)), plan, None)
    step = next(one for one in read_timeline(tmp_path) if one.iteration == 4)
    written = Bubbles.of(figures_of_ranks(step), step.plan, None)
    assert (written.iteration, said.iteration) == (4, 4)
    assert (written.planned, written.measured) == pytest.approx((said.planned, said.measured), abs=5e-5)
    assert 0 < said.measured < 1


class Layers:
    """LAYERS linear layers on [ROWS, WIDTH]: of each, B and W need its input, which F leaves."""

    def __init__(self):
        self.sink = WeightGradAccumulator()
        self.weights = [torch.randn(WIDTH, WIDTH).requires_grad_() for _ in range(LAYERS)]
        shapes = {str(n): (WIDTH, WIDTH) for n in range(LAYERS)}
        self.sink.bind_new(shapes, torch.float32, torch.device("cpu"))

    def run(self, microbatch, hidden):
        x = torch.randn(ROWS, WIDTH)
        for n, weight in enumerate(self.weights):
            x = column_linear(x, weight, None, sink=self.sink, key=str(n))
        return x.square().mean()  # which holds x as well


def run_alone(name, profiler, iterations, microbatches=4, stage=None):
    plan = lowered(build_plan(name, Request(1, microbatches)))
    layers = Layers()
    own = stage or ModelStage(layers.run, layers.sink, begins=True, ends=True)
    recorder = Recorder(Device("cpu"), [profiler])
    executor = Executor(plan, 0, {0: own}, None, recorder=recorder)
    executor._channel = NoChannel()
    for iteration in iterations:
        executor.run(iteration)


class NoChannel:
    def drain(self):
        pass


def profiler_of(**window):
    return Profiler(Device("cpu"), (0,), **window)


def test_the_peak_is_what_the_graph_and_the_filed_operands_hold():
    """F leaves LAYERS inputs and the output; between B and W there are inputs and gradients of LAYERS outputs."""
    profiler = profiler_of(start=1, end=4)
    run_alone("zb-h1", profiler, range(4))
    assert profiler.local_figures()["peak_bytes"] == pytest.approx(2 * LAYERS * TENSOR, rel=0.2)
    fused = profiler_of(start=1, end=4)
    run_alone("gpipe", fused, range(4), microbatches=3)
    assert fused.local_figures()["peak_bytes"] == pytest.approx(3 * (LAYERS + 1) * TENSOR, rel=0.1)


def test_the_window_the_interval_and_nothing_else():
    profiler = profiler_of(start=2, end=4, interval=5)
    assert profiler.figures_of_step(5) is None
    run_alone("zb-h1", profiler, range(1, 13), microbatches=1)
    figures = profiler.local_figures()
    assert [step[0] for step in figures["steps"]] == [2, 3, 5, 10]
    for step in figures["steps"]:
        assert profiler.figures_of_step(step[0])["steps"] == [list(step)]
    assert profiler.figures_of_step(4) is None
    assert [row[:2] for row in figures["times"]] == [[Kind.F, 0], [Kind.B, 0], [Kind.W, 0]]
    profiler.forget(3)
    assert [step[0] for step in profiler.local_figures()["steps"]] == [5, 10]
    profiler.forget()
    assert profiler.local_figures() is None
    run_alone("gpipe", profiler, [15], microbatches=1)
    assert [row[0] for row in profiler.local_figures()["times"]] == [Kind.F, Kind.BW]
    run_alone("gpipe", profiler, [15] * (MOST_STEPS + 3), microbatches=1)
    assert len(profiler.local_figures()["steps"]) == MOST_STEPS


def test_a_step_that_breaks_off_or_repeats_forwards_is_not_kept():
    profiler = profiler_of(start=0, end=9)
    plan = lowered(build_plan("gpipe", Request(1, 2)))

    def run(microbatch, hidden):
        if microbatch == 1:
            raise FloatingPointError("no number")
        return torch.ones((), requires_grad=True)

    with pytest.raises(FloatingPointError):
        run_alone("gpipe", profiler, [0], 2, ModelStage(run, None, begins=True, ends=True))
    assert profiler.local_figures() is None
    recorder = Recorder(Device("cpu"), [profiler])
    recorder.begin_step(plan, 0, 1)
    for place in range(4):
        if place == 2:
            recorder.repeated()
        recorder.record(place, 0.0, 1.0, 0.0)
    recorder.end_step()
    assert profiler.local_figures() is None
    recorder.begin_step(plan, 0, 2)
    for place in range(4):
        recorder.record(place, float(place), place + 1.0, 0.0)
    recorder.end_step()
    assert profiler.figures_of_step(2)["steps"] == [[2, 4_000_000_000, 4_000_000_000]]


class Notes:
    """Reads steps of even iterations."""

    def __init__(self):
        self.said = []

    def begins(self, step):
        self.said.append(("begins", step.iteration))
        return step.iteration % 2 == 0

    def looks(self):
        self.said.append("looks")

    def reads(self, step):
        self.said.append(
            ([(one.start_s, one.end_s, one.wait_s, one.lane_s) for one in step.spans], step.link_ns)
        )

    def close(self):
        self.said.append("close")


def test_each_of_several_readers_is_handed_the_same_record_of_a_step_it_reads():
    """In whole nanoseconds."""
    first, second = Notes(), Notes()
    both = Recorder(Device("cpu"), [first, second])
    both.message_takes(7)
    plan = lowered(build_plan("gpipe", Request(1, 1)))
    for iteration in (3, 4):
        both.begin_step(plan, 0, iteration)
        both.record(1, 101.0000000001, 102.0, 0.5, 0.25)
        both.record(0, 100.0, 101.0, 0.0)
        if iteration == 4:
            with pytest.raises(AssertionError, match="operation 0 a second time"):
                both.record(0, 100.0, 101.0, 0.0)
        both.end_step()
    both.close()
    times = [(100.0, 101.0, 0.0, 0.0), (101.0, 102.0, 0.5, 0.25)]
    expected = [("begins", 3), ("begins", 4), "looks", "looks", (times, 7), "close"]
    assert first.said == second.said == expected


def test_the_window_moves():
    profiler = Profiler(Device("cpu"), (0, 1), start=3, end=5)
    assert [n for n in range(10) if profiler.watches(n)] == [3, 4]
    profiler.move_window(7, 9)
    assert [n for n in range(10) if profiler.watches(n)] == [7, 8]


def test_what_comes_and_goes_by_the_plan_is_no_activation():
    held = [0]
    profiler = Profiler(Device("cpu"), (0,), start=0, end=1, transient_bytes=lambda: held[0])
    before = profiler.in_use()
    held[0] = 1 << 40
    assert profiler.in_use() < before - (1 << 39)
