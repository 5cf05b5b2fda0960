import pytest

from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import PlanError
from megatron.core.pipeline_parallel.plan.placement import Placement


def test_rank_figures_are_divided_over_chunks():
    costs = CostModel.of_ranks(Placement("v", 2, 2), time_f=[4, 8], time_b=[2], time_w=[1, 3], activation=[1])
    assert costs.f == (2, 4, 4, 2)  # ranks 0 1 1 0
    assert costs.b == (1, 1, 1, 1)
    assert costs.durations()[3] == (1.5, 2.5, 2.5, 1.5)
    assert costs.activation == (0.5,) * 4
    assert costs.rank_times(Placement("v", 2, 2)) == (7, 13)


def test_bad_costs_are_refused():
    placement = Placement("linear", 3)
    with pytest.raises(PlanError, match="time of B: 2 numbers for 3 stages"):
        CostModel.of_ranks(placement, time_b=[1, 2])
    for bad in ({"time_f": [-1]}, {"comm": float("nan")}, {"time_w": [float("inf")]}):
        with pytest.raises(PlanError, match="finite and at least 0"):
            CostModel.of_ranks(placement, **bad)
    with pytest.raises(PlanError, match="at most 1"):
        CostModel.of_ranks(placement, memory_after_b=1.5)
