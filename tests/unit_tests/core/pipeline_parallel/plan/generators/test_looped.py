"""Grouped interleaving against the formulas of arXiv 2503.01328, table 1; no deadlock at any size."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.pipeline_parallel.plan.build import build_plan
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import B, F, PlanError, op_text
from megatron.core.pipeline_parallel.plan.passes.lower import lower
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.plan.simulate import simulate
from megatron.core.pipeline_parallel.plan.verify import verify
from tests.harness.schedules import (
    GRID,
    check_torch_accepts,
    check_torch_runs_our_transfers,
    chunk_costs,
    verified_peaks,
)


def timed(p, m, v, group, *times, name="gis"):
    plan = build_plan(name, Request(p, m, v, group))
    costs = chunk_costs(plan.placement, *times)
    return simulate(lower(plan, costs), costs)


def groups(p):
    return sorted({-(-p // 2), (3 * p) // 4 or 1, p} & set(range(-(-p // 2), p + 1)))


@pytest.mark.grid
def test_grid_verifies():
    for p, m in [(1, 1), (1, 5), *GRID]:
        group = groups(p)[(p + m) % len(groups(p))]
        v = 2 if p > 8 else 2 + m % 3
        plan = build_plan("gis", Request(p, m, v, group))
        peaks = verified_peaks(plan, chunk_costs(plan.placement))
        assert plan.bitwise
        assert max(peaks) == peaks[0] <= min(group * (v - 1) + p, v * m), (p, m, v, group)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 6, 7])
def test_small_sizes_all(p):
    """Every group size, with every remainder, and fewer microbatches than a group."""
    for v in (2, 3):
        for group in range(-(-p // 2), p + 1):
            for m in range(1, 3 * group + 1):
                verify(build_plan("gis", Request(p, m, v, group)))


@pytest.mark.parametrize("v", [2, 3])
@pytest.mark.parametrize("p", [2, 4, 5, 8])
def test_bubble_and_peaks_are_the_published_ones(p, v):
    for group in groups(p):
        m = 4 * group
        simulation = timed(p, m, v, group, 1, 1, 1)
        assert simulation.bubble_time == pytest.approx(2 * (p - 1) + (p - group) * (v - 1))
        assert simulation.peak_activation == tuple(group * (v - 1) + p - rank for rank in range(p))


@pytest.mark.parametrize("times", [(1, 1, 1), (2, 2, 1), (1, 2, 1), (3, 3, 2)], ids=str)
def test_bubble_is_that_of_forward_and_input_gradient(times):
    """1F1B: v(p-1)(F+B+W) in chunk times, interleaved (p-1)(F+B+W), grouped (p-1)(F+B)."""
    f, b, w = times
    for p, v in ((2, 2), (4, 2), (4, 3), (8, 2)):
        m = 3 * p
        assert timed(p, m, v, p, *times).bubble_time == pytest.approx((p - 1) * (f + b))
        interleaved = timed(p, m, v, p, *times, name="interleaved")
        assert interleaved.bubble_time == pytest.approx((p - 1) * (f + b + w))
        # held: pv against pv + p - 1 on the first rank
        assert interleaved.peak_activation[0] == timed(p, m, v, p, *times).peak_activation[0] + p - 1


def test_order_by_hand():
    plan = build_plan("gis", Request(3, 5, 2, 2))  # groups of 2, a short one of 1
    row = plan.rows[1]
    assert [op_text(op) for op in row if op[0] == F] == "1F0 1F1 4F0 4F1 1F2 1F3 4F2 4F3 1F4 4F4".split()
    assert [op_text(op) for op in row if op[0] == B] == "4B0 4B1 1B0 1B1 4B2 4B3 1B2 1B3 4B4 1B4".split()
    assert [op_text(op) for op in row[:7]] == "1F0 1F1 4F0 4F1 4B0 4W0 1F2".split()


def test_smaller_groups_would_deadlock_and_are_refused():
    for p, least in ((4, 2), (5, 3), (8, 4)):
        for group in (least - 1, p + 1):
            with pytest.raises(PlanError, match=f"groups of {least} to {p} microbatches, not {group}"):
                build_plan("gis", Request(p, 8, 2, group))
    with pytest.raises(PlanError, match="at least 2 chunks a rank, not 1"):
        build_plan("gis", Request(4, 8, 1))
    assert build_plan("gis", Request(4, 8)) == build_plan("gis", Request(4, 8, 2, 4))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data(), st.integers(1, 9), st.integers(2, 4), st.sampled_from((0.0, 0.3, 4.0)))
def test_runs_under_any_costs(data, p, v, comm):
    group = data.draw(st.integers(-(-p // 2), p), "group")
    m = data.draw(st.integers(1, 4 * group), "microbatches")
    plan = build_plan("gis", Request(p, m, v, group))
    times = data.draw(st.lists(st.sampled_from((0.0, 0.5, 1.0, 3.0)), min_size=p, max_size=p), "times")
    costs = CostModel.of_ranks(plan.placement, time_f=times, time_w=times[::-1], comm=comm)
    assert simulate(lower(plan, costs), costs).num_messages == (2 * m * (p * v - 1) if p > 1 else 0)


def test_torch_accepts_the_export(tmp_path):
    for p, m, v, group in ((1, 2, 2, 1), (2, 3, 2, 1), (4, 7, 3, 2)):
        plan = build_plan("gis", Request(p, m, v, group))
        check_torch_accepts(plan, tmp_path / "plan.csv")
        check_torch_runs_our_transfers(plan, chunk_costs(plan.placement), tmp_path / "plan.csv")
