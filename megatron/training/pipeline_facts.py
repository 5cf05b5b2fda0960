"""What can be said of a run's pipeline before it starts: stages, schedule, bubble (floor 0)."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron.core.models.gpt.stage_layers import (
    StageLayersError,
    StageSpec,
    layer_map_lines,
    split_stages,
)
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import PlanError
from megatron.core.pipeline_parallel.plan.placement import LINEAR, LOOPED, Placement
from megatron.core.pipeline_parallel.plan.registry import build_plan
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.plan.simulate import simulate
from megatron.core.rank_grid import RankGridError
from megatron.training.config import Config
from megatron.training.microbatches import BatchScheduleError

# Beyond so many forwards a simulation would make --check-config wait.
MOST_FORWARDS = 50_000
INTERLEAVED = "interleaved"


@dataclasses.dataclass(frozen=True)
class PipelineFacts:
    """num_microbatches: of one step after the ramp, None where the batch does not divide.

    bubble_rate: of such a step with stages of equal cost and F = B = W, None where it was not simulated.
    """

    schedule: str
    placement: Placement
    stages: tuple[StageSpec, ...]
    num_microbatches: int | None
    group_size: int | None
    bubble_rate: float | None

    def as_json(self) -> dict[str, Any]:
        """Plain values, for --check-config --json."""
        return {
            "schedule": self.schedule,
            "ranks": self.placement.num_ranks,
            "chunks": self.placement.num_chunks,
            "microbatches": self.num_microbatches,
            "microbatch_group_size": self.group_size,
            "bubble_rate": self.bubble_rate,
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
            told.append(f"bubble {100 * self.bubble_rate:.1f}% with equal stages and F = B = W")
        return [
            ", ".join(told),
            *("  " + line.removeprefix(" > ") for line in layer_map_lines(self.stages, p)),
        ]


def stage_placement(config: Config) -> tuple[tuple[StageSpec, ...], Placement]:
    """The stages of a run and which pipeline rank holds which. Raises StageLayersError."""
    stages = split_stages(config.parallel, config.model.num_layers)
    num_ranks = config.parallel.pipeline_model_parallel_size
    chunks = len(stages) // num_ranks
    return stages, Placement(LOOPED if chunks > 1 else LINEAR, num_ranks, chunks)


def pipeline_facts(config: Config) -> PipelineFacts | None:
    """Facts of a configuration, sound or not; None where layers do not divide over stages."""
    if config.model.num_layers is None:
        return None
    try:
        stages, placement = stage_placement(config)
    except StageLayersError:
        return None
    microbatches = _microbatches(config)
    schedule = config.parallel.pipeline_schedule or ("interleaved" if placement.num_chunks > 1 else "1f1b")
    group = config.parallel.microbatch_group_size_per_vp_stage if schedule == INTERLEAVED else None
    bubble = None
    if microbatches is not None and microbatches * placement.num_stages <= MOST_FORWARDS:
        bubble = _bubble_rate(schedule, placement, microbatches, group)
    return PipelineFacts(schedule, placement, stages, microbatches, group, bubble)


def _microbatches(config: Config) -> int | None:
    try:
        schedule = config.batch_schedule()
    except (BatchScheduleError, RankGridError, TypeError, ZeroDivisionError):
        return None
    return schedule.num_microbatches(schedule.rampup[2] + 1 if schedule.rampup is not None else 0)


def _bubble_rate(schedule: str, placement: Placement, microbatches: int, group: int | None) -> float | None:
    chunks = placement.num_chunks if schedule == INTERLEAVED else None
    try:
        plan = build_plan(schedule, Request(placement.num_ranks, microbatches, chunks, group))
        return simulate(plan, CostModel.of_ranks(plan.placement)).bubble_rate
    except PlanError:  # a rule tells
        return None
