"""A steady state repeated."""

import pytest

from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.placement import LINEAR, Placement
from megatron.core.pipeline_parallel.plan.search.problem import OrderProblem
from megatron.core.pipeline_parallel.plan.search.solve import extend
from tests.harness.known_orders import one_f_one_b, zb_h


@pytest.mark.parametrize(
    "make", [one_f_one_b, lambda problem: zb_h(problem, 1), lambda problem: zb_h(problem, 2)]
)
def test_extended_orders_are_those_made_for_the_length(make):
    placement = Placement(LINEAR, 4)
    short, long = (OrderProblem(placement, m, CostModel.of_ranks(placement), (99.0,) * 4) for m in (20, 57))
    assert extend(make(short), 1, 37) == make(long)


def test_an_order_without_a_steady_state_is_not_extended():
    assert extend([[0, 0, 0, 1, 1, 1, 2, 2, 2]], 1, 5) is None


def test_cycles_of_several_microbatches_repeat_whole():
    row = [0, 0, 1, 1, 2, 2] * 4
    assert extend([row], 1, 6) == [[0, 0, 1, 1, 2, 2] * 7]
    assert extend([row], 1, 5) is None
