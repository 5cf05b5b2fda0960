"""Add post-validation of the optimizer's step: no rank waits for all others before it steps (arXiv 2401.10241).

[Note: cuts] What ranks do before their VALIDATE is a cut through the plan. The state goes from the last rank to the
first, each with what it has run until then. A message that is received before a VALIDATE has been sent before one:
then a rank's state needs nothing that comes behind the VALIDATE of a rank before it. What is sent before may be
received behind, as long as messages of first chunks go one way only, to later ranks: then waiting closes no circle.
Where the last rank's output goes round to the first rank again, as in interleaving, this would close a
circle; there the cut is exact, and what is sent before is received before. Either way there is no deadlock even if
every message blocks. Within that, a rank's VALIDATE stands late enough for few to wait and early enough for the state
to reach the ranks before it in time: as planned, a rank relays it one latency before the next one needs it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from megatron.core.pipeline_parallel.plan import ir
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import F, Kind, Plan, RawOp, Row
from megatron.core.pipeline_parallel.plan.placement import LOOPED
from megatron.core.pipeline_parallel.plan.timeline import execute
from megatron.core.pipeline_parallel.plan.verify import verify
from megatron.core.pipeline_parallel.plan.verify_state import is_first_forward, state_operations

_ROUNDING = 1e-9  # of planned times


def post_validation(plan: Plan, costs: CostModel) -> Plan:
    """A lowered training plan with the operations that decide on steps; see verify_state, [Note: two halves]. Those of
    data parallelism are added behind it: STEP comes after all reductions.

    VALIDATE stands among the first chunk's forwards of the warm-up, while which the whole state comes back; see
    [Note: cuts]. Receives of states are posted long before: at the row's beginning, and before its last computation, so
    a state that is sent has always met its receive. Raises PlanError where the result is wrong.
    """
    assert not any(ir.IS_VALIDATION[op[0]] for row in plan.rows for op in row), "a second time"
    assert not plan.has_lanes, "behind add_residency"
    num_ranks = len(plan.rows)
    numbers = 1 + max((op[7] for row in plan.rows for op in row if not ir.IS_COMPUTE[op[0]]), default=-1)
    rows: list[Row] = []
    for rank, (row, validate) in enumerate(zip(plan.rows, _cut(plan, costs), strict=True)):
        first, last = (
            tuple(_operation(rank, num_ranks, numbers, *one) for one in half)
            for half in state_operations(rank, num_ranks)
        )
        computed = [place for place, op in enumerate(row) if ir.IS_COMPUTE[op[0]]]
        paired = len(computed) > 1 and ir.is_overlapped(row, computed[-2])
        close = max(computed[-2 if paired else -1], validate)
        # The receive of each half, where the rank has one, stands ahead of the rest.
        ahead, posted = (int(half[0][0] == Kind.RECV_STATE) for half in (first, last))
        begin = (*first[:ahead], *row[:validate], *first[ahead:])
        rows.append((*begin, *row[validate:close], *last[:posted], *row[close:], *last[posted:]))
    validated = dataclasses.replace(plan, rows=tuple(rows))
    verify(validated, costs)
    return validated


def _cut(plan: Plan, costs: CostModel) -> list[int]:
    """By rank: the place of its VALIDATE; see [Note: cuts]."""
    exact = plan.placement.kind == LOOPED and plan.placement.num_chunks > 1
    rows, timeline = plan.rows, execute(plan, costs)
    places, needed = [], float("inf")
    for rank, row in enumerate(rows):
        place = next(  # of the first operation that is no forward of its first chunk, and no message of one
            place
            for place, op in enumerate(row)
            if not is_first_forward(op, rank, len(rows)) or ir.is_overlapped(row, place)
        )
        needed = min(needed - costs.comm, timeline.starts[rank][place])
        while place and timeline.ends[rank][place - 1] > needed + _ROUNDING:
            place -= 1
        places.append(place)
    while True:
        before = list(places)
        for rank in range(len(rows) - 1):
            sent = _microbatches(rows[rank][: places[rank]], ir.SEND_F)
            received = _microbatches(rows[rank + 1][: places[rank + 1]], ir.RECV_F)
            places[rank + 1] = _first(rows[rank + 1], ir.RECV_F, places[rank + 1], received - sent)
            if exact:
                places[rank] = _first(rows[rank], F, places[rank], sent - received)
        if places == before:
            return places


def _microbatches(ops: Sequence[RawOp], kind: int) -> set[int]:
    return {op[2] for op in ops if op[0] == kind}


def _first(row: Row, kind: int, end: int, microbatches: set[int]) -> int:
    """The place of the first such operation on one of these microbatches, or `end`."""
    return next((at for at, op in enumerate(row[:end]) if op[0] == kind and op[2] in microbatches), end)


def _operation(rank: int, num_ranks: int, numbers: int, kind: int, peer: int) -> RawOp:
    """Messages are numbered by the lower of their ranks: partial states first, then whole ones."""
    if peer < 0:
        return (kind, rank, -1, 0, -1, -1, -1, -1)
    from_lower = (kind == Kind.SEND_STATE) == (peer > rank)
    number = numbers + min(rank, peer) + (0 if from_lower else num_ranks - 1)
    return (kind, rank, -1, 0, -1, -1, peer, number)
