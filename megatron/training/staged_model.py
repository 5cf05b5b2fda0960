"""What flags say of a model's stages: where they lie, what they cost, what ranks may hold of them (floor 0)."""

from __future__ import annotations

import dataclasses

from megatron.core.models.gpt.stage_layers import StageSpec, split_stages
from megatron.core.parallelism_config import ModelParallelConfig
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.placement import LINEAR, LOOPED, V_SHAPED, Placement
from megatron.core.pipeline_parallel.plan.schedules import (
    AUTO,
    MOST_FORWARDS,
    MOST_SEARCHED_FORWARDS,
    SCHEDULES,
)
from megatron.core.pipeline_parallel.plan.spec import ScheduleSpec
from megatron.estimate.model_costs import ModelCosts
from megatron.estimate.own_description import OwnCosts


def stages_of(parallel: ModelParallelConfig, num_layers: int, schedule: str | None) -> tuple[StageSpec, ...]:
    """The stages of a schedule by name; None: of the flags alone. Raises StageLayersError."""
    row = SCHEDULES.get(schedule or "")
    if row is None or row.placement != V_SHAPED:  # then the flags say how many chunks
        return split_stages(parallel, num_layers, kind=None if row is None else row.placement)
    return split_stages(parallel, num_layers, chunks=row.chunks, kind=row.placement)


@dataclasses.dataclass(frozen=True)
class StagedModel:
    """What flags say of a model's stages and steps.

    costs: by the model's description; None before there is one: all stages count as alike. num_microbatches: of a step
    of the full batch, of global_batch_size samples. masked: batches have masks, which all stages need. saved_in: the
    folder of searched orders.
    """

    parallel: ModelParallelConfig
    num_layers: int
    costs: ModelCosts | OwnCosts | None
    num_microbatches: int
    global_batch_size: int | None
    masked: bool
    saved_in: str | None = dataclasses.field(default=None, compare=False)

    def size_fault(self, num_stages: int) -> str | None:
        """Why a step has more forwards than a plan holds; None where it has not. num_stages: of the flags, `auto` looks
        at V's too."""
        schedule, ranks = self.parallel.pipeline_schedule, self.parallel.pipeline_model_parallel_size
        if schedule == AUTO and ranks > 1:
            num_stages = max(num_stages, ranks * max(row.chunks for row in SCHEDULES.values()))
        searched = schedule == AUTO or (schedule in SCHEDULES and SCHEDULES[schedule].searched)
        most = MOST_SEARCHED_FORWARDS if searched else MOST_FORWARDS
        count = self.num_microbatches
        if count * num_stages <= most:
            return None
        return (
            f"--global-batch-size {self.global_batch_size} is {count} microbatches a step on each replica, through "
            f"{num_stages} stages {count * num_stages} forwards; a plan of schedule {schedule} holds at most {most}"
        )

    def spec(self, schedule: str, placement: Placement | None = None) -> ScheduleSpec:
        """Of one schedule. placement: of a saved plan, which decides on the stages then. Raises StageLayersError."""
        parallel, row = self.parallel, SCHEDULES.get(schedule)
        ranks, size = parallel.pipeline_model_parallel_size, parallel.pipeline_memory_limit
        if placement is not None:
            chunks, kind = placement.num_chunks, placement.kind
            stages = split_stages(parallel, self.num_layers, chunks=chunks, kind=kind)
        else:
            stages = stages_of(parallel, self.num_layers, schedule)
            kind = LINEAR if len(stages) == ranks else LOOPED
            kind = V_SHAPED if row is not None and row.placement == V_SHAPED else kind
            placement = Placement(kind, ranks, len(stages) // ranks)
        group = None
        if row is not None and row.group_size is not None and placement.num_chunks > 1:
            group = getattr(parallel, row.group_size) or ranks
        searched = parallel.pipeline_schedule == AUTO or (row is not None and row.searched)
        model = self.costs if searched or size is not None else None
        costs = CostModel.of_ranks(placement) if model is None else model.of_placement(stages, placement)
        pending = parallel.zero_bubble_max_pending_backward if size is None else None
        limit = None if pending is None else pending * costs.whole_stage(placement)
        if size is not None and model is not None:  # it counts once activations are known in bytes
            limit = float(size)
        return ScheduleSpec(
            schedule,
            placement,
            costs,
            stages,
            group,
            estimated=model is not None,
            limits=None if limit is None else (limit,) * ranks,
            limit_in_stages=pending,
            masked=self.masked,
            saved_in=self.saved_in,
        )

    @property
    def may_keep_gathered(self) -> bool:
        """Whether F may keep what sequence parallel has gathered: where a limit in bytes has room for it."""
        by_device = self.parallel.enable_zero_bubble and not self.parallel.zero_bubble_v_schedule
        return by_device or self.parallel.pipeline_memory_limit is not None

    @property
    def reads_costs(self) -> bool:
        """Whether the plan depends on what stages cost."""
        row = SCHEDULES.get(self.parallel.pipeline_schedule or "")
        searched = row is not None and row.searched and self.parallel.pipeline_schedule_file is None
        return searched or self._is_limited or self.parallel.pipeline_schedule == AUTO

    @property
    def is_open(self) -> bool:
        """Whether it is not known yet what runs: that is chosen by costs, and there are none."""
        chosen = self._is_limited or self.parallel.pipeline_schedule == AUTO
        return self.costs is None and chosen and self.parallel.pipeline_schedule_file is None

    @property
    def _is_limited(self) -> bool:
        """In bytes."""
        limits = (self.parallel.pipeline_memory_limit, self.parallel.rank_memory_limit)
        return limits != (None, None)

    def in_bytes(self, spec: ScheduleSpec) -> CostModel | None:
        """Costs of the spec's stages with activations in bytes; None before the model is described."""
        if spec.estimated:
            return spec.costs
        if self.costs is None or not spec.stages:
            return None
        return self.costs.of_placement(spec.stages, spec.placement)

    def asks_device(self, spec: ScheduleSpec) -> bool:
        """Whether the limit is what the device has left: --zero-bubble-max-pending-backward auto on CUDA."""
        by_flags = self.parallel.enable_zero_bubble and not self.parallel.zero_bubble_v_schedule
        return by_flags and spec.file is None and spec.limits is None and spec.estimated
