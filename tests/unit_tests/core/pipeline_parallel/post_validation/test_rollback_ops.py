"""What is undone, by the plan."""

from __future__ import annotations

from megatron.core.pipeline_parallel.plan.ir import Plan, op_text, parse_row
from megatron.core.pipeline_parallel.plan.placement import LINEAR, Placement
from megatron.core.pipeline_parallel.post_validation.state import RollbackOps, rollback_ops


def test_messages_that_went_ahead_are_received_by_who_stayed_behind():
    first = "0F0 0SEND_F0@1#0 0F1 0SEND_F1@1#1 0F2 0SEND_F2@1#2 0VALIDATE 0F3 0SEND_F3@1#3"
    last = "1RECV_F0@0#0 1F0 1RECV_F1@0#1 1VALIDATE 1F1 1RECV_F2@0#2 1F2 1RECV_F3@0#3 1F3"
    plan = Plan("x", Placement(LINEAR, 2), 4, tuple(parse_row(row.split()) for row in (first, last)))
    assert rollback_ops(plan, 0) == RollbackOps(((0, 0), (0, 1), (0, 2)), ())
    assert rollback_ops(plan, 1).forwards == ((1, 0),)
    assert [op_text(op) for op in rollback_ops(plan, 1).surplus] == ["1RECV_F2@0#2"]


def test_nothing_without_a_validate():
    plan = Plan("x", Placement(LINEAR, 1), 1, (parse_row(["0F0", "0BW0"]),))
    assert rollback_ops(plan, 0) == RollbackOps((), ())
