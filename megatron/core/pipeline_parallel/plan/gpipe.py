"""GPipe: all forwards, then all backwards (arXiv 1811.06965)."""

from __future__ import annotations

from megatron.core.pipeline_parallel.plan.ir import BW, F, Plan, compute
from megatron.core.pipeline_parallel.plan.placement import LINEAR, Placement
from megatron.core.pipeline_parallel.plan.request import Request


def gpipe(request: Request) -> Plan:
    """Backwards go in increasing microbatch order, not the paper's reversed one: same time, the bits of one process."""
    request.one_chunk("gpipe")
    microbatches = range(request.num_microbatches)
    rows = tuple(
        (*(compute(F, stage, m) for m in microbatches), *(compute(BW, stage, m) for m in microbatches))
        for stage in range(request.num_ranks)
    )
    return Plan("gpipe", Placement(LINEAR, request.num_ranks), request.num_microbatches, rows)
