"""GPipe, 1F1B and interleaved over a grid: verified, timed, compared with closed forms and with torch."""

import types

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from megatron.core.pipeline_parallel.plan.build import build_plan
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import BW, F, PlanError, op_text, plan_hash, row_texts
from megatron.core.pipeline_parallel.plan.passes.lower import lower
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.plan.simulate import simulate
from megatron.core.pipeline_parallel.plan.text import to_torch_csv
from megatron.core.pipeline_parallel.plan.verify import verify

STAGES = (1, 2, 3, 4, 5, 8, 16, 32)


def microbatches(p):
    return sorted({1, 2, max(1, p - 1), p, p + 1, 2 * p, 3 * p - 1, 4 * p})


GRID = [
    (name, p, m, v)
    for p in STAGES
    for m in microbatches(p)
    for name, v in (("gpipe", 1), ("1f1b", 1), ("interleaved", 1), ("interleaved", 2), ("interleaved", 4))
    if name != "interleaved" or m >= p
]


def build(name, p, m, v):
    plan = build_plan(name, Request(p, m, v))
    return plan, CostModel.of_ranks(plan.placement)


@pytest.mark.parametrize("p", [p if p < 16 else pytest.param(p, marks=pytest.mark.grid) for p in STAGES])
def test_grid_verifies_and_agrees_with_closed_forms(p):
    for name, _, m, v in (case for case in GRID if case[1] == p):
        plan, costs = build(name, p, m, v)
        lowered = lower(plan, costs)
        simulation = simulate(lowered, costs)
        where = f"{name} p={p} m={m} v={v}"
        if v == 1 or m % p == 0:
            assert simulation.bubble_rate == pytest.approx((p - 1) / (v * m + p - 1), abs=1e-12), where
        else:
            # a short last group costs time, but never more than the whole group would have taken
            whole = -(-m // p) * p
            assert simulation.makespan <= 3 * (whole + (p - 1) / v) + 1e-9, where
        for rank, peak in enumerate(simulation.peak_activation):
            if name == "gpipe":
                assert peak == m, where
            elif v == 1:
                assert peak == min(p - rank, m), where
            elif m % p == 0:
                assert peak == min(2 * (p - 1 - rank) + (v - 1) * p + 1, v * m) / v, where
        crossings = 0 if p == 1 else p * v - 1
        assert simulation.num_messages == 2 * m * crossings, where
        assert sum(simulation.idle) == pytest.approx(p * simulation.makespan - 3 * m * p), where


def test_1f1b_by_hand():
    plan, _ = build("1f1b", 3, 4, 1)
    assert [" ".join(row_texts(row)) for row in plan.rows] == [
        "0F0 0F1 0F2 0BW0 0F3 0BW1 0BW2 0BW3",
        "1F0 1F1 1BW0 1F2 1BW1 1F3 1BW2 1BW3",
        "2F0 2BW0 2F1 2BW1 2F2 2BW2 2F3 2BW3",
    ]


def test_interleaving_one_chunk_is_1f1b():
    assert build("interleaved", 4, 10, 1)[0].rows == build("1f1b", 4, 10, 1)[0].rows


def test_interleaved_by_hand():
    plan, _ = build("interleaved", 2, 5, 2)  # two groups of 2 and a short one of 1
    assert [
        op_text(op) for op in plan.rows[1] if op[0] == F
    ] == "1F0 1F1 3F0 3F1 1F2 1F3 3F2 3F3 1F4 3F4".split()
    assert [op_text(op) for op in plan.rows[1] if op[0] == BW] == (
        "3BW0 3BW1 1BW0 1BW1 3BW2 3BW3 1BW2 1BW3 3BW4 1BW4".split()
    )


@pytest.mark.parametrize(("p", "m", "group"), [(4, 8, 8), (4, 12, 6), (3, 11, 4), (8, 17, 16), (5, 9, 7)])
def test_group_size(p, m, group):
    plan = build_plan("interleaved", Request(p, m, 2, group))
    firsts = [op[2] for op in plan.rows[0] if op[0] == F and op[1] == 0]
    assert firsts == list(range(m))
    row = [op[1:3] for op in plan.rows[0] if op[0] == F]
    assert row[: 2 * group] == [(c * p, i) for c in range(2) for i in range(group)]
    lower(plan, CostModel.of_ranks(plan.placement))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data(), st.integers(1, 9), st.integers(1, 4), st.sampled_from((0.0, 0.3, 2.0)))
