"""1F1B: a backward as soon as there is one, so that a stage holds few activations (arXiv 2104.04473, 2.2.1)."""

from __future__ import annotations

from megatron.core.pipeline_parallel.plan.ir import BW, F, Plan, RawOp, compute
from megatron.core.pipeline_parallel.plan.placement import LINEAR, Placement
from megatron.core.pipeline_parallel.plan.request import Request


def one_f_one_b(request: Request) -> Plan:
    """Stage s of p runs p-1-s forwards ahead, then pairs of F and BW, then the backwards that are left."""
    request.one_chunk("1f1b")
    num_ranks, total = request.num_ranks, request.num_microbatches
    rows = []
    for stage in range(num_ranks):
        ahead = min(num_ranks - 1 - stage, total)
        row: list[RawOp] = [compute(F, stage, m) for m in range(ahead)]
        for m in range(ahead, total):
            row += (compute(F, stage, m), compute(BW, stage, m - ahead))
        row += [compute(BW, stage, m) for m in range(total - ahead, total)]
        rows.append(tuple(row))
    return Plan("1f1b", Placement(LINEAR, num_ranks), total, tuple(rows))
