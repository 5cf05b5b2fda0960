"""From computations to a plan that can run: every pass in order, each followed by verify."""

from __future__ import annotations

from megatron.core.pipeline_parallel.plan.collector import without_collector
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import Plan
from megatron.core.pipeline_parallel.plan.passes.add_comm import add_comm
from megatron.core.pipeline_parallel.plan.verify import verify


@without_collector()
def lower(plan: Plan, costs: CostModel) -> Plan:
    """The plan with transfers. Raises PlanError if it is wrong before or after."""
    verify(plan, costs, deadlock=False)  # add_comm walks the plan itself
    lowered = add_comm(plan, costs)
    verify(lowered, costs)
    return lowered
