"""What can be said of a run's pipeline before it starts: schedule, stages, bubble."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core.pipeline_parallel.plan.build import order_within_limits
from megatron.core.pipeline_parallel.plan.ir import PlanError
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.plan.schedules import SCHEDULES
from megatron.core.pipeline_parallel.plan.search.zero_bubble import bound_of
from megatron.core.pipeline_parallel.plan.simulate import Simulation, simulate
from megatron.core.pipeline_parallel.plan.spec import ScheduleSpec
from megatron.core.words import counted, share_text

# Beyond so many forwards a simulation would make --check-config wait.
MOST_FORWARDS = 50_000


@functools.lru_cache(maxsize=4)
def order_of(spec: ScheduleSpec, num_microbatches: int | None) -> Simulation | None:
    """A step's computations by the spec's costs; None where the number of microbatches is not known or large, and where
    there is no such plan, which rules tell."""
    if num_microbatches is None or num_microbatches * spec.placement.num_stages > MOST_FORWARDS:
        return None
    try:
        return simulate(order_within_limits(spec, num_microbatches), spec.costs)
    except PlanError:
        return None


def bubble_rate(spec: ScheduleSpec, num_microbatches: int | None) -> float | None:
    """Of `order_of`."""
    found = order_of(spec, num_microbatches)
    return None if found is None else max(0.0, found.bubble_rate)  # of rounding


def bound_line(schedule: str, request: Request, simulation: Simulation) -> str | None:
    """What no plan of a searched schedule beats, and how far this one is from it; None for a fixed order."""
    if schedule not in SCHEDULES or not SCHEDULES[schedule].searched:
        return None
    bound, work = bound_of(schedule, request), simulation.work
    least = max(0.0, 1 - work / bound.cost) if bound.cost else 0.0
    gap = share_text(max(0.0, bound.gap(simulation.cost, work)), 2)
    return (
        f"{schedule}: bubble {share_text(simulation.bubble_rate, 2)}; no order has less than "
        f"{share_text(least, 2)} ({bound.reason}), gap {gap.rstrip('%')} points"
    )


def bound_lines(spec: ScheduleSpec, num_microbatches: int) -> tuple[str, str] | None:
    """The same of a run, for its log, and in short for a person."""
    if spec.file is not None or (simulation := order_of(spec, num_microbatches)) is None:
        return None
    line = bound_line(spec.schedule, spec.request(num_microbatches), simulation)
    bubble = share_text(simulation.bubble_rate)
    told = f" > pipeline: {spec.schedule}, planned bubble (waiting) {bubble} by estimated costs"
    return None if line is None else (f" > {line}", told)


def pipeline_facts(
    spec: ScheduleSpec, num_microbatches: int | None, *, with_bubble: bool = True
) -> dict[str, Any]:
    """Plain values, for --check-config --json. num_microbatches: of a step after the ramp, None: it is not known.
    with_bubble: False where the spec's costs are not those of the model."""
    placement = spec.placement
    return {
        "schedule": spec.schedule,
        "ranks": placement.num_ranks,
        "chunks": placement.num_chunks,
        "microbatches": num_microbatches,
        "microbatch_group_size": spec.group_size,
        "bubble_rate": bubble_rate(spec, num_microbatches) if with_bubble else None,
        "costs": "estimated" if spec.estimated else "equal",
        "reasons": list(spec.reasons) if with_bubble else [],
        "stages": [
            {
                "rank": placement.rank_of(stage),
                "layers": list(held.layers),
                "embedding": held.embedding,
                "loss": held.loss,
            }
            for stage, held in enumerate(spec.stages)
        ],
    }


def facts_lines(facts: Mapping[str, Any]) -> list[str]:
    """`pipeline_facts` as text, without the stages."""
    chunks = f" x {facts['chunks']} chunks" if facts["chunks"] > 1 else ""
    told = [f"pipeline: {facts['schedule']}, {counted(facts['ranks'], 'rank')}{chunks}"]
    if (number := facts["microbatches"]) is not None:
        group = facts["microbatch_group_size"]
        groups = f" in groups of {group}" if group is not None else ""
        told.append(f"{counted(number, 'microbatch')} a step{groups}")
    if facts["bubble_rate"] is not None:
        is_estimated = facts["costs"] == "estimated"
        costs = "by the FLOPs of the stages" if is_estimated else "with equal stages and F = B = W"
        told.append(f"bubble {share_text(facts['bubble_rate'])} {costs}")
    return [", ".join(told), *("  auto: " + line for line in facts["reasons"])]


def device_limits(told: Sequence[tuple[int, int, int]], percentile: int, num_ranks: int) -> tuple[float, ...]:
    """By pipeline rank, what its fullest device has left. told: of every rank, its pipeline rank, bytes in use, all."""
    left: list[list[float]] = [[] for _ in range(num_ranks)]
    for pp_rank, used, total in told:
        left[pp_rank].append(percentile / 100 * total - used)
    return tuple(max(0.0, min(of_rank)) for of_rank in left)
