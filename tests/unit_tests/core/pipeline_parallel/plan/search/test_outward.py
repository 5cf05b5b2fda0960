"""Blocks laid out from the V's turn: they can repeat, and need less memory than blocks laid out along the way."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.placement import V_SHAPED, Placement
from megatron.core.pipeline_parallel.plan.search.blocks import repeat
from megatron.core.pipeline_parallel.plan.search.outward import Outward, shortest
from megatron.core.pipeline_parallel.plan.search.problem import Problem, fits, plan_of
from megatron.core.pipeline_parallel.plan.simulate import simulate
from megatron.core.pipeline_parallel.plan.verify import verify

ENDLESS = float("inf")


def problem_of(p, m, f, b, w, comm=0.0, limit=ENDLESS):
    placement = Placement(V_SHAPED, p, 2)
    costs = CostModel.of_ranks(placement, time_f=f, time_b=b, time_w=w, comm=comm)
    return Problem(placement, m, costs, (limit,) * p)


def check_repeats(problem, block):
    """Every operation comes after its input, no rank does two things at once, and so the plan runs as laid out."""
    costs, num_stages, period = problem.costs, problem.num_stages, block.period
    durations = [*costs.f, *costs.b, *costs.w]
    route = [*range(num_stages), *range(2 * num_stages - 1, num_stages - 1, -1)]
    latencies = problem.latencies()
    for one, other in itertools.pairwise(route):
        stage, following = one % num_stages, other % num_stages
        delay = latencies[min(stage, following)] if stage != following else 0.0
        assert block.offsets[other] >= block.offsets[one] + durations[one] + delay - 1e-6
    for mine in problem.stages():
        spans = []
        for stage in mine:
            assert (
                block.offsets[2 * num_stages + stage]
                >= block.offsets[num_stages + stage] + costs.b[stage] - 1e-6
            )
            spans += [
                (block.offsets[code] % period, durations[code])
                for code in (stage, num_stages + stage, 2 * num_stages + stage)
                if durations[code] > 0
            ]
        spans.sort()
        for (start, duration), (following, _) in itertools.pairwise([*spans, (spans[0][0] + period, 0.0)]):
            assert start + duration <= following + 1e-6, (spans, period)


def check_plan(problem, block):
    order = block.order(problem)
    plan = plan_of("block", problem, order)
    verify(plan, problem.costs)
    cost = simulate(plan, problem.costs).cost
    longest = max(
        block.offsets[2 * problem.num_stages + stage] + problem.costs.w[stage] - block.offsets[rank]
        for rank, mine in enumerate(problem.stages())
        for stage in mine
    )
    assert cost <= (problem.num_microbatches - 1) * block.period + longest + 1e-6
    assert fits(problem, order) or not block.fits(problem)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.data())
def test_blocks_of_any_costs_repeat(data):
    p = data.draw(st.integers(1, 7))
    uneven = st.lists(st.sampled_from((0.0, 0.5, 1.0, 1.3, 3.0)), min_size=p, max_size=p)
    problem = problem_of(
        p,
        data.draw(st.sampled_from((1, p, 2 * p + 3))),
        [one + 0.1 for one in data.draw(uneven)],
        [one + 0.1 for one in data.draw(uneven)],
        data.draw(uneven),
        data.draw(st.sampled_from((0.0, 0.3, 4.0))),
    )
    period = problem.of_length(1).work * data.draw(st.sampled_from((1.0, 1.1, 1.7)))
    block = Outward(problem, period).block(period * data.draw(st.sampled_from((0.0, 0.25, 0.6))))
    if block is not None:
        check_repeats(problem, block)
        check_plan(problem, block)


@pytest.mark.parametrize(
    ("p", "times", "limit", "stretch"),
    [
        (8, (1.0, 1.0, 0.0, 0.0), 5.0, 1.0),
        (16, (1.0, 1.0, 0.0, 0.0), 9.0, 1.0),
        (12, (1.0, 2.0, 1.0, 0.05), 7.0, 1.06),
        (15, (1.0, 2.0, 1.0, 0.05), 8.0, 1.2),
        (8, (1.0, 1.0, 2.0, 0.3), 4.0, 1.17),
    ],
)
def test_they_do_where_blocks_along_the_way_do_not(p, times, limit, stretch):
    f, b, w, comm = times
    problem = problem_of(p, 2 * p, [f], [b], [w], comm, limit)
    work = problem.of_length(1).work
    found = shortest(problem, work, 2 * work)
    assert [one.period for one in found] == sorted(one.period for one in found)
    assert found[0].period <= stretch * work * (1 + 1e-9)
    for block in found:
        assert block.fits(problem)
        check_repeats(problem, block)
        check_plan(problem, block)
    along = repeat(problem, found[0].period, (0.0,) * 4)
    assert along is None or not along.fits(problem)


def test_nothing_is_found_where_no_period_does():
    problem = problem_of(4, 8, [1.0], [1.0], [1.0], limit=1.0)
    assert shortest(problem, 3.0, 6.0) == []
