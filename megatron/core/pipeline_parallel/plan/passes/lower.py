"""From computations to a plan that can run, each step followed by verify."""

from __future__ import annotations

import dataclasses

from megatron.core.pipeline_parallel.plan.collector import without_collector
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import F, Plan
from megatron.core.pipeline_parallel.plan.passes.add_comm import add_comm
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
