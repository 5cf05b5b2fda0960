"""What can be said of a run's pipeline before it starts: schedule, stages, bubble."""

from __future__ import annotations

from typing import Any

from megatron.core.pipeline_parallel.plan.ir import PlanError
from megatron.core.pipeline_parallel.plan.simulate import simulate
from megatron.core.pipeline_parallel.plan.spec import ScheduleSpec, order_within_limits

# Beyond so many forwards a simulation would make --check-config wait.
MOST_FORWARDS = 50_000


def bubble_rate(spec: ScheduleSpec, num_microbatches: int | None) -> float | None:
    """Of a step's computations by the spec's costs; None where the number of microbatches is not known or large, and
    where there is no such plan, which rules tell."""
    if num_microbatches is None or num_microbatches * spec.placement.num_stages > MOST_FORWARDS:
        return None
    try:
        return simulate(order_within_limits(spec, num_microbatches), spec.costs).bubble_rate
    except PlanError:
        return None


def pipeline_facts(spec: ScheduleSpec, num_microbatches: int | None) -> dict[str, Any]:
    """Plain values, for --check-config --json. num_microbatches: of a step after the ramp, None: it is not known."""
    placement = spec.placement
    return {
        "schedule": spec.schedule,
        "ranks": placement.num_ranks,
        "chunks": placement.num_chunks,
        "microbatches": num_microbatches,
        "microbatch_group_size": spec.group_size,
        "bubble_rate": bubble_rate(spec, num_microbatches),
        "costs": "estimated" if spec.estimated else "equal",
        "reasons": list(spec.reasons),
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


def facts_lines(spec: ScheduleSpec, num_microbatches: int | None) -> list[str]:
    """The same as text, without the stages."""
    placement, bubble = spec.placement, bubble_rate(spec, num_microbatches)
    chunks = f" x {placement.num_chunks} chunks" if placement.num_chunks > 1 else ""
    told = [f"pipeline: {spec.schedule}, {placement.num_ranks} ranks{chunks}"]
    if num_microbatches is not None:
        groups = f" in groups of {spec.group_size}" if spec.group_size is not None else ""
        told.append(
            f"{num_microbatches} {'microbatch' if num_microbatches == 1 else 'microbatches'} a step{groups}"
        )
    if bubble is not None:
        costs = "by the FLOPs of the stages" if spec.estimated else "with equal stages and F = B = W"
        told.append(f"bubble {100 * bubble:.1f}% {costs}")
    return [", ".join(told), *("  auto: " + line for line in spec.reasons)]
