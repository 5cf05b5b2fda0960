"""Problems: limits, what orders hold, plans made of them."""

import pytest

from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import PlanError
from megatron.core.pipeline_parallel.plan.placement import LINEAR, V_SHAPED, Placement
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.plan.search.initial_orders import unit_zbv
from megatron.core.pipeline_parallel.plan.search.problem import (
    OrderProblem,
    check_limits,
    fits,
    limits_of,
    peaks,
    plan_of,
)
from tests.harness.known_orders import one_f_one_b, zb_h
from tests.harness.schedules import verified_peaks


def problem_of(kind, p, m, limit, **figures):
    placement = Placement(kind, p, 2 if kind == V_SHAPED else 1)
    return OrderProblem(placement, m, CostModel.of_ranks(placement, **figures), (limit,) * p)


@pytest.mark.parametrize("held", [1.0, 0.3, 0.0, 1.4, 5.0])
def test_peaks_are_those_that_verify_finds(held):
    for problem, order in (
        (
            linear := problem_of(LINEAR, 4, 9, 8.0, memory_after_b=held, activation=(1, 2, 3, 4)),
            zb_h(linear, 2),
        ),
        (v := problem_of(V_SHAPED, 3, 8, 8.0, memory_after_b=held, activation=(3, 1, 2)), unit_zbv(v)),
    ):
        found = verified_peaks(plan_of("known", problem, order), problem.costs)
        assert peaks(problem, order) == pytest.approx(found)


def test_fits_compares_each_rank_with_its_own_limit():
    problem = problem_of(LINEAR, 3, 6, 0.0)
    order = one_f_one_b(problem)
    for limits, good in (((3, 2, 1), True), ((3, 2, 0.9), False), ((2.5, 9, 9), False)):
        assert fits(OrderProblem(problem.placement, 6, problem.costs, limits), order) is good


def test_default_limits_are_of_the_rank_that_holds_most():
    placement = Placement(V_SHAPED, 2, 2)
    costs = CostModel.of_ranks(placement, activation=(2.0, 5.0))
    assert limits_of(Request(2, 4), placement, costs, 1.5) == (7.5, 7.5)
    assert limits_of(Request(2, 4, memory_limit=(1.0, 2.0)), placement, costs, 1.5) == (1.0, 2.0)
    growing = CostModel.of_ranks(placement, activation=(2.0, 5.0), memory_after_b=1.5)
    assert limits_of(Request(2, 4), placement, growing, 2.0) == (15.0, 15.0)


def test_too_little_memory_names_rank_limit_and_least():
    with pytest.raises(
        PlanError, match=r"zbv: rank 0 may hold 1\.5 of activations, and no order .* less than 2, one"
    ):
        check_limits("zbv", problem_of(V_SHAPED, 2, 4, 1.5, activation=(2.0,)))
    check_limits("zbv", problem_of(V_SHAPED, 2, 4, 2.0, activation=(2.0,)))
    with pytest.raises(
        PlanError, match=r"rank 0 may hold 2 of activations, and no order .* less than 2\.5, one"
    ):
        check_limits("zbv", problem_of(V_SHAPED, 2, 4, 2.0, activation=(2.0,), memory_after_b=1.5))
    check_limits("zbv", problem_of(V_SHAPED, 2, 4, 2.5, activation=(2.0,), memory_after_b=1.5))
