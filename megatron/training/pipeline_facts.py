"""What can be said of a run's pipeline before it starts: stages, schedule, bubble (floor 0)."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron.core.models.gpt.stage_layers import StageLayersError, StageSpec, layer_map_lines
from megatron.core.pipeline_parallel.plan.ir import PlanError
from megatron.core.pipeline_parallel.plan.placement import Placement
from megatron.core.pipeline_parallel.plan.simulate import simulate
from megatron.training.config import Config
from megatron.training.plans import Plans, last_num_microbatches

# Beyond so many forwards a simulation would make --check-config wait.
MOST_FORWARDS = 50_000


@dataclasses.dataclass(frozen=True)
class PipelineFacts:
    """num_microbatches: of one step after the ramp, None where the batch does not divide.

    bubble_rate: of such a step, None where it was not simulated: with stages of equal cost and F = B = W; estimated: by
    the model's FLOPs. reasons: of `auto`, a line a candidate.
    """

    schedule: str
    placement: Placement
    stages: tuple[StageSpec, ...]
    num_microbatches: int | None
    group_size: int | None
    bubble_rate: float | None
    estimated: bool = False
    reasons: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Plain values, for --check-config --json."""
        return {
            "schedule": self.schedule,
            "ranks": self.placement.num_ranks,
            "chunks": self.placement.num_chunks,
            "microbatches": self.num_microbatches,
            "microbatch_group_size": self.group_size,
            "bubble_rate": self.bubble_rate,
            "costs": "estimated" if self.estimated else "equal",
            "reasons": list(self.reasons),
            "stages": [
                {
                    "rank": self.placement.rank_of(stage),
                    "layers": list(spec.layers),
                    "embedding": spec.embedding,
                    "loss": spec.loss,
                }
                for stage, spec in enumerate(self.stages)
            ],
        }

    def lines(self) -> list[str]:
        """Text, for --check-config."""
        p = self.placement
        chunks = f" x {p.num_chunks} chunks" if p.num_chunks > 1 else ""
        told = [f"pipeline: {self.schedule}, {p.num_ranks} ranks{chunks}"]
        if self.num_microbatches is not None:
            groups = f" in groups of {self.group_size}" if self.group_size is not None else ""
            noun = "microbatch" if self.num_microbatches == 1 else "microbatches"
            told.append(f"{self.num_microbatches} {noun} a step{groups}")
        if self.bubble_rate is not None:
            costs = "by the FLOPs of the stages" if self.estimated else "with equal stages and F = B = W"
            told.append(f"bubble {100 * self.bubble_rate:.1f}% {costs}")
        return [
            ", ".join(told),
            *("  auto: " + line for line in self.reasons),
            *("  " + line.removeprefix(" > ") for line in layer_map_lines(self.stages, p)),
        ]


def pipeline_facts(config: Config) -> PipelineFacts | None:
    """Facts of a configuration, sound or not; None where layers do not divide over stages or nothing fits."""
    if config.model.num_layers is None:
        return None
    try:
        plans = Plans(config)
    except (StageLayersError, PlanError):
        return None
    microbatches = None if config.batch_schedule_or_none() is None else last_num_microbatches(config)
    bubble = None
    if microbatches is not None and microbatches * plans.placement.num_stages <= MOST_FORWARDS:
        bubble = _bubble_rate(plans, microbatches)
    return PipelineFacts(
        plans.schedule,
        plans.placement,
        plans.stages,
        microbatches,
        plans.group_size,
        bubble,
        plans.estimated,
        plans.reasons,
    )


def _bubble_rate(plans: Plans, microbatches: int) -> float | None:
    try:
        return simulate(plans.computations(microbatches), plans.costs).bubble_rate
    except PlanError:  # a rule tells
        return None
