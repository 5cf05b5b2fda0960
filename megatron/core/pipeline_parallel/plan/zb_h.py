"""ZB-H1 and ZB-H2: the fixed orders of the zero-bubble paper, 1F1B with B and W apart (arXiv 2401.10241, section 2)."""

from __future__ import annotations

from megatron.core.pipeline_parallel.plan.ir import B, F, Plan, RawOp, W, compute
from megatron.core.pipeline_parallel.plan.placement import LINEAR, Placement
from megatron.core.pipeline_parallel.plan.request import Request


def zb_h1(request: Request) -> Plan:
    """1F1B's memory and, where m >= p and times are equal, a third of its bubble: (p-1)(F+B-W).

    Stage s runs p-s forwards ahead and lets s weight gradients wait, to fill the end of its row with them.
    """
    request.one_chunk("zb-h1")
    last = request.num_ranks - 1
    return _plan("zb-h1", request, [(last - stage + 1, stage) for stage in range(request.num_ranks)])


def zb_h2(request: Request) -> Plan:
    """At most 2p-1 activations instead of p for a bubble of (p-1)(F+B-2W): none where times are equal, m >= 2p-1.

    Stage s runs 2(p-s)-1 forwards ahead and lets 2s weight gradients wait: twice ZB-H1's.
    """
    request.one_chunk("zb-h2")
    last = request.num_ranks - 1
    return _plan(
        "zb-h2", request, [(2 * (last - stage) + 1, 2 * stage) for stage in range(request.num_ranks)]
    )


def _plan(schedule: str, request: Request, depths: list[tuple[int, int]]) -> Plan:
    total = request.num_microbatches
    rows = tuple(_row(stage, total, *depth) for stage, depth in enumerate(depths))
    return Plan(schedule, Placement(LINEAR, request.num_ranks), total, rows)


def _row(stage: int, total: int, ahead: int, late: int) -> tuple[RawOp, ...]:
    """`ahead` forwards, then turns of B, W (from the B on that leaves more than `late` of them waiting) and F."""
    ahead = min(ahead, total)
    row = [compute(F, stage, m) for m in range(ahead)]
    for m in range(total):
        row.append(compute(B, stage, m))
        if m >= late:
            row.append(compute(W, stage, m - late))
        if ahead + m < total:
            row.append(compute(F, stage, ahead + m))
    row += [compute(W, stage, m) for m in range(max(total - late, 0), total)]
    return tuple(row)
