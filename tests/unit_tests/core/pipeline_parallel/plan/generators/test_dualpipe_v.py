"""DualPipeV: the published figures, torch's order as oracle, torch's validator."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from megatron.core.pipeline_parallel.plan.build import build_plan
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import BW, F, PlanError, is_overlapped, row_texts
from megatron.core.pipeline_parallel.plan.passes.lower import lower
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.plan.simulate import simulate
from megatron.core.pipeline_parallel.plan.text import from_json, to_json, to_torch_csv
from tests.harness.schedules import (
    GRID,
    check_torch_accepts,
    check_torch_runs_our_transfers,
    chunk_costs,
    verified_peaks,
)


def timed(p, m, *times):
    plan = build_plan("dualpipe-v", Request(p, m))
    costs = chunk_costs(plan.placement, *times)
    return simulate(lower(plan, costs), costs)


def test_grid_verifies():
    for p, m in [(1, 2), (1, 5), *GRID]:
        if m < 2 * p:
            continue
        plan = build_plan("dualpipe-v", Request(p, m))
        peaks = verified_peaks(plan, chunk_costs(plan.placement))
        assert plan.bitwise
        # as many whole stages as pipeline stages and one more: 2p+1 of the 2p-stage pipeline's
        assert set(peaks) == {2 * p + 1 if p > 1 or m > 2 else 3}, (p, m)


def test_official_figure():
    """4 ranks, 10 microbatches: 66 slots a row, 6 of them idle."""
    simulation = timed(4, 10, 1, 1, 1)
    assert simulation.makespan == 66
    assert simulation.idle == (6, 6, 6, 6)


@pytest.mark.parametrize("times", [(1, 1, 1), (2, 2, 1), (4, 4, 3), (1, 1, 0), (2, 3, 2), (1, 2, 1)], ids=str)
def test_bubble_is_the_published_one(times):
    """(PP/2-1)(F&B + B - 3W) with B the whole backward, PP = 2p, and an overlapped pair as long as both."""
    f, b, w = times
    for p, m in ((2, 4), (3, 8), (4, 10), (7, 20), (8, 16)):
        simulation = timed(p, m, *times)
        published = (p - 1) * (f + 2 * (b + w) - 3 * w)
        if f == b:
            assert simulation.bubble_time == pytest.approx(published)
        else:  # backwards that are longer than forwards cover more than the formula says
            assert simulation.bubble_time <= published


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data(), st.integers(1, 8), st.sampled_from((0.0, 0.3, 4.0)))
def test_runs_under_any_costs(data, p, comm):
    m = data.draw(st.integers(2 * p, 5 * p), "microbatches")
    plan = build_plan("dualpipe-v", Request(p, m))
    times = data.draw(st.lists(st.sampled_from((0.0, 0.5, 1.0, 3.0)), min_size=p, max_size=p), "times")
    costs = CostModel.of_ranks(plan.placement, time_f=times, time_w=times[::-1], comm=comm)
    assert simulate(lower(plan, costs), costs).num_messages == 4 * m * (p - 1)


def torch_rows(p, m):
    """Torch's own order, as its CSV."""
    schedule = torch_schedules.ScheduleDualPipeV.__new__(torch_schedules.ScheduleDualPipeV)
    schedule.pp_group_size, schedule._n_microbatches = p, m
    return "\n".join(
        ",".join(map(str, schedule._calculate_single_rank_operations(rank))) for rank in range(p)
    )


@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 4), (2, 7), (3, 6), (4, 10), (5, 13), (8, 16), (8, 24)])
def test_is_in_torchs_order(p, m):
    plan = build_plan("dualpipe-v", Request(p, m))
    assert to_torch_csv(plan).strip() == torch_rows(p, m)


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 4), (4, 10), (5, 11)])
def test_torch_accepts_the_export(p, m, tmp_path):
    plan = build_plan("dualpipe-v", Request(p, m))
    check_torch_accepts(plan, tmp_path / "plan.csv")
    check_torch_runs_our_transfers(plan, chunk_costs(plan.placement), tmp_path / "plan.csv")


def test_pairs_are_a_forward_beside_a_backward_of_the_other_chunk():
    p, m = 4, 10
    plan = build_plan("dualpipe-v", Request(p, m))
    for rank, row in enumerate(plan.rows):
        pairs = [(row[place], row[place + 1]) for place in range(len(row) - 1) if is_overlapped(row, place)]
        # two a turn of the main step, one a turn of the next; the last rank's first pair is taken apart
        assert len(pairs) == 2 * (m - 2 * p + rank + 1) + (p - 1 - rank) - (rank == p - 1)
        for one, other in pairs:
            assert (one[0], other[0]) == (F, BW)
            assert one[1] + other[1] == 2 * p - 1
    assert "(0F7;7BW3)" in row_texts(plan.rows[0])
    lowered = lower(plan, chunk_costs(plan.placement))
    assert from_json(to_json(lowered)) == lowered


def test_too_few_microbatches_chunks_and_groups_are_refused():
    with pytest.raises(PlanError, match="two microbatches a rank, 8, not 7: raise the global batch size"):
        build_plan("dualpipe-v", Request(4, 7))
    with pytest.raises(PlanError, match="dualpipe-v has two chunks a rank, not 4"):
        build_plan("dualpipe-v", Request(4, 8, 4))
    with pytest.raises(PlanError, match="dualpipe-v has no microbatch groups"):
        build_plan("dualpipe-v", Request(4, 8, None, 4))