def test_groups_of_any_size_with_any_remainder_can_run(data, p, v, comm):
    """Under unequal costs too: verify walks the plan with blocking sends, and counts every computation."""
    group = data.draw(st.integers(p, 3 * p), "group")
    m = data.draw(st.integers(group, 4 * group), "microbatches")
    plan = build_plan("interleaved", Request(p, m, v, group))
    times = data.draw(st.lists(st.sampled_from((0.5, 1.0, 3.0)), min_size=p, max_size=p), "times")
    costs = CostModel.of_ranks(plan.placement, time_f=times, time_w=times[::-1], comm=comm)
    simulation = simulate(lower(plan, costs), costs)
    ahead = [(p - 1 - rank) * (2 if v > 1 else 1) + (v - 1) * group + 1 for rank in range(p)]
    for rank, peak in enumerate(simulation.peak_activation):
        assert peak <= min(ahead[rank], v * m) / v + 1e-9
    if m % group == 0 and comm == 0 and set(times) == {1.0}:
        assert simulation.bubble_rate == pytest.approx((p - 1) / (v * m + p - 1), abs=1e-12)


@pytest.mark.parametrize(
    ("name", "request_words", "message"),
    [
        ("interleaved", (4, 3, 2), "at least its group size, 4, of microbatches, not 3"),
        ("interleaved", (4, 8, 2, 3), "smaller than the pipeline"),
        ("interleaved", (4, 5, 2, 6), "at least its group size, 6"),
        ("1f1b", (4, 8, 2), "one chunk a stage, not 2"),
        ("gpipe", (4, 8, 1, 4), "no microbatch groups"),
        ("nonsense", (4, 8), "unknown; there are gpipe"),
    ],
)
def test_what_a_schedule_cannot_do_is_refused(name, request_words, message):
    with pytest.raises(PlanError, match=message):
        build_plan(name, Request(*request_words))


@pytest.mark.parametrize("words", [(0, 1), (1, 0), (1, 1, 0), (1, 1, 1, -1)])
def test_requests_for_nothing_are_refused(words):
    with pytest.raises(PlanError, match="must be at least 1"):
        Request(*words)


@pytest.mark.grid
def test_large_plan_with_all_passes():
    plan, costs = build("interleaved", 64, 512, 2)
    lowered = lower(plan, costs)
    assert lowered.num_ops == 64 * 512 * 4 + 2 * 2 * 512 * 127
    assert simulate(lowered, costs).bubble_rate == pytest.approx(63 / (2 * 512 + 63), abs=1e-12)


def torch_runtime(p, num_stages, m):
    """Torch's runtime over stages that only tell their place, enough to load and validate a CSV."""
    stage = types.SimpleNamespace(
        num_stages=num_stages, group_size=p, group_rank=0, stage_index=0, has_backward=True
    )
    runtime = torch_schedules._PipelineScheduleRuntime.__new__(torch_schedules._PipelineScheduleRuntime)
    runtime._stages, runtime._num_stages, runtime.pp_group_size, runtime.rank = [stage], num_stages, p, 0
    runtime._n_microbatches, runtime._defer_pp_recv, runtime.pipeline_order = m, False, {}
    return runtime


