"""Gathers and reductions on the clock, by hand: F, B and W of a unit take 1 each, a gather 1, a reduction 2."""

import pytest

from megatron.core.pipeline_parallel.plan.build import build_plan
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.held.lanes import LaneCosts, Lanes
from megatron.core.pipeline_parallel.plan.held.residency_walk import walk_row
from megatron.core.pipeline_parallel.plan.held.units import RankUnits, StageUnits
from megatron.core.pipeline_parallel.plan.ir import IS_COMPUTE, B, Plan, W, op_text, parse_row
from megatron.core.pipeline_parallel.plan.passes.add_residency import add_residency
from megatron.core.pipeline_parallel.plan.passes.lower import lower
from megatron.core.pipeline_parallel.plan.passes.order_variants import split_trailing
from megatron.core.pipeline_parallel.plan.passes.post_validation import post_validation
from megatron.core.pipeline_parallel.plan.placement import Placement
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.plan.residency import Residency
from megatron.core.pipeline_parallel.plan.simulate import simulate
from tests.harness.unit_stages import asked, layers, model, unit

SHARDED = "optim_grads_params"
WIRE = LaneCosts(
    latency=0.25, bandwidth=10.0
)  # of 4 ranks 3/4 of the bytes go: 7.5/10 + 0.25 and 15/10 + 0.25


def timed(text, strategy=SHARDED, wire=WIRE, stage=None, **words):
    stage = stage or layers(0, 2)
    row = parse_row(text.split())
    plan = Plan("test", Placement("linear", 1), 1 + max(op[2] for op in row), (row,))
    costs = CostModel((2.0,), (2.0,), (2.0,), (1.0,), (1.0,))
    return simulate(plan, costs, Lanes((stage,), Residency(strategy, **words), wire))


def test_accesses_wait_for_their_gathers_and_the_end_for_reductions():
    found = timed(
        "0UNSHARD[0:1] 0RESHARD[0:1].2 0UNSHARD[1:2].2 0F0 0RESHARD[1:2].2 0UNSHARD[0:1].2 0REDUCE[1:2].2 0BW0 "
        "0RESHARD[0:1] 0REDUCE[0:1]"
    )
    starts, ends = found.timeline.starts[0], found.timeline.ends[0]
    assert (starts[0], ends[0]) == (0, 1)
    assert (starts[3], ends[3]) == (0, 4)  # waits 1, computes 1, waits 1 for the second, computes 1
    assert (starts[2], ends[2]) == (2, 3)
    # The first half of BW takes 2; then a gather of 1 that the second half waits for, and a reduction behind it.
    assert (starts[5], ends[5]) == (6, 7)
    assert (starts[6], ends[6]) == (7, 8.75)
    assert ends[7] == 9
    assert (starts[9], ends[9]) == (9, 10.75)
    assert found.cost == 10.75
    assert found.exposed == (1 + 1 + 1 + 1.75,)
    assert found.lane_share == pytest.approx((6.5 / 10.75,))


def test_gathers_ahead_hide():
    found = timed(
        "0UNSHARD[0:1] 0UNSHARD[1:2] 0RESHARD[0:1].2 0F0 0UNSHARD[0:1] 0RESHARD[1:2].2 0REDUCE[1:2].2 0BW0 "
        "0RESHARD[0:1] 0REDUCE[0:1]"
    )
    assert found.timeline.ends[0][3] == 3  # waits for the first gather alone
    assert found.exposed == (1 + 1.75,)


def test_a_third_reduction_waits_for_the_first():
    slow = LaneCosts(bandwidth=3.75)  # a reduction takes 4, a unit's BW 2
    found = timed("0F0 0REDUCE[2:3].2 0REDUCE[1:2].3 0BW0 0REDUCE[0:1]", "no_shard", slow, layers(0, 3))
    # an all-reduce goes round twice: 8 each. F 2, BW in thirds of 4; reductions begin at 2 + 4/3, 4 + 2/3 is queued.
    first = 2 + 4 / 3
    assert found.timeline.starts[0][1] == pytest.approx(first)
    assert found.timeline.starts[0][2] == pytest.approx(first + 8)
    assert found.timeline.starts[0][4] == pytest.approx(first + 16)
    assert found.cost == pytest.approx(first + 24)


