"""Squeezing never makes an order worse or bigger than its limit, and turns blocks into good schedules."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.placement import V_SHAPED, Placement
from megatron.core.pipeline_parallel.plan.search.blocks import repeat
from megatron.core.pipeline_parallel.plan.search.clock import Clock
from megatron.core.pipeline_parallel.plan.search.compaction import Compactor, cooling, fill
from megatron.core.pipeline_parallel.plan.search.initial_orders import v_block
from megatron.core.pipeline_parallel.plan.search.problem import OrderProblem, fits, plan_of
from megatron.core.pipeline_parallel.plan.verify import verify
from tests.harness.known_orders import one_f_one_b, zb_h


def v_problem(p, m, limit, **figures):
    placement = Placement(V_SHAPED, p, 2)
    return OrderProblem(placement, m, CostModel.of_ranks(placement, **figures), (limit,) * p)


@pytest.mark.parametrize(("limit", "bubble"), [(4.0, 23 / 6), (5.0, 17 / 6), (6.0, 11 / 6)])
def test_a_v_min_block_grows_into_its_memory(limit, bubble):
    """Every half stage of memory takes half a stage from the bubble, in units of F + B + W of a rank."""
    problem = v_problem(8, 24, limit)
    order = v_block(8, half=False).order(problem)
    squeezed = Compactor(problem).improve(order, (0.0,) * 4)
    assert fits(problem, squeezed)
    assert (Clock(problem).times(squeezed).cost - 72) / 3 == pytest.approx(bubble)
    verify(plan_of("squeezed", problem, squeezed), problem.costs)


def test_filling_delays_nothing():
    problem = v_problem(5, 15, 5.0, time_f=(2,), time_b=(2.2,), time_w=(0.9,), comm=0.1)
    order = repeat(problem, 5.1).order(problem)
    clock = Clock(problem)
    before = clock.times(order)
    filled, walked = fill(clock, [5.0 + 1e-9] * 5, order, before.starts, [0.0] * 5)
    after = clock.times(filled)
    assert after.starts == walked.starts
    assert after.cost == walked.cost
    assert filled != order
    for rank in range(5):
        first, then = ({}, {})
        for starts, row, found in ((before.starts, order, first), (after.starts, filled, then)):
            for start, code in zip(starts[rank], row[rank], strict=True):
                found.setdefault(code, []).append(start)
        assert all(b <= a + 1e-9 for code in first for a, b in zip(first[code], then[code], strict=True))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    p=st.integers(1, 6),
    m=st.integers(1, 14),
    times=st.tuples(*[st.sampled_from((0.0, 0.5, 1.0, 1.7))] * 3),
    comm=st.sampled_from((0.0, 0.4, 3.0)),
    held=st.sampled_from((0.0, 0.5, 1.0)),
    give=st.sampled_from((0.0, 0.5, None)),
)
def test_squeezed_orders_are_right_and_no_worse(p, m, times, comm, held, give):
    placement = Placement("linear", p)
    costs = CostModel.of_ranks(
        placement,
        time_f=times[:1],
        time_b=times[1:2],
        time_w=times[2:],
        comm=comm,
        memory_after_b=held,
    )
    problem = OrderProblem(placement, m, costs, (2.0 * p,) * p)
    gives = cooling(random.Random(0)) if give is None else (give,) * 3
    for order in (zb_h(problem, 2), one_f_one_b(problem)):
        before = Clock(problem).times(order)
        squeezed = Compactor(problem).improve(order, gives)
        after = Clock(problem).times(squeezed)
        assert after.cost <= before.cost * (1 + 1e-9)
        assert fits(problem, squeezed)
        verify(plan_of("squeezed", problem, squeezed), costs)