@pytest.mark.parametrize(
    "case",
    [
        *(("gpipe", p, m, 1) for p, m in ((1, 3), (2, 2), (4, 9))),
        *(("1f1b", p, m, 1) for p, m in ((1, 3), (2, 1), (4, 3), (5, 12), (8, 16))),
        *(("interleaved", p, m, v) for p, m, v in ((1, 2, 2), (2, 4, 2), (2, 5, 4), (4, 7, 2), (5, 11, 3))),
    ],
    ids=str,
)
def test_torch_accepts_the_export_and_runs_our_transfers(case, tmp_path):
    _, p, m, v = case
    plan, costs = build(*case)
    file = tmp_path / "plan.csv"
    file.write_text(to_torch_csv(plan))
    runtime = torch_runtime(p, p * v, m)
    runtime._load_csv(str(file), format="compute_only")  # validates, lowers, adds torch's own transfers
    assert runtime.stage_index_to_group_rank == dict(enumerate(plan.placement.ranks()))
    assert set(runtime.pipeline_order_with_comms) == set(range(p))

    lowered = lower(plan, costs)
    file.write_text(to_torch_csv(lowered, transfers=True))
    runtime._load_csv(str(file), format="compute_comms")
    # in torch's simulator every receive blocks: the strictest order there is
    done = torch_schedules._simulate_comms_compute(
        runtime.pipeline_order_with_comms, lambda stage: runtime.stage_index_to_group_rank[stage], p * v
    )
    assert sum(action is not None for row in done.values() for action in row) == lowered.num_ops


def test_torch_refuses_what_is_missing(tmp_path):
    plan, _ = build("1f1b", 2, 2, 1)
    file = tmp_path / "plan.csv"
    file.write_text(to_torch_csv(plan).replace("1B1", "", 1))
    with pytest.raises(AssertionError, match=r"microbatches|backward"):
        torch_runtime(2, 2, 2)._load_csv(str(file))


def torch_order(rows):
    """Torch's actions as our texts, without its idle slots and reductions."""
    letters = {"F": "F", "B": "BW"}
    return [
        [
            f"{action.stage_index}{letters[action.computation_type.value]}{action.microbatch_index}"
            for action in row
            if action is not None and action.computation_type.value in letters
        ]
        for row in rows
    ]


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 5), (8, 8), (5, 17)])
def test_1f1b_is_in_torchs_order(p, m):
    schedule = torch_schedules.Schedule1F1B.__new__(torch_schedules.Schedule1F1B)
    schedule._num_stages, schedule._n_microbatches = p, m
    ours, _ = build("1f1b", p, m, 1)
    theirs = torch_order(schedule._get_pipeline_order().values())
    # torch 2.13 numbers the last stage's forwards from 1 in this view: all others are compared
    assert theirs[:-1] == [row_texts(row) for row in ours.rows[:-1]]


@pytest.mark.parametrize(("p", "m", "v"), [(2, 2, 2), (2, 8, 3), (4, 8, 2), (3, 12, 4), (8, 16, 2)])
def test_interleaved_is_in_torchs_order(p, m, v):
    schedule = torch_schedules.ScheduleInterleaved1F1B.__new__(torch_schedules.ScheduleInterleaved1F1B)
    schedule.pp_group_size, schedule.n_local_stages, schedule._n_microbatches = p, v, m
    schedule.microbatches_per_round = p
    ours, _ = build("interleaved", p, m, v)
    rows = [schedule._calculate_single_rank_operations(rank) for rank in range(p)]
    assert torch_order(rows) == [row_texts(row) for row in ours.rows]


def test_hashes_are_stable():
    """Plan files name their hash: a change here is a change of format or of a schedule."""
    hashes = {case: plan_hash(lower(*build(*case)))[:12] for case in HASHES}
    assert hashes == HASHES


HASHES = {
    ("1f1b", 4, 8, 1): "b7f0a8cc1538",
    ("gpipe", 3, 5, 1): "6b25791ea898",
    ("interleaved", 4, 10, 2): "2d5ca4b9fb83",
}


def test_every_plan_of_the_registry_is_bitwise():
    for name in ("gpipe", "1f1b", "interleaved"):
        plan, costs = build(name, 3, 7, None)
        assert plan.bitwise
        verify(plan, costs)