def test_without_overlap_a_reduction_is_waited_for():
    text = "0UNSHARD[0:2] 0F0 0BW0 0RESHARD[0:2] 0REDUCE[1:2] 0F1 0REDUCE[0:1]"
    assert timed(text, overlap_reduce=False).timeline.starts[0][5] == 1 + 2 + 4 + 1.75
    assert timed(text).timeline.starts[0][5] == 1 + 2 + 4


def test_parts_of_a_w_take_their_units_time():
    stage = StageUnits((unit("small"), unit("large", 3)), ((0,), (1,)), ((1,), (0,)))
    found = timed(
        "0UNSHARD[0:2] 0F0 0B0 0RESHARD[0:2] 0W0[1:2] 0REDUCE[1:2] 0W0[0:1] 0REDUCE[0:1]", stage=stage
    )
    starts, ends = found.timeline.starts[0], found.timeline.ends[0]
    assert ends[4] - starts[4] == 1.5
    assert ends[6] - starts[6] == 0.5
    assert found.busy == (6.0,)
    plain = simulate(found.plan, found.costs)
    assert [plain.timeline.ends[0][place] - plain.timeline.starts[0][place] for place in (4, 6)] == [1.0, 1.0]
    assert plain.busy == (6.0,)


def test_messages_wait_for_what_waits_for_gathers():
    """Only the first rank's first gather is bare: the others gather while they wait for their input."""
    plan = build_plan("1f1b", Request(4, 8))
    costs = CostModel.of_ranks(plan.placement, time_f=[2.0], time_b=[2.0], time_w=[2.0])
    plan = lower(plan, costs)
    stages = tuple(layers(stage, 2) for stage in range(4))
    residency = asked(SHARDED, "step", 4)
    found = simulate(add_residency(plan, stages, residency, costs), costs, Lanes(stages, residency, WIRE))
    assert found.timeline.starts[1][found.plan.rows[1].index((0, 1, 0, 0, -1, -1, -1, -1))] == 3
    assert found.exposed[0] == pytest.approx(1 + 1.75)
    assert found.exposed[1:] == pytest.approx((1.75,) * 3)


def test_a_step_is_decided_on_when_reductions_are_through():
    plan = build_plan("1f1b", Request(2, 4))
    costs = CostModel.of_ranks(plan.placement)
    plan = post_validation(lower(plan, costs), costs)
    stages = tuple(layers(stage, 2) for stage in range(2))
    residency = asked("no_shard", "memory", 2)
    planned = add_residency(plan, stages, residency, costs)
    found = simulate(planned, costs, Lanes(stages, residency, LaneCosts(bandwidth=1.0)))
    for rank, row in enumerate(planned.rows):
        step = [op_text(op) for op in row].index(f"{rank}STEP")
        assert found.timeline.ends[rank][step] >= found.timeline.lanes[rank].free


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
@pytest.mark.parametrize("strategy", ["optim", "optim_grads", SHARDED])
def test_a_wait_is_counted_once_however_often_an_operation_is_tried(name, strategy):
    """STEP and what sends partial states wait for the wire and for other ranks: work and waits fit into the row."""
    plan = build_plan(name, Request(4, 8))
    costs, stages = (
        CostModel.of_ranks(plan.placement),
        tuple(map(layers, range(plan.placement.num_stages), [2] * 8)),
    )
    residency = Residency(strategy)
    plan = add_residency(post_validation(lower(plan, costs), costs), stages, residency, costs)
    found = simulate(plan, costs, Lanes(stages, residency, WIRE))
    for rank, row in enumerate(plan.rows):
        work = sum(costs.durations()[op[0]][op[1]] for op in row if IS_COMPUTE[op[0]])
        assert work + found.exposed[rank] <= found.timeline.end(rank) + 1e-9


