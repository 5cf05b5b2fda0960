"""Published blocks of the V hold what default limits say."""

import pytest

from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.placement import V_SHAPED, Placement
from megatron.core.pipeline_parallel.plan.search.initial_orders import v_block, v_block_peak
from megatron.core.pipeline_parallel.plan.search.problem import OrderProblem, peaks


@pytest.mark.parametrize("p", [*range(1, 14), 32, 33])
@pytest.mark.parametrize("half", [True, False])
def test_blocks_hold_what_default_limits_are(p, half):
    placement = Placement(V_SHAPED, p, 2)
    problem = OrderProblem(placement, 2 * p + 2, CostModel.of_ranks(placement), (99.0,) * p)
    assert max(peaks(problem, v_block(p, half=half).order(problem))) == v_block_peak(p, half=half)
