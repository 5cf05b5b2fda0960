"""The placement of V schedules: two stages a rank, the first and the last of which are on the first rank."""

from __future__ import annotations

from megatron.core.pipeline_parallel.plan.ir import PlanError
from megatron.core.pipeline_parallel.plan.placement import V_SHAPED, Placement
from megatron.core.pipeline_parallel.plan.request import Request


def v_placement(request: Request, schedule: str) -> Placement:
    """Two chunks a rank on a V. Raises PlanError for a request of more or fewer, or of microbatch groups."""
    if request.num_chunks not in (None, 2):
        raise PlanError(
            f"{schedule} has two chunks a rank, not {request.num_chunks}: leave the number of chunks out, or use"
            " interleaved"
        )
    if request.group_size is not None:
        raise PlanError(f"{schedule} has no microbatch groups: use interleaved or gis")
    return Placement(V_SHAPED, request.num_ranks, 2)
