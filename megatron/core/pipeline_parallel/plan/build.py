"""Plans of a spec: a schedule's order, with its transfers, post-validation, gathers and reductions."""

from __future__ import annotations

import dataclasses
import functools

from megatron.core.pipeline_parallel.plan.costs import peak_activation
from megatron.core.pipeline_parallel.plan.ir import Plan, PlanError
from megatron.core.pipeline_parallel.plan.passes.add_residency import add_residency
from megatron.core.pipeline_parallel.plan.passes.lower import forward_only, lower
from megatron.core.pipeline_parallel.plan.passes.post_validation import post_validation
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.plan.saved_orders import saved_or_made
from megatron.core.pipeline_parallel.plan.schedules import known
from megatron.core.pipeline_parallel.plan.search.zero_bubble import searched
from megatron.core.pipeline_parallel.plan.simulate import TOLERANCE
from megatron.core.pipeline_parallel.plan.spec import PlanPurpose, ScheduleSpec
from megatron.core.pipeline_parallel.plan.verify import verify

# Plans that are kept: of a training step, of evaluations, of sizes that a batch is ramped up through, of candidates.
_KEPT = 32


def build_plan(schedule: str, request: Request, saved_in: str | None = None) -> Plan:
    """The computations of a schedule, without transfers. saved_in: a folder of searched orders, see `saved_orders`.
    Raises PlanError for what the schedule cannot do."""
    row = known(schedule)
    if row.generate is not None:
        return row.generate(request)
    make = functools.partial(searched, schedule)
    return make(request) if saved_in is None else saved_or_made(schedule, request, make, saved_in)


@functools.lru_cache(maxsize=_KEPT)
def plan_for(spec: ScheduleSpec, num_microbatches: int, purpose: PlanPurpose) -> Plan:
    """The verified plan of a step. An evaluation may have fewer microbatches than the schedule can be planned for.

    Raises PlanError for what the schedule or the file cannot do, and where ranks would hold more than they may.
    """
    file = spec.file
    if purpose is PlanPurpose.ORDER:
        request = spec.request(num_microbatches)
        return (
            file.order(num_microbatches)
            if file is not None
            else build_plan(spec.schedule, request, spec.saved_in)
        )
    if spec.stages_units is not None and spec.residency is not None:  # the last pass of all
        plan = plan_for(spec.bare, num_microbatches, purpose)
        if plan.residency is not None:  # a file's own
            verify(plan, spec.costs, stages=spec.stages_units, residency=spec.residency)
            return plan
        known = {} if purpose is PlanPurpose.EVALUATE else dict(spec.groupings)
        asked = (spec.stages_units, spec.residency, spec.costs, spec.lanes)
        return add_residency(plan, *asked, grouping=known.get(num_microbatches))
    if purpose is PlanPurpose.EVALUATE:
        return lower(_forwards(spec, num_microbatches), spec.costs)
    if purpose is PlanPurpose.TRAIN_AND_STEP:
        plan = plan_for(spec, num_microbatches, PlanPurpose.TRAIN)
        return file.plan if file is not None and file.steps else post_validation(plan, spec.costs)
    plan = order_within_limits(spec, num_microbatches)
    if file is not None and file.plan.has_transfers and not file.steps:
        return file.plan
    return lower(plan, spec.costs)


def order_within_limits(spec: ScheduleSpec, num_microbatches: int) -> Plan:
    """The computations alone. Raises PlanError where there are none, or where a rank would hold more than it may."""
    plan = plan_for(spec, num_microbatches, PlanPurpose.ORDER)
    if spec.limits is None or (spec.file is None and spec.row.searched):
        return plan  # searches keep to limits, fixed orders hold what they hold
    for rank, limit in enumerate(spec.limits):
        peak = peak_activation(rank, plan.rows[rank], spec.costs)
        if peak > limit * (1 + TOLERANCE):
            held, allowed = map(spec.describe_activation, (peak, limit))
            raise PlanError(
                f"{plan.schedule} holds {held} of activations on pipeline rank {rank}, and --pipeline-memory-limit "
                f"is {allowed}: raise it, or use zb-1p, zbv or auto, which plan within it"
            )
    return plan


def _forwards(spec: ScheduleSpec, num_microbatches: int) -> Plan:
    """Of an evaluation. The last of a set may have fewer microbatches than the schedule needs: of a larger plan, those
    that there are."""
    if spec.file is None:
        least = spec.row.least_microbatches(spec.placement.num_ranks, spec.group_size)
    else:
        least = spec.file.plan.num_microbatches
    plan = forward_only(order_within_limits(spec, max(num_microbatches, least)))
    rows = tuple(tuple(op for op in row if op[2] < num_microbatches) for row in plan.rows)
    return dataclasses.replace(plan, num_microbatches=num_microbatches, rows=rows)
