"""What is refused of operations of post-validation."""

from __future__ import annotations

import dataclasses

import pytest

from megatron.core.pipeline_parallel.plan.build import build_plan
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import Kind, PlanError, op_text, parse_op
from megatron.core.pipeline_parallel.plan.passes.lower import forward_only, lower
from megatron.core.pipeline_parallel.plan.passes.post_validation import post_validation
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.plan.verify import verify


def plan_of(name="1f1b", num_ranks=3, num_microbatches=4):
    plan = build_plan(name, Request(num_ranks, num_microbatches))
    costs = CostModel.of_ranks(plan.placement)
    return post_validation(lower(plan, costs), costs)


def changed(plan, rank, change):
    """With one row changed, a list of texts, in place."""
    row = [op_text(op) for op in plan.rows[rank]]
    change(row)
    rows = list(plan.rows)
    rows[rank] = tuple(parse_op(text) for text in row)
    return dataclasses.replace(plan, rows=tuple(rows))


def place(row, start):
    return next(i for i, text in enumerate(row) if text.startswith(start))


def move(start, to):
    def change(row):
        one = row.pop(place(row, start))
        row.insert(len(row) if to is None else place(row, to), one)

    return change


def remove(start):
    return lambda row: row.pop(place(row, start))


def replace(start, old, new):
    def change(row):
        at = place(row, start)
        row[at] = row[at].replace(old, new)

    return change


@pytest.mark.parametrize(
    ("rank", "change", "message"),
    [
        (0, remove("0VALIDATE"), r"rank 0: post-validation needs 0RECV_STATE@1, 0VALIDATE, .*in this order"),
        (0, remove("0STEP"), "rank 0: post-validation needs .* 0SEND_STATE@1, 0STEP, in this order"),
        (1, remove("1SEND_STATE@2"), "rank 1: post-validation needs"),
        (1, lambda row: row.append("1STEP"), "rank 1: post-validation needs"),
        (1, move("1VALIDATE", "1SEND_STATE@0"), "rank 1: post-validation needs"),
        (1, move("1STEP", "1SEND_STATE@2"), "rank 1: post-validation needs"),
        (1, replace("1SEND_STATE@2", "@2", "@0"), "rank 1: post-validation needs"),
        (2, replace("2STEP", "2STEP", "1STEP"), "1STEP: an operation of post-validation is of the rank's first"),
        (2, move("2BW0", "2VALIDATE"), "rank 2: 2BW0 comes before VALIDATE"),
        (0, move("0RECV_B0", "0VALIDATE"), "rank 0: 0RECV_B0@1#.* comes before VALIDATE"),
        (0, move("0BW3", None), "rank 0: 0BW3 comes after the state of the step is sent on"),
    ],
)  # fmt: skip
def test_wrong_places(rank, change, message):
    with pytest.raises(PlanError, match=message):
        verify(changed(plan_of(), rank, change), deadlock=False)


def test_receives_before_validate_have_been_sent_before_one():
    """Rank 0 validates right away, rank 1 after a forward whose input comes later."""
    with pytest.raises(
        PlanError, match=r"rank 1: 1RECV_F0@0#0 comes before VALIDATE, and rank 0 sends it after"
    ):
        verify(changed(plan_of(), 0, move("0VALIDATE", "0F0")), deadlock=False)


def test_numbers_of_messages():
    plan = plan_of()
    send = next(op for op in plan.rows[0] if op[0] == Kind.SEND_STATE)
    number = f"#{send[7]}"
    with pytest.raises(PlanError, match="the state from rank 0 to rank 1 is message 999 where it is sent"):
        verify(changed(plan, 0, replace("0SEND_STATE", number, "#999")), deadlock=False)
    taken = changed(
        changed(plan, 0, replace("0SEND_STATE", number, "#0")), 1, replace("1RECV_STATE@0", number, "#0")
    )
    with pytest.raises(PlanError, match="two messages have the same number"):
        verify(taken, deadlock=False)


def test_an_evaluation_takes_no_step():
    plan = forward_only(build_plan("1f1b", Request(1, 1)))
    rows = ((*plan.rows[0], parse_op("0STEP")),)
    with pytest.raises(PlanError, match="an evaluation takes no step"):
        verify(dataclasses.replace(plan, rows=rows))