# Trailing W's --------------------------------------------------------------------------------------


def trailing(stages, parts, name="zb-h1", p=2, m=4):
    plan = build_plan(name, Request(p, m))
    costs = CostModel.of_ranks(plan.placement)
    plan = lower(plan, costs)
    return plan, split_trailing(plan, stages, parts), costs


def test_trailing_ws_come_unit_by_unit_the_largest_first():
    small = layers(0, 2)
    last = StageUnits((unit("1.0"), unit("head", 4)), ((0,), (1,)), ((1,), (0,)))
    plan, split, _ = trailing((small, last), 2)
    texts = [[op_text(op) for op in row if op[0] == W] for row in split.rows]
    assert texts == [
        ["0W0", "0W1", "0W2", "0W3"],  # one W is behind the last B
        ["1W0", "1W1", "1W2[1:2]", "1W3[1:2]", "1W2[0:1]", "1W3[0:1]"],
    ]
    assert all(len(row) >= len(before) for row, before in zip(split.rows, plan.rows, strict=True))


def test_chunks_come_one_after_the_other():
    stages = model(Placement("v", 2, 2), 2)
    plan, split, _ = trailing(stages, 1, "zbv")
    for before, row in zip(plan.rows, split.rows, strict=True):
        last = 1 + max(place for place, op in enumerate(row) if op[0] == B)
        tail = [op[1:3] for op in row[last:] if op[0] == W]
        assert [stage for stage, _ in tail] == sorted((stage for stage, _ in tail), reverse=True)
        assert sorted(before) == sorted(row)


@pytest.mark.parametrize("strategy", ["no_shard", "optim", SHARDED])
def test_splitting_is_chosen_where_it_is_faster_and_sums_the_same(strategy):
    plan = build_plan("zb-h1", Request(4, 8))
    costs = CostModel.of_ranks(plan.placement)
    plan = lower(plan, costs)
    stages = model(plan.placement, 8)
    residency = asked(strategy, "step" if strategy == SHARDED else "memory", 4)
    wire = LaneCosts(bandwidth=80.0)
    plain = add_residency(plan, stages, residency, costs)
    chosen = add_residency(plan, stages, residency, costs, wire)
    assert any(op[0] == W and op[4] >= 0 for row in chosen.rows for op in row)
    before, behind = (simulate(one, costs, Lanes(stages, residency, wire)) for one in (plain, chosen))
    assert (behind.cost, sum(behind.exposed)) < (before.cost, sum(before.exposed))
    assert chosen.residency.grouping == plain.residency.grouping
    fast = LaneCosts(bandwidth=1e9)
    assert add_residency(plan, stages, residency, costs, fast).rows == plain.rows or strategy == "no_shard"


def test_a_budget_is_divided_as_it_is_fastest():
    """Kept units take the room of gathers ahead: with a share left to those the step is shorter, and moves
    more."""
    plan = build_plan("zbv", Request(4, 8))
    costs = CostModel.of_ranks(plan.placement)
    plan = lower(plan, costs)
    stages = model(plan.placement, 4)
    residency = asked(SHARDED, "budget", 4, budget=20)
    wire = LaneCosts(bandwidth=640.0)
    plain, chosen = (add_residency(plan, stages, residency, costs, lanes) for lanes in (None, wire))
    times = [simulate(one, costs, Lanes(stages, residency, wire)) for one in (plain, chosen)]
    assert times[1].cost < times[0].cost
    moved = [
        sum(
            walk_row(row, RankUnits(rank, one.placement, stages), residency).moves.gathers.calls
            for rank, row in enumerate(one.rows)
        )
        for one in (plain, chosen)
    ]
    assert moved[1] >= moved[0]
