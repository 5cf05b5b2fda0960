"""The clock of searches agrees with the simulator; backwards it times the mirrored order."""

import pytest

from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.placement import LINEAR, V_SHAPED, Placement
from megatron.core.pipeline_parallel.plan.search.clock import Clock
from megatron.core.pipeline_parallel.plan.search.initial_orders import unit_zbv
from megatron.core.pipeline_parallel.plan.search.problem import OrderProblem, plan_of
from megatron.core.pipeline_parallel.plan.simulate import simulate
from tests.harness.known_orders import zb_h


def examples():
    for kind, make in ((LINEAR, lambda problem: zb_h(problem, 1)), (V_SHAPED, unit_zbv)):
        for figures in ({}, {"time_f": (3, 1, 2), "time_b": (1.5,), "time_w": (0,), "comm": 0.7}):
            placement = Placement(kind, 3, 2 if kind == V_SHAPED else 1)
            problem = OrderProblem(placement, 7, CostModel.of_ranks(placement, **figures), (1e9,) * 3)
            yield problem, make(problem)


def test_times_are_the_simulators():
    for problem, order in examples():
        times = Clock(problem).times(order)
        simulation = simulate(plan_of("known", problem, order), problem.costs)
        for mine, theirs in zip(times.starts, simulation.timeline.starts, strict=True):
            assert mine == pytest.approx(theirs)
        assert (times.cost, times.makespan) == pytest.approx((simulation.cost, simulation.makespan))


def test_backwards_the_mirrored_order_takes_no_longer():
    # The mirrored schedule is one that the reversed rules allow, so the earliest one ends no later.
    for problem, order in examples():
        times = Clock(problem).times(order)
        back = Clock(problem, reverse=True).times([row[::-1] for row in order])
        assert back.makespan <= times.makespan + 1e-9


def test_an_order_that_stops_has_no_times():
    problem, order = next(examples())
    order[1] = order[1][::-1]  # begins with a W and ends with an F
    assert Clock(problem).times(order) is None


def test_ranks_can_begin_later():
    problem, order = next(examples())
    plain, late = (Clock(problem).times(order, available) for available in (None, (5.0, 5.0, 5.0)))
    assert late.starts[0][0] == plain.starts[0][0] + 5
    assert late.cost == pytest.approx(plain.cost)
