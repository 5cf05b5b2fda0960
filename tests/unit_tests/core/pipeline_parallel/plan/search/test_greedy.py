"""List scheduling: rules, patience, caps, and no deadlock of memory on the V."""

import pytest

from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.placement import LINEAR, LOOPED, V_SHAPED, Placement
from megatron.core.pipeline_parallel.plan.search.greedy import ListScheduler, Urgency
from megatron.core.pipeline_parallel.plan.search.problem import Problem, fits, plan_of
from megatron.core.pipeline_parallel.plan.verify import verify


def problem_of(kind, p, m, limit, **figures):
    placement = Placement(kind, p, 2 if kind == V_SHAPED else 1)
    return Problem(placement, m, CostModel.of_ranks(placement, **figures), (limit,) * p)


def flat(problem, kinds):
    """The same urgency for all of a kind."""
    return [
        [kinds[code // problem.num_stages]] * problem.num_microbatches
        for code in range(3 * problem.num_stages)
    ]


def test_backwards_first_gives_1f1b_on_the_last_rank():
    problem = problem_of(LINEAR, 3, 4, 99.0)
    order = ListScheduler(problem).order(Urgency(flat(problem, (1, 0, 2))))
    assert order[2] == [2, 5, 2, 5, 2, 5, 2, 5, 8, 8, 8, 8]


@pytest.mark.parametrize("limit", [1.0, 1.5, 2.0, 4.0])
@pytest.mark.parametrize("kinds", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
def test_the_v_never_deadlocks_however_greedy_and_tight(limit, kinds):
    for p in (1, 2, 3, 5):
        problem = problem_of(V_SHAPED, p, 9, limit, comm=0.3)
        order = ListScheduler(problem).order(Urgency(flat(problem, kinds)))
        assert order is not None
        assert fits(problem, order)
        verify(plan_of("greedy", problem, order), problem.costs)


@pytest.mark.parametrize("held", [1.1, 1.6, 3.0, 12.0])
@pytest.mark.parametrize("kinds", [(0, 1, 2), (1, 0, 2), (2, 1, 0), (0, 2, 1)])
@pytest.mark.parametrize("room", [1.0, 1.2, 2.0, 4.0])
def test_room_is_kept_for_backwards_that_grow(held, kinds, room):
    """At the least memory that one microbatch needs as at more, where F's are urgent and where W's may wait."""
    for kind, p, num_chunks in ((LINEAR, 3, 1), (V_SHAPED, 1, 2), (V_SHAPED, 3, 2), (LOOPED, 2, 3)):
        placement = Placement(kind, p, num_chunks)
        activation = tuple(1.0 + 0.5 * rank for rank in range(p))
        costs = CostModel.of_ranks(placement, comm=0.3, activation=activation, memory_after_b=held)
        problem = Problem(placement, 7, costs, (0.0,) * p)
        limits = tuple(room * costs.least_activation(mine) for mine in problem.stages())
        problem = Problem(placement, 7, costs, limits)
        order = ListScheduler(problem).order(Urgency(flat(problem, kinds)))
        assert order is not None
        assert fits(problem, order)
        verify(plan_of("greedy", problem, order), costs)


def test_patience_waits_for_what_is_on_its_way():
    problem = problem_of(LINEAR, 2, 2, 99.0, time_f=(2,), time_b=(2,), time_w=(2,), comm=1.0)
    urgency = flat(problem, (0, 1, 2))
    eager, patient = (ListScheduler(problem).order(Urgency(urgency, patience=one)) for one in (0.0, 1.0))
    # Rank 1 has its first F at 3 and is free at 5, when the second F has just come or is about to.
    assert eager[1][:2] in ([1, 1], [1, 3])
    assert patient[1][:2] == [1, 1]


def test_caps_bound_what_is_between_f_and_b():
    problem = problem_of(LINEAR, 3, 8, 99.0)
    row = ListScheduler(problem).order(Urgency(flat(problem, (0, 1, 2)), caps=(2, 2, 1)))[0]
    under_way = peak = 0
    for code in row:
        under_way += (code == 0) - (code == 3)
        peak = max(peak, under_way)
    assert peak == 2


def test_caps_that_let_nothing_go_on_give_no_order():
    problem = problem_of(LINEAR, 2, 2, 99.0)
    assert ListScheduler(problem).order(Urgency(flat(problem, (0, 1, 2)), caps=(0, 1))) is None


def test_release_holds_the_first_stage_back():
    problem = problem_of(LINEAR, 2, 2, 99.0)
    order = ListScheduler(problem).order(Urgency(flat(problem, (0, 1, 2)), release=(0.0, 50.0)))
    assert order[0] == [0, 2, 4, 0, 2, 4]
