import pytest

from megatron.core.pipeline_parallel.plan.build import build_plan
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import BW, SEND_B, SEND_F, Plan, PlanError, parse_row, row_texts
from megatron.core.pipeline_parallel.plan.passes.lower import add_comm
from megatron.core.pipeline_parallel.plan.placement import Placement
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.plan.simulate import simulate


def test_1f1b_by_hand():
    plan = build_plan("1f1b", Request(2, 2))
    rows = add_comm(plan, CostModel.of_ranks(plan.placement)).rows
    assert [" ".join(row_texts(row)) for row in rows] == [
        "0F0 0SEND_F0@1#0 0F1 0SEND_F1@1#1 0RECV_B0@1#2 0BW0 0RECV_B1@1#3 0BW1",
        # its first F runs while rank 0 makes the second input: both receives stand before it
        "1RECV_F0@0#0 1RECV_F1@0#1 1F0 1BW0 1SEND_B0@0#2 1F1 1BW1 1SEND_B1@0#3",
    ]


def test_computations_keep_their_order_and_a_single_rank_sends_nothing():
    for words in ((1, 4), (4, 6)):
        plan = build_plan("1f1b", Request(*words))
        lowered = add_comm(plan, CostModel.of_ranks(plan.placement))
        assert [[op for op in row if op[0] <= BW] for row in lowered.rows] == [list(row) for row in plan.rows]
    single = build_plan("interleaved", Request(1, 2, 3))
    assert add_comm(single, CostModel.of_ranks(single.placement)) == single


@pytest.mark.parametrize(
    ("name", "words"), [("1f1b", (4, 16)), ("gpipe", (3, 5)), ("interleaved", (4, 10, 3))]
)
@pytest.mark.parametrize("times", [(1, 1, 1, 0), (1, 1, 1, 0.25), (3, 2, 1, 5)], ids=str)
def test_receives_are_posted_no_later_than_sent(name, words, times):
    plan = build_plan(name, Request(*words))
    f, b, w, comm = times
    costs = CostModel.of_ranks(plan.placement, time_f=[f], time_b=[b], time_w=[w], comm=comm)
    lowered = add_comm(plan, costs)
    starts = simulate(lowered, costs).timeline.starts
    posted = {
        (op[0] in (SEND_F, SEND_B), op[7]): starts[rank][place]
        for rank, row in enumerate(lowered.rows)
        for place, op in enumerate(row)
        if op[0] > BW
    }
    messages = {pair for _, pair in posted}
    assert len(posted) == 2 * len(messages) > 0
    assert all(posted[False, pair] <= posted[True, pair] for pair in messages)


def test_a_plan_that_cannot_run_is_refused():
    plan = Plan("x", Placement("linear", 2), 1, (parse_row(["0BW0", "0F0"]), parse_row(["1F0", "1BW0"])))
    with pytest.raises(PlanError, match="rank 0 stops at 0BW0, waiting for the gradient from stage 1"):
        add_comm(plan, CostModel.of_ranks(plan.placement))
