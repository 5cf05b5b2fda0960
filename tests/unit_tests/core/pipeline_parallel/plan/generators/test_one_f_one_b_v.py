"""1F1B on the V: what it holds and how long it takes, over a grid."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.pipeline_parallel.plan.build import build_plan
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import BW, F, PlanError, row_texts
from megatron.core.pipeline_parallel.plan.passes.lower import lower
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.plan.simulate import simulate
from tests.harness.schedules import (
    GRID,
    check_torch_accepts,
    check_torch_runs_our_transfers,
    chunk_costs,
    verified_peaks,
)


@pytest.mark.grid
def test_grid_verifies_and_holds_two_thirds():
    for p, m in [(1, 1), (1, 5), *GRID]:
        plan = build_plan("1f1b-v", Request(p, m))
        peaks = verified_peaks(plan, chunk_costs(plan.placement))
        assert plan.bitwise
        assert max(peaks) <= min(2 * p, 2 * m, (4 * p + 7) // 3), (p, m)
        assert {op[0] for row in plan.rows for op in row} == {F, BW}


@pytest.mark.parametrize("p", [2, 3, 4, 5, 6, 7, 8, 12, 16])
def test_bubble_is_below_1f1bs(p):
    for m in (1, p - 1, p, p + 1, 2 * p, 3 * p + 1, 5 * p):
        plan = build_plan("1f1b-v", Request(p, m))
        costs = chunk_costs(plan.placement)
        bubble = simulate(lower(plan, costs), costs).bubble_time
        whole = 6 * (p - 1)  # a stage of 1F1B is two chunks
        assert bubble <= (whole * 5 / 6 if m >= p else whole) + 1e-9, m


def test_by_hand():
    """The first rank holds three chunks on the way there and one on the way back: 1F1B's two whole stages."""
    plan = build_plan("1f1b-v", Request(2, 3))
    assert [" ".join(row_texts(row)) for row in plan.rows] == [
        "0F0 0F1 0F2 3F0 3BW0 3F1 3BW1 0BW0 3F2 3BW2 0BW1 0BW2",
        "1F0 2F0 1F1 2F1 2BW0 1F2 1BW0 2BW1 2F2 1BW1 2BW2 1BW2",
    ]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data(), st.integers(1, 9), st.integers(1, 30), st.sampled_from((0.0, 0.3, 4.0)))
def test_runs_under_any_costs(data, p, m, comm):
    plan = build_plan("1f1b-v", Request(p, m))
    times = data.draw(st.lists(st.sampled_from((0.0, 0.5, 1.0, 3.0)), min_size=p, max_size=p), "times")
    costs = CostModel.of_ranks(plan.placement, time_f=times, time_w=times[::-1], comm=comm)
    assert simulate(lower(plan, costs), costs).num_messages == 4 * m * (p - 1)


def test_torch_accepts_the_export(tmp_path):
    for p, m in ((1, 2), (2, 1), (4, 9)):
        plan = build_plan("1f1b-v", Request(p, m))
        check_torch_accepts(plan, tmp_path / "plan.csv")
        check_torch_runs_our_transfers(plan, chunk_costs(plan.placement), tmp_path / "plan.csv")


def test_large():
    plan = build_plan("1f1b-v", Request(64, 512))
    assert plan.num_ops == 64 * 512 * 4


def test_chunks_and_groups_are_refused():
    for chunks in (1, 3):
        with pytest.raises(PlanError, match=f"1f1b-v has two chunks a rank, not {chunks}"):
            build_plan("1f1b-v", Request(4, 8, chunks))
    with pytest.raises(PlanError, match="1f1b-v has no microbatch groups"):
        build_plan("1f1b-v", Request(4, 8, 2, 4))
    assert build_plan("1f1b-v", Request(4, 8, 2)) == build_plan("1f1b-v", Request(4, 8))
