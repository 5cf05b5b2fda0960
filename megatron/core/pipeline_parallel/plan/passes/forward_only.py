"""The plan of an evaluation: a training plan without its backwards."""

from __future__ import annotations

import dataclasses

from megatron.core.pipeline_parallel.plan.ir import F, Plan


def forward_only(plan: Plan) -> Plan:
    """The same forwards in the same order, and nothing else. `plan` is one without transfers: `lower` comes after.

    What is left of overlapped pairs overlaps with nothing.
    """
    assert not plan.has_transfers, "forward_only: take the plan before its transfers are added"
    rows = tuple(tuple((*op[:7], -1) for op in row if op[0] == F) for row in plan.rows)
    return dataclasses.replace(plan, rows=rows, forward_only=True)
