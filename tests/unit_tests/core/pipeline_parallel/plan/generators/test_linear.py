"""ZB-H1 and ZB-H2 against the closed forms of the zero-bubble paper (arXiv 2401.10241, tables 1 and 2)."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.pipeline_parallel.plan.build import build_plan
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import PlanError, row_texts
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

# (F, B, W) for which the hand orders are as good as the paper says: W fits into the time that others need.
TIMES = ((1, 1, 1), (2, 3, 2), (3, 2, 1), (1, 2, 1), (18.5, 18.1, 9.3), (2, 2, 0))


def timed(name, p, m, f, b, w, comm=0.0, memory_after_b=1.0):
    plan = build_plan(name, Request(p, m))
    costs = chunk_costs(plan.placement, f, b, w, comm, memory_after_b)
    return simulate(lower(plan, costs), costs)


@pytest.mark.parametrize("name", ["zb-h1", "zb-h2"])
def test_grid_verifies(name):
    for p, m in [(1, 1), (1, 5), *GRID]:
        plan = build_plan(name, Request(p, m))
        peaks = verified_peaks(plan)
        assert plan.bitwise
        first = p if name == "zb-h1" else 2 * p - 1
        assert max(peaks) == peaks[0] == min(first, m), (p, m)


def test_by_hand():
    plan = build_plan("zb-h1", Request(3, 4))
    assert [" ".join(row_texts(row)) for row in plan.rows] == [
        "0F0 0F1 0F2 0B0 0W0 0F3 0B1 0W1 0B2 0W2 0B3 0W3",
        "1F0 1F1 1B0 1F2 1B1 1W0 1F3 1B2 1W1 1B3 1W2 1W3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2W0 2F3 2B3 2W1 2W2 2W3",
    ]
    plan = build_plan("zb-h2", Request(2, 4))
    assert [" ".join(row_texts(row)) for row in plan.rows] == [
        "0F0 0F1 0F2 0B0 0W0 0F3 0B1 0W1 0B2 0W2 0B3 0W3",
        "1F0 1B0 1F1 1B1 1F2 1B2 1W0 1F3 1B3 1W1 1W2 1W3",
    ]


@pytest.mark.parametrize("p", [2, 3, 4, 7, 8])
@pytest.mark.parametrize("times", TIMES, ids=str)
def test_bubbles_are_the_papers(p, times):
    f, b, w = times
    for m in (2 * p, 3 * p + 1):
        assert timed("1f1b", p, m, *times).bubble_time == pytest.approx((p - 1) * (f + b + w))
        assert timed("zb-h1", p, m, *times).bubble_time == pytest.approx((p - 1) * (f + b - w))
        assert timed("zb-h2", p, m, *times).bubble_time == pytest.approx((p - 1) * (f + b - 2 * w))


@pytest.mark.parametrize("times", TIMES, ids=str)
def test_transfers_cost_zb_h2_twice_each(times):
    f, b, w = times
    for p, m in ((2, 8), (4, 12), (8, 24)):
        for comm in (0.1, 0.25):
            bubble = timed("zb-h2", p, m, *times, comm=comm).bubble_time
            assert bubble == pytest.approx((p - 1) * (f + b + 2 * comm - 2 * w))


@pytest.mark.parametrize("times", TIMES, ids=str)
def test_few_microbatches_cost_what_no_order_can_avoid(times):
    f, b, w = times
    for p in (2, 4, 8):
        for m in (1, p // 2, p):
            assert timed("1f1b", p, m, *times).cost == pytest.approx((m + p - 1) * (f + b + w))
            for name in ("zb-h1", "zb-h2"):
                assert timed(name, p, m, *times).cost == pytest.approx((m + p - 1) * (f + b) + w)


def test_peaks_by_worker():
    """M_B at F, of which M_W stays from B to W."""
    held = 0.4
    for p in (2, 4, 7):
        m = 3 * p
        assert timed("1f1b", p, m, 1, 1, 1).peak_activation == tuple(range(p, 0, -1))
        workers = range(1, p + 1)
        one = timed("zb-h1", p, m, 1, 1, 1, memory_after_b=held).peak_activation
        assert one == pytest.approx([(p - i + 1) + (i - 1) * held for i in workers])
        two = timed("zb-h2", p, m, 1, 1, 1, memory_after_b=held).peak_activation
        assert two == pytest.approx([(2 * p - 2 * i + 1) + (2 * i - 2) * held for i in workers])


@pytest.mark.parametrize(("p", "m"), [(2, 8), (4, 12), (8, 24), (16, 48)])
def test_rates_with_equal_times(p, m):
    whole = timed("1f1b", p, m, 1, 1, 1)
    assert whole.bubble_rate == pytest.approx((p - 1) / (m + p - 1))
    third = timed("zb-h1", p, m, 1, 1, 1)
    assert third.bubble_time == pytest.approx(whole.bubble_time / 3)
    assert third.bubble_rate == pytest.approx((p - 1) / (3 * m + p - 1))
    assert timed("zb-h2", p, m, 1, 1, 1).bubble_time == pytest.approx(0)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data(), st.integers(1, 9), st.integers(1, 30), st.sampled_from((0.0, 0.3, 4.0)))
def test_runs_under_any_costs(data, p, m, comm):
    times = data.draw(st.lists(st.sampled_from((0.0, 0.5, 1.0, 3.0)), min_size=p, max_size=p), "times")
    for name in ("zb-h1", "zb-h2"):
        plan = build_plan(name, Request(p, m))
        costs = CostModel.of_ranks(plan.placement, time_f=times, time_w=times[::-1], comm=comm)
        assert simulate(lower(plan, costs), costs).num_messages == 2 * m * (p - 1)


@pytest.mark.parametrize("name", ["zb-h1", "zb-h2"])
def test_torch_accepts_the_export(name, tmp_path):
    for p, m in ((1, 2), (2, 1), (4, 9)):
        plan = build_plan(name, Request(p, m))
        check_torch_accepts(plan, tmp_path / "plan.csv")
        check_torch_runs_our_transfers(plan, chunk_costs(plan.placement), tmp_path / "plan.csv")


def test_chunks_and_groups_are_refused():
    with pytest.raises(PlanError, match="zb-h1 has one chunk a stage, not 2"):
        build_plan("zb-h1", Request(4, 8, 2))
    with pytest.raises(PlanError, match="zb-h2 has no microbatch groups"):
        build_plan("zb-h2", Request(4, 8, None, 4))
