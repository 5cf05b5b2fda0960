"""What `verify` holds operations of post-validation to.

[Note: two halves] A plan has two halves of post-validation, of two steps. The end of its row decides on this step: a
partial state comes from the rank before (RECV_STATE), goes on to the one behind with this rank's part (SEND_STATE), and
this rank steps or waits (STEP). Its beginning decides on the step before: the whole state comes from the rank behind,
goes on to the one before, and VALIDATE confirms the step or takes it back. On the first rank and the last one each
half lacks what there is nobody for.
"""

from __future__ import annotations

from collections import defaultdict

from megatron.core.pipeline_parallel.plan import ir
from megatron.core.pipeline_parallel.plan.ir import (
    HAS_MICROBATCH,
    IS_COMPUTE,
    IS_VALIDATION,
    RECV_STATE,
    SEND_STATE,
    STEP,
    VALIDATE,
)


def verify_state(plan: ir.Plan) -> None:
    """Nothing where the plan has no operation of post-validation. Else every rank has all of them, once, in their order
    (see [Note: two halves]); only forwards of first chunks and their messages stand before VALIDATE, and what a rank
    receives there its sender sends before its own; no computation stands after the partial state is sent on.

    Raises PlanError naming rank and operation.
    """
    if not any(IS_VALIDATION[op[0]] for row in plan.rows for op in row):
        return
    if plan.forward_only:
        raise ir.PlanError("an evaluation takes no step: it has no operations of post-validation")
    sent: set[int] = set()  # microbatches that the rank before sends before its VALIDATE
    # Of messages: (sender, receiver) -> kind of the end -> number.
    numbers: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)
    for rank, row in enumerate(plan.rows):
        before = row[: next((place for place, op in enumerate(row) if op[0] == VALIDATE), 0)]
        halves = rank, len(plan.rows)
        if problem := _order(row, *halves) or _last_half(row, *halves) or _first_half(before, *halves, sent):
            raise ir.PlanError(f"rank {rank}: {problem}")
        sent = {op[2] for op in before if op[0] == ir.SEND_F}
        for op in row:
            if op[0] in (SEND_STATE, RECV_STATE):
                numbers[(rank, op[6]) if op[0] == SEND_STATE else (op[6], rank)][op[0]] = op[7]
    for (sender, receiver), ends in numbers.items():
        if ends[SEND_STATE] != ends[RECV_STATE]:
            raise ir.PlanError(
                f"the state from rank {sender} to rank {receiver} is message {ends[SEND_STATE]} where it is sent and "
                f"{ends[RECV_STATE]} where it is received"
            )


def is_first_forward(op: ir.RawOp, rank: int, num_ranks: int) -> bool:
    """Whether an operation is a forward of the rank's first chunk, or the message to or from one: its stage has the
    rank's own number in every placement. The last rank's output goes to a second chunk: that message is none."""
    kind, stage = op[0], op[1]
    return stage == rank and (kind in (ir.F, ir.RECV_F) or (kind == ir.SEND_F and rank + 1 < num_ranks))


def state_operations(rank: int, num_ranks: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(kind, peer or -1) of a rank's two halves."""
    before, behind = ([rank - 1] if rank else []), ([rank + 1] if rank + 1 < num_ranks else [])
    first = (
        [(RECV_STATE, peer) for peer in behind] + [(SEND_STATE, peer) for peer in before] + [(VALIDATE, -1)]
    )
    last = [(RECV_STATE, peer) for peer in before] + [(SEND_STATE, peer) for peer in behind] + [(STEP, -1)]
    return first, last


def _order(row: ir.Row, rank: int, num_ranks: int) -> str:
    """What is wrong with the operations themselves, "" for nothing; so below."""
    first, last = state_operations(rank, num_ranks)
    found = [op for op in row if IS_VALIDATION[op[0]]]
    for op in found:
        if op[1] != rank or op[2] >= 0 or op[3] or op[4] >= 0 or (op[6] >= 0) != (op[7] >= 0):
            alone = f"of the rank's first stage, {rank}, with a message number where it has a peer, and nothing else"
            return f"{ir.op_text(op)}: an operation of post-validation is {alone}"
    if [(op[0], op[6]) for op in found] == first + last:
        return ""
    expected = ", ".join(ir.op_text((kind, rank, -1, 0, -1, -1, peer, -1)) for kind, peer in first + last)
    there = ", ".join(map(ir.op_text, found)) or "none"
    return f"post-validation needs {expected}, in this order; there are {there}"


def _last_half(row: ir.Row, rank: int, num_ranks: int) -> str:
    sends_on = [place for place, op in enumerate(row) if op[0] in (SEND_STATE, STEP)]
    decides = sends_on[-2] if rank + 1 < num_ranks else sends_on[-1]
    late = next((op for op in row[decides:] if IS_COMPUTE[op[0]]), None)
    return "" if late is None else f"{ir.op_text(late)} comes after the state of the step is sent on"


def _first_half(before: ir.Row, rank: int, num_ranks: int, sent: set[int]) -> str:
    """before: VALIDATE. sent: microbatches that the rank before sends before its own."""
    for op in before:
        if HAS_MICROBATCH[op[0]] and not is_first_forward(op, rank, num_ranks):
            alone = "only forwards of the first chunk and their messages can be done again"
            return f"{ir.op_text(op)} comes before VALIDATE; {alone}"
        if op[0] == ir.RECV_F and op[2] not in sent:
            return f"{ir.op_text(op)} comes before VALIDATE, and rank {rank - 1} sends it after its own"
    return ""
