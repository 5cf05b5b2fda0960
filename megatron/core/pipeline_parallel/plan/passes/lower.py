"""From computations to a plan that can run, each step followed by verify."""

from __future__ import annotations

import dataclasses

from megatron.core.pipeline_parallel.plan import ir
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import F, Plan, PlanError, RawOp, without_collector
from megatron.core.pipeline_parallel.plan.timeline import execute
from megatron.core.pipeline_parallel.plan.verify import verify


@without_collector()
def lower(plan: Plan, costs: CostModel) -> Plan:
    """The plan with transfers. Raises PlanError if it is wrong before or after."""
    verify(plan, costs, deadlock=False)  # add_comm walks the plan itself
    lowered = add_comm(plan, costs)
    verify(lowered, costs)
    return lowered


def forward_only(plan: Plan) -> Plan:
    """An evaluation: the same forwards in the same order, and nothing else. `plan` is one without transfers: `lower`
    comes after. What is left of overlapped pairs overlaps with nothing."""
    assert not plan.has_transfers, "forward_only: take the plan before its transfers are added"
    rows = tuple(tuple((*op[:7], -1) for op in row if op[0] == F) for row in plan.rows)
    return dataclasses.replace(plan, rows=rows, forward_only=True)


def add_comm(plan: Plan, costs: CostModel) -> Plan:
    """The plan with a SEND behind each result that another rank needs, and its RECV on that rank.

    Computations are taken in the order of their planned ends, and each message goes to the end of both rows as they
    are then. This order of all messages is a valid execution even if every one of them blocks both ranks, so there
    is no deadlock. The receive comes to stand before the computation during which the message is sent: it is there
    in time, and no buffer is held longer than that. Messages between two computations are one batch.
    """
    assert not plan.has_transfers, "add_comm: the plan has transfers already"
    timeline = execute(plan, costs)
    if timeline.stopped:
        rank, (place, what) = next(iter(timeline.stopped.items()))
        raise PlanError(f"rank {rank} stops at {ir.op_text(plan.rows[rank][place])}, waiting for {what}")
    ends = [timeline.ends[rank][place] for rank, place in timeline.done]
    # Stable: computations that end together keep an order that respects dependencies.
    order = sorted(range(len(ends)), key=ends.__getitem__)
    ranks = plan.placement.ranks()
    rows: list[list[RawOp]] = [[] for _ in plan.rows]
    messages = 0
    for index in order:
        rank, place = timeline.done[index]
        row = plan.rows[rank]
        op = row[place]
        last = ir.partner_of(row, place) if op[7] >= 0 else -1
        ops = (op, row[last]) if last >= 0 else (op,)
        rows[rank] += ops
        for op in ops:
            kind, stage, microbatch, part = op[:4]
            target = stage + 1 if kind == F else stage - 1
            if kind == ir.W or not 0 <= target < len(ranks) or ranks[target] == rank:
                continue
            peer = ranks[target]
            send, receive = (ir.SEND_F, ir.RECV_F) if kind == F else (ir.SEND_B, ir.RECV_B)
            rows[rank].append((send, stage, microbatch, part, -1, -1, peer, messages))
            rows[peer].append((receive, target, microbatch, part, -1, -1, rank, messages))
            messages += 1
    return dataclasses.replace(plan, rows=tuple(map(tuple, rows)))
