"""Single moves find what squeezing does not."""

import random

from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.placement import LINEAR, Placement
from megatron.core.pipeline_parallel.plan.search.clock import Clock
from megatron.core.pipeline_parallel.plan.search.improve import wander
from megatron.core.pipeline_parallel.plan.search.problem import OrderProblem, fits, plan_of
from megatron.core.pipeline_parallel.plan.verify import verify
from tests.harness.known_orders import one_f_one_b


def problem_of(limit):
    placement = Placement(LINEAR, 3)
    return OrderProblem(placement, 6, CostModel.of_ranks(placement), (limit,) * 3)


def test_moves_shorten_1f1b_within_its_memory():
    problem = problem_of(3.0)
    order = one_f_one_b(problem)
    improved = wander(problem, order, 4000, random.Random(0))
    clock = Clock(problem)
    # 1F1B with B and W apart has a bubble of (p-1) * 2; W's that wait take half of it away.
    assert clock.times(order).cost == 22
    assert clock.times(improved).cost == 20
    assert fits(problem, improved)
    verify(plan_of("improved", problem, improved), problem.costs)


def test_without_tries_nothing_changes():
    problem = problem_of(3.0)
    order = one_f_one_b(problem)
    assert wander(problem, order, 0, random.Random(0)) == order
