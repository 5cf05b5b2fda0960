"""Times against an oracle that knows only the dependencies."""

import functools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.pipeline_parallel.plan.build import build_plan
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import BW, F, Plan, PlanError, W, parse_row
from megatron.core.pipeline_parallel.plan.passes.lower import lower
from megatron.core.pipeline_parallel.plan.placement import Placement
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.plan.simulate import simulate


def longest_path(plan, costs):
    """End of every computation: the longest way through dependencies and row orders, by recursion."""
    ranks, durations = plan.placement.ranks(), costs.durations()
    place = {op[:3]: (rank, i) for rank, row in enumerate(plan.rows) for i, op in enumerate(row)}

    @functools.cache
    def end(kind, stage, microbatch):
        rank, i = place[kind, stage, microbatch]
        start = end(*plan.rows[rank][i - 1][:3]) if i else 0.0
        source = stage - 1 if kind == F else stage + 1
        if kind != W and 0 <= source < len(ranks):
            producer = next(k for k in ((F,) if kind == F else (BW, 1)) if (k, source, microbatch) in place)
            start = max(start, end(producer, source, microbatch) + costs.comm * (ranks[source] != rank))
        return start + durations[kind][stage]

    return {key: end(*key) for key in place}


@st.composite
def cases(draw):
    p, v = draw(st.integers(1, 5)), draw(st.sampled_from([1, 2, 3]))
    name = "interleaved" if v > 1 else draw(st.sampled_from(["gpipe", "1f1b"]))
    m = draw(st.integers(p if v > 1 else 1, 3 * p))
    plan = build_plan(name, Request(p, m, v))
    times = st.lists(st.sampled_from([0.0, 0.25, 1.0, 1.5, 3.0]), min_size=p, max_size=p)
    comm = draw(st.sampled_from([0.0, 0.5, 4.0]))
    return plan, CostModel.of_ranks(
        plan.placement, time_f=draw(times), time_b=draw(times), time_w=draw(times), comm=comm
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(cases())
def test_times_are_the_longest_path_with_and_without_transfers(case):
    plan, costs = case
    expected = longest_path(plan, costs)
    lowered = lower(plan, costs)
    for one in (plan, lowered):
        simulation = simulate(one, costs)
        ends = {
            op[:3]: simulation.timeline.ends[rank][i]
            for rank, row in enumerate(one.rows)
            for i, op in enumerate(row)
            if op[0] <= BW
        }
        assert ends == pytest.approx(expected)
        assert simulation.makespan == pytest.approx(max(expected.values()))


def test_figures_by_hand():
    plan = build_plan("1f1b", Request(2, 2))
    costs = CostModel.of_ranks(plan.placement, time_f=[1, 2], time_b=[1, 1], time_w=[1, 2], comm=0.5)
    simulation = simulate(lower(plan, costs), costs)
    # rank 1: F0 1.5-3.5, BW0 -6.5, F1 -8.5, BW1 -11.5; rank 0: BW1 12-14
    assert simulation.makespan == 14
    assert simulation.cost == 14
    assert simulation.bubble_time == 14 - 2 * 5
    assert simulation.bubble_rate == pytest.approx(4 / 14)
    assert simulation.idle == (8, 4)
    assert simulation.peak_activation == (2, 1)
    assert simulation.num_messages == 4


def test_cost_is_counted_from_the_first_start_of_a_stage():
    """One microbatch through a slow last stage: no stage is busy from 0 to the end but the first."""
    plan = build_plan("gpipe", Request(2, 1))
    costs = CostModel.of_ranks(plan.placement, time_f=[1, 10], time_b=[0], time_w=[0])
    simulation = simulate(plan, costs)
    assert simulation.cost == 11
    assert simulation.bubble_time == 1


def test_overlapped_pairs_run_as_one():
    plan = Plan("x", Placement("linear", 1), 2, (parse_row("0F0 (0F1;0BW0) 0BW1".split()),))
    simulation = simulate(plan, CostModel.of_ranks(plan.placement))
    assert simulation.timeline.starts == [[0, 1, 1, 4]]
    assert simulation.timeline.ends == [[1, 4, 4, 6]]
    # what data parallelism does between the two is of the pair
    plan = Plan("x", Placement("linear", 1), 2, (parse_row("0F0 (0F1;0RESHARD;0BW0) 0BW1".split()),))
    simulation = simulate(plan, CostModel.of_ranks(plan.placement))
    assert simulation.timeline.starts == [[0, 1, 1, 1, 4]]
    assert simulation.timeline.ends == [[1, 4, 4, 4, 6]]


def test_no_time_at_all():
    plan = build_plan("1f1b", Request(2, 3))
    costs = CostModel.of_ranks(plan.placement, time_f=[0], time_b=[0], time_w=[0])
    simulation = simulate(lower(plan, costs), costs)
    assert simulation.makespan == simulation.bubble_rate == 0
    assert not math.isnan(simulation.bubble_rate)


def test_deadlock_is_an_error():
    plan = Plan("x", Placement("linear", 2), 1, (parse_row(["0BW0", "0F0"]), parse_row(["1F0", "1BW0"])))
    with pytest.raises(PlanError, match="deadlock: rank 0 stops at place 0, 0BW0"):
        simulate(plan, CostModel.of_ranks(plan.placement))
