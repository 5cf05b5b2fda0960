import pytest

from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import PlanError
from megatron.core.pipeline_parallel.plan.placement import Placement
from megatron.core.pipeline_parallel.plan.request import Request


def test_costs_are_equal_ones_unless_given():
    """A rank's F, B and W take 1 each however many chunks it has; its microbatch holds 1 until W."""
    for placement in (Placement("linear", 3), Placement("v", 3, 2), Placement("looped", 3, 4)):
        costs = Request(3, 6).costs_on(placement)
        chunks = placement.num_chunks
        assert costs.f == costs.b == costs.w == costs.activation == (1 / chunks,) * 3 * chunks
        assert costs.held_after_b == costs.activation
        assert costs.comm == 0


def test_costs_are_those_of_the_request():
    placement = Placement("v", 2, 2)
    costs = CostModel.of_ranks(placement, time_f=[1, 2], comm=0.5)
    assert Request(2, 6, costs=costs).costs_on(placement) is costs


def test_costs_of_another_placement_are_refused():
    costs = CostModel.of_ranks(Placement("linear", 4))
    with pytest.raises(PlanError, match="costs of 4 stages for a schedule of 8"):
        Request(4, 8, costs=costs).costs_on(Placement("v", 4, 2))


def test_memory_limits_are_one_a_rank():
    assert Request(2, 4, memory_limit=(1.0, 2.0)).memory_limit == (1.0, 2.0)
    for limits in ((), (1.0,), (1.0, 2.0, 3.0)):
        with pytest.raises(PlanError, match=f"{len(limits)} memory limits for 2 ranks: give one a rank"):
            Request(2, 4, memory_limit=limits)


@pytest.mark.parametrize("name", ["ranks", "microbatches", "chunks", "group_size"])
def test_what_must_be_there(name):
    words = {"num_ranks": 2, "num_microbatches": 4}
    words[name if name == "group_size" else f"num_{name}"] = 0
    with pytest.raises(PlanError, match=f"{name} must be at least 1, not 0"):
        Request(**words)


def test_one_chunk():
    Request(2, 4).one_chunk("1f1b")
    Request(2, 4, 1).one_chunk("1f1b")
    with pytest.raises(PlanError, match="1f1b has one chunk a stage, not 2: use interleaved"):
        Request(2, 4, 2).one_chunk("1f1b")
    with pytest.raises(PlanError, match="1f1b has no microbatch groups: use interleaved"):
        Request(2, 4, 1, 2).one_chunk("1f1b")


def test_both_ends_of_the_model_are_on_the_first_rank():
    for chunks in (None, 2):
        placement = Request(3, 6, chunks).on_v("zbv")
        assert placement == Placement("v", 3, 2)
        assert placement.ranks() == (0, 1, 2, 2, 1, 0)


def test_other_numbers_of_chunks_and_groups_are_refused():
    for chunks in (1, 3):
        with pytest.raises(PlanError, match=f"zbv has two chunks a rank, not {chunks}: leave the number"):
            Request(3, 6, chunks).on_v("zbv")
    with pytest.raises(PlanError, match="zbv has no microbatch groups"):
        Request(3, 6, 2, 3).on_v("zbv")
