import pytest

from megatron.core.pipeline_parallel.plan.ir import PlanError
from megatron.core.pipeline_parallel.plan.placement import Placement
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.plan.v_placement import v_placement


def test_both_ends_of_the_model_are_on_the_first_rank():
    for chunks in (None, 2):
        placement = v_placement(Request(3, 6, chunks), "zbv")
        assert placement == Placement("v", 3, 2)
        assert placement.ranks() == (0, 1, 2, 2, 1, 0)


def test_other_numbers_of_chunks_and_groups_are_refused():
    for chunks in (1, 3):
        with pytest.raises(PlanError, match=f"zbv has two chunks a rank, not {chunks}: leave the number"):
            v_placement(Request(3, 6, chunks), "zbv")
    with pytest.raises(PlanError, match="zbv has no microbatch groups"):
        v_placement(Request(3, 6, 2, 3), "zbv")
