"""The files of a measured timeline, read without the program that writes them."""

from __future__ import annotations

import dataclasses
import json

import pytest

from megatron.core.pipeline_parallel.plan.build import build_plan
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.held.lanes import LaneCosts, Lanes
from megatron.core.pipeline_parallel.plan.ir import Plan, PlanError, parse_row
from megatron.core.pipeline_parallel.plan.measuring.timeline_files import (
    OpTimes,
    file_name,
    header_line,
    op_lines,
    read_timeline,
)
from megatron.core.pipeline_parallel.plan.passes.add_residency import add_residency
from megatron.core.pipeline_parallel.plan.passes.lower import lower
from megatron.core.pipeline_parallel.plan.placement import Placement
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.plan.simulate import simulate
from tests.harness.measured_runs import write_timeline
from tests.harness.unit_stages import asked, model


def plan_of(num_ranks=2, microbatches=2):
    plan = build_plan("1f1b", Request(num_ranks, microbatches))
    return lower(plan, CostModel.of_ranks(plan.placement))


def text_of(plan, rank, iterations=(0,), clock=1000.0, pipeline=(4, 6)):
    lines = [header_line(plan, rank, pipeline, clock)]
    for iteration in iterations:
        for place, template in enumerate(op_lines(plan.rows[rank])):
            start = iteration + place / 100
            lines.append(template % (iteration, start, start + 0.01, 0.004))
    return "".join(lines)


def write(folder, plan, clocks=(1000.0, 1000.0), **text):
    for rank, clock in enumerate(clocks):
        (folder / file_name((4, 6)[rank])).write_text(text_of(plan, rank, clock=clock, **text))


def test_clocks_of_ranks_line_up(tmp_path):
    write(tmp_path, plan_of(), clocks=(1000.5, 1000.25), iterations=(0, 1))
    first, second = read_timeline(tmp_path)
    assert (first.iteration, second.iteration) == (0, 1)
    assert first.plan == plan_of()
    assert first.pipeline == (4, 6)
    one = first.spans[0][0]
    assert (one.start_s, one.end_s) == pytest.approx((0.25, 0.26), abs=1e-6)
    assert second.spans[1][0].start_s == 0
    assert OpTimes(1.0, 1.5, 0.2).busy_s == pytest.approx(0.3)


def test_overlapped_pairs_are_read_back(tmp_path):
    row = parse_row(["0F0", "1F0", "1BW0", "(0F1;0BW0)", "1F1", "1BW1", "0BW1"])
    plan = Plan("pairs", Placement("looped", 1, 2), 2, (row,))
    (tmp_path / file_name(0)).write_text(text_of(plan, 0, pipeline=(0,)))
    (step,) = read_timeline(tmp_path)
    assert step.plan == plan
    assert len(step.spans[0]) == len(row)


def test_a_step_that_was_not_finished_is_left_out(tmp_path):
    plan = plan_of()
    write(tmp_path, plan, iterations=(0, 1))
    path = tmp_path / file_name(6)
    path.write_text(path.read_text()[:-20])  # killed while writing
    assert [step.iteration for step in read_timeline(tmp_path)] == [0]


def test_what_is_no_timeline_is_told(tmp_path):
    with pytest.raises(PlanError, match=r"no timeline, that is no files rank-00000\.jsonl"):
        read_timeline(tmp_path)
    plan = plan_of()
    write(tmp_path, plan)
    path = tmp_path / file_name(6)
    good = path.read_text()
    for bad, why in (
        (good.replace('"version": 1', '"version": 9'), r"rank-00006.jsonl, line 1: .*version 9"),
        (good.split("\n", 1)[1], r"rank-00006.jsonl, line 1: .*an operation before the header"),
        (good.replace("1F0", "1Q0"), r"rank-00006.jsonl, line \d: .*'1Q0' is no operation"),
        (good + "{nothing\n", r"line 10: no line of a timeline"),
        (good.replace('"op": "1F1"', '"op": "1F0"'), "do not have the hash that the header says"),
    ):
        assert bad != good
        path.write_text(bad)
        with pytest.raises(PlanError, match=why):
            read_timeline(tmp_path)
    path.unlink()
    with pytest.raises(PlanError, match=r"rank-00006.jsonl is missing of the pipeline of ranks \(4, 6\)"):
        read_timeline(tmp_path)


@pytest.fixture
def shared_by_4(tmp_path):
    """A written step of ranks that share their states, and what its lanes are in ns."""
    plan = plan_of()
    stages, residency = model(plan.placement, 1), asked("optim_grads_params", "budget", 2)
    plan = add_residency(plan, stages, residency, CostModel.of_ranks(plan.placement))
    lanes = Lanes(stages, residency, LaneCosts(latency=2e9, bandwidth=3e-9))
    write_timeline(tmp_path, simulate(plan, CostModel.of_ranks(plan.placement)), lanes, at_rest=70)
    return plan, lanes


def test_gathers_and_reductions_are_read_back_with_what_they_are_about(tmp_path, shared_by_4):
    plan, lanes = shared_by_4
    (step,) = read_timeline(tmp_path)
    assert (step.plan, step.at_rest) == (plan, (70, 71))
    wire = LaneCosts(latency=2.0, bandwidth=pytest.approx(3.0))  # of a second
    assert step.lanes == dataclasses.replace(lanes, costs=wire)


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        ("residency", "ways", -1),
        ("", "at_rest", "70"),
        ("", "lanes", 7),
        ("lanes costs", "latency", "none"),
        ("lanes costs", "bandwidth", 0),
        ("lanes residency", "policy", "whim"),
        ("lanes residency", "budget", [10**400, 1]),
        ("lanes", "stages", []),
        ("lanes stages 0 units 0", "weight_bytes", -1),
        ("lanes stages 0 units 0", "surprise", 1),
        ("lanes stages 0", "forward", [[0]]),
    ],
)
def test_a_header_that_says_something_else_is_told(tmp_path, shared_by_4, where, name, value):
    path = tmp_path / file_name(0)
    first, *lines = path.read_text().splitlines(keepends=True)
    header = at = json.loads(first)
    for step in where.split():
        at = at[int(step) if step.isdigit() else step]
    at[name] = value
    path.write_text("".join([json.dumps(header) + "\n", *lines]))
    with pytest.raises(PlanError, match=r"line 1|header's (lanes are|placement or residency is) wrong"):
        read_timeline(tmp_path)
