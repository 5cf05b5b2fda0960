import pytest

from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import BW, B, Plan, PlanError, W, parse_row
from megatron.core.pipeline_parallel.plan.placement import Placement
from tests.harness.schedules import verified_peaks


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
    for bad in ({"time_f": [-1]}, {"comm": float("nan")}, {"time_w": [float("inf")]}, {"activation": [-2]}):
        with pytest.raises(PlanError, match="finite and at least 0"):
            CostModel.of_ranks(placement, **bad)
    for share in (float("inf"), -0.1, float("nan")):
        with pytest.raises(PlanError, match="held after B is a share of at least 0, not"):
            CostModel.of_ranks(placement, memory_after_b=share)
    with pytest.raises(PlanError, match="finite and at least 0"):
        CostModel((1,), (1,), (1,), activation=(2,), held_after_b=(-1,))
    with pytest.raises(AssertionError, match="different numbers of stages"):
        CostModel((1, 1), (1, 1), (1, 1), activation=(2, 2), held_after_b=(2,))


def test_what_is_held_between_b_and_w_is_by_stage():
    """B gives back the rest: an embedding has nothing to keep for its W, a head keeps all."""
    costs = CostModel((1, 1, 1), (1, 1, 1), (1, 1, 1), activation=(2, 4, 5), held_after_b=(0, 3, 5))
    assert [costs.released(B, stage) for stage in range(3)] == [2, 1, 0]
    assert [costs.released(W, stage) for stage in range(3)] == [0, 3, 5]
    assert [costs.released(BW, stage) for stage in range(3)] == [2, 4, 5]


def test_a_b_that_leaves_more_than_its_f_takes_memory():
    """Recomputed inputs and gradients of outputs are there for W: a rank holds most behind its B's."""
    costs = CostModel((1,), (1,), (1,), activation=(2,), held_after_b=(5,))
    assert [costs.released(kind, 0) for kind in (B, W, BW)] == [-3, 5, 2]
    split = Plan("x", Placement("linear", 1), 2, (parse_row("0F0 0F1 0B0 0W0 0B1 0W1".split()),))
    assert verified_peaks(split, costs) == (7,)
    later = Plan("x", Placement("linear", 1), 2, (parse_row("0F0 0F1 0B0 0B1 0W0 0W1".split()),))
    assert verified_peaks(later, costs) == (10,)
    fused = Plan("x", Placement("linear", 1), 2, (parse_row("0F0 0F1 0BW0 0BW1".split()),))
    assert verified_peaks(fused, costs) == (4,)


def test_the_least_of_a_rank_is_one_microbatch_through_all_its_stages():
    costs = CostModel((1,) * 4, (1,) * 4, (1,) * 4, activation=(2, 1, 4, 3), held_after_b=(9, 1, 5, 0))
    assert costs.least_activation((0, 3)) == 9  # at the end, when the second stage's is free again
    assert costs.least_activation((1, 2)) == 1 + 5  # at the B of the second
    assert costs.least_activation((1, 3)) == 1 + 3  # at its F
    assert costs.whole_stage(Placement("v", 2, 2)) == 9 + 3


def test_shares_of_1f1bs_memory_count_what_forwards_leave():
    """And keep room for one B that has grown, which a multiple of a small activation would not."""
    v = Placement("v", 2, 2)
    equal = CostModel.of_ranks(v, activation=[4, 8], memory_after_b=1)
    assert equal.left_by_forwards(v, 1.5) == (12, 12)
    little = CostModel.of_ranks(v, activation=[4, 8], memory_after_b=1.25)
    assert little.left_by_forwards(v, 2) == (16, 16)
    # 1F1B holds 16: B's that grow, by 0.5 a stage on the first rank and 1 on the second, get what fits below a share.
    assert little.left_by_forwards(v, 1.0, most_of_1f1b=0.55) == (8.5, 9)  # the least of the second
    assert little.left_by_forwards(v, 1.0, most_of_1f1b=0.6) == (9, 9)
    assert little.left_by_forwards(v, 1.0, most_of_1f1b=0.7) == (9, 10)
    much = CostModel.of_ranks(v, activation=[4, 8], memory_after_b=5)
    assert much.left_by_forwards(v, 2) == (4 * 8 + 2 * 4, 4 * 8 + 4 * 4)
    for costs in (equal, little, much):
        for limit, mine in zip(costs.left_by_forwards(v, 1), ((0, 3), (1, 2)), strict=True):
            assert limit >= costs.least_activation(mine)


def test_a_share_is_held_of_every_stage():
    costs = CostModel.of_ranks(Placement("v", 2, 2), activation=[4, 8], memory_after_b=0.25)
    assert costs.activation == (2, 4, 4, 2)
    assert costs.held_after_b == (0.5, 1, 1, 0.5)
    assert CostModel.of_ranks(Placement("linear", 2)).held_after_b == (1, 1)


def test_peaks_follow_what_is_released():
    """The row of verify's rule, by hand: after two B's, the second stage holds what waits for W."""
    rows = (parse_row("0F0 0F1 0BW0 0BW1".split()), parse_row("1F0 1B0 1F1 1B1 1W0 1W1".split()))
    plan = Plan("x", Placement("linear", 2), 2, rows)
    costs = CostModel((1, 1), (1, 1), (1, 1), activation=(2, 4), held_after_b=(0, 3))
    assert verified_peaks(plan, costs) == (4, 7)


def test_forward_only_times():
    placement = Placement("v", 2, 2)
    costs = CostModel.of_ranks(placement, time_f=[4, 8], time_b=[2], time_w=[1, 3])
    assert costs.rank_times(placement, forward_only=True) == (4, 8)
