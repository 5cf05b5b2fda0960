"""`auto`: the fastest schedule that fits every rank's memory, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from megatron.core.pipeline_parallel.plan.build import plan_for
from megatron.core.pipeline_parallel.plan.ir import PlanError
from megatron.core.pipeline_parallel.plan.passes.lower import lower
from megatron.core.pipeline_parallel.plan.simulate import TOLERANCE, Simulation, over_limit, simulate
from megatron.core.pipeline_parallel.plan.spec import PlanPurpose, ScheduleSpec
from megatron.core.words import share_text


def fastest(candidates: Sequence[ScheduleSpec], num_microbatches: int) -> ScheduleSpec:
    """The candidate with the fastest plan of those that keep to their limits, of equals the one that holds less.

    Its reasons are a line a candidate, the fastest first, those without a plan last. A schedule that raises PlanError
    is not possible, for the reason of its message. Raises PlanError if nothing fits, with all reasons.
    """
    judged = [(spec, *_judge(spec, num_microbatches)) for spec in candidates]
    fitting = [(spec, found) for spec, found, problem in judged if found is not None and not problem]
    if not fitting:
        reasons = "; ".join(f"{spec.schedule}: {problem}" for spec, _, problem in judged)
        raise PlanError(f"no pipeline schedule can run within the memory limit of each rank: {reasons}")
    best, fastest = min(fitting, key=lambda one: _merit(one[1]))
    judged.sort(key=lambda one: float("inf") if one[1] is None else one[1].cost)
    return dataclasses.replace(best, reasons=tuple(_line(*one, best, fastest) for one in judged))


def _judge(spec: ScheduleSpec, num_microbatches: int) -> tuple[Simulation | None, str]:
    """The plan with transfers, None if it cannot be had; and why it cannot be chosen, "" where it can."""
    try:
        plan = lower(plan_for(spec, num_microbatches, PlanPurpose.ORDER), spec.costs)
        simulation = simulate(plan, spec.costs)
    except PlanError as error:
        return None, str(error).removeprefix(f"{spec.schedule}: ")
    over = over_limit(simulation, spec.limits)
    if over is None or spec.limits is None:
        return simulation, ""
    rank, peak = over
    held, allowed = map(spec.describe_activation, (peak, spec.limits[rank]))
    return simulation, f"rank {rank} would hold {held} of {allowed}"


def _merit(found: Simulation) -> tuple[float, float, int]:
    """Cost to nine digits, peak, messages: the least is the best."""
    return found.merit[0], max(found.peak_activation), found.num_messages


def _line(
    spec: ScheduleSpec, simulation: Simulation | None, problem: str, best: ScheduleSpec, fastest: Simulation
) -> str:
    """`zbv: step time 24.5, bubble 2.0%, peak 8 of 8 (rank 0): chosen`, where rank 0 is nearest its limit."""
    if simulation is None:
        return f"{spec.schedule}: not possible: {problem}"
    peaks, limits = simulation.peak_activation, spec.limits
    if limits is None:
        rank = peaks.index(max(peaks))
        held = spec.describe_activation(peaks[rank])
    else:
        shares = [peak / limit if limit else peak for peak, limit in zip(peaks, limits, strict=True)]
        rank = shares.index(max(shares))
        held = " of ".join(map(spec.describe_activation, (peaks[rank], limits[rank])))
    bubble = f"bubble {share_text(simulation.bubble_rate)}"
    text = f"{spec.schedule}: step time {spec.describe_time(simulation.cost)}, {bubble}, peak {held} (rank {rank})"
    if simulation is fastest:
        return f"{text}: chosen"
    if problem:
        return f"{text}: too much memory: {problem}"
    slower = simulation.cost / fastest.cost - 1 if fastest.cost else 0.0
    if slower > TOLERANCE:
        return f"{text}: {share_text(slower)} slower than {best.schedule}"
    return f"{text}: as fast as {best.schedule}, and holds no less"
