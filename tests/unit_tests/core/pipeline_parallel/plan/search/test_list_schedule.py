"""List scheduling: patience, and no deadlock of memory on the V."""

import pytest

from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.placement import LINEAR, LOOPED, V_SHAPED, Placement
from megatron.core.pipeline_parallel.plan.search.list_schedule import Patience, list_schedule
from megatron.core.pipeline_parallel.plan.search.problem import OrderProblem, fits, plan_of
from megatron.core.pipeline_parallel.plan.verify import verify


def problem_of(kind, p, m, limit, **figures):
    placement = Placement(kind, p, 2 if kind == V_SHAPED else 1)
    return OrderProblem(placement, m, CostModel.of_ranks(placement, **figures), (limit,) * p)


def test_backwards_first_gives_1f1b_on_the_last_rank():
    problem = problem_of(LINEAR, 3, 4, 99.0)
    order = list_schedule(problem, Patience(0, 0))
    assert order[2] == [2, 5, 2, 5, 2, 5, 2, 5, 8, 8, 8, 8]


@pytest.mark.parametrize("limit", [1.0, 1.5, 2.0, 4.0])
@pytest.mark.parametrize("patience", [(0, 0), (1, 1), (0, 9)])
def test_the_v_never_deadlocks_however_greedy_and_tight(limit, patience):
    for p in (1, 2, 3, 5):
        problem = problem_of(V_SHAPED, p, 9, limit, comm=0.3)
        order = list_schedule(problem, Patience(*patience))
        assert fits(problem, order)
        verify(plan_of("greedy", problem, order), problem.costs)


@pytest.mark.parametrize("held", [1.1, 1.6, 3.0, 12.0])
@pytest.mark.parametrize("patience", [(0, 0), (1, 1), (9, 0), (0, 9)])
@pytest.mark.parametrize("room", [1.0, 1.2, 2.0, 4.0])
def test_room_is_kept_for_backwards_that_grow(held, patience, room):
    """At the least memory that one microbatch needs as at more, where F's are urgent and where W's may wait."""
    for kind, p, num_chunks in ((LINEAR, 3, 1), (V_SHAPED, 1, 2), (V_SHAPED, 3, 2), (LOOPED, 2, 3)):
        placement = Placement(kind, p, num_chunks)
        activation = tuple(1.0 + 0.5 * rank for rank in range(p))
        costs = CostModel.of_ranks(placement, comm=0.3, activation=activation, memory_after_b=held)
        problem = OrderProblem(placement, 7, costs, (0.0,) * p)
        limits = tuple(room * costs.least_activation(mine) for mine in problem.stages())
        problem = OrderProblem(placement, 7, costs, limits)
        order = list_schedule(problem, Patience(*patience))
        assert fits(problem, order)
        verify(plan_of("greedy", problem, order), costs)


def test_patience_waits_for_a_backward_that_is_on_its_way():
    problem = problem_of(LINEAR, 2, 5, 99.0, time_f=(2,), time_b=(3,), time_w=(2,), comm=0.5)
    # Rank 0 is free at 6, and its first gradient, under way on rank 1 since 4.5, comes at 8.
    eager, patient = (list_schedule(problem, Patience(wait, 0))[0] for wait in (0.9, 1.0))
    assert eager[:4] == [0, 0, 0, 0]
    assert patient[:4] == [0, 0, 0, 2]
