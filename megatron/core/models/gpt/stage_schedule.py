"""A schedule over a model's stages, by the flags: where they lie, what they cost, what ranks may hold (floor 0)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from megatron.core.models.gpt.stage_costs import ModelCosts
from megatron.core.models.gpt.stage_layers import StageLayersError, StageSpec, split_stages
from megatron.core.models.gpt.unit_costs import stage_units
from megatron.core.parallelism_config import ModelParallelConfig
from megatron.core.pipeline_parallel.plan.auto import fastest
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import PlanError
from megatron.core.pipeline_parallel.plan.joint import joint
from megatron.core.pipeline_parallel.plan.placement import LINEAR, LOOPED, V_SHAPED, Placement
from megatron.core.pipeline_parallel.plan.residency import RankBudget
from megatron.core.pipeline_parallel.plan.schedules import (
    AUTO,
    MOST_FORWARDS,
    MOST_SEARCHED_FORWARDS,
    SCHEDULES,
)
from megatron.core.pipeline_parallel.plan.spec import ScheduleSpec
from megatron.core.pipeline_parallel.plan.text import load_plan

_CHUNKS = (2, 4, 8)  # a rank, that are tried under one limit


def stages_of(parallel: ModelParallelConfig, num_layers: int, schedule: str | None) -> tuple[StageSpec, ...]:
    """The stages of a schedule by name; None: of the flags alone. Raises StageLayersError."""
    row = SCHEDULES.get(schedule or "")
    if row is None or row.placement != V_SHAPED:  # then the flags say how many chunks
        return split_stages(parallel, num_layers, kind=None if row is None else row.placement)
    return split_stages(parallel, num_layers, chunks=row.chunks, kind=row.placement)


@dataclasses.dataclass(frozen=True)
class StagedModel:
    """What flags say of a model's stages and steps.

    costs: None where the configuration is not complete, which rules tell. num_microbatches: of a step of the full
    batch, of global_batch_size samples. masked: batches have masks, which all stages need. budget: by
    which all is chosen together, None without. saved_in: the folder of searched orders.
    """

    parallel: ModelParallelConfig
    num_layers: int
    costs: ModelCosts | None
    num_microbatches: int
    global_batch_size: int | None
    masked: bool
    budget: RankBudget | None = None
    saved_in: str | None = None

    def asked(self) -> ScheduleSpec:
        """What every rank of the pipeline does in a step.

        Raises StageLayersError where layers do not divide over stages, PlanError where --pipeline-schedule-file is no
        plan for these ranks, where a step is too large for a plan, or where `auto` finds nothing.
        """
        parallel, ranks = self.parallel, self.parallel.pipeline_model_parallel_size
        if parallel.pipeline_schedule_file is not None:
            validates = parallel.enable_optimizer_post_validation
            file = load_plan(parallel.pipeline_schedule_file, ranks, post_validation=validates)
            return dataclasses.replace(self.spec(file.plan.schedule, file.plan.placement), file=file)
        if self.budget is not None and self.costs is not None:
            return self.within(self.budget, self.costs)
        named = None if parallel.pipeline_schedule == AUTO else self.spec(parallel.pipeline_schedule)
        if (fault := self.size_fault(ranks if named is None else named.placement.num_stages)) is not None:
            raise PlanError(fault)
        spec = named or self.fastest()
        return spec if parallel.pipeline_memory_limit is None else self.with_gathered_inputs(spec)

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
        costs = CostModel.of_ranks(placement) if model is None else model.of_stages(stages)
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

    def in_bytes(self, spec: ScheduleSpec) -> CostModel | None:
        """Costs of the spec's stages with activations in bytes; None where the configuration is not complete."""
        if spec.estimated:
            return spec.costs
        return self.costs.of_stages(spec.stages) if self.costs is not None and spec.stages else None

    def asks_device(self, spec: ScheduleSpec) -> bool:
        """Whether the limit is what the device has left: --zero-bubble-max-pending-backward auto on CUDA."""
        by_flags = self.parallel.enable_zero_bubble and not self.parallel.zero_bubble_v_schedule
        return by_flags and spec.file is None and spec.limits is None and spec.estimated

    def fastest(self) -> ScheduleSpec:
        """The fastest schedule for steps of the full batch.

        Without a limit every rank may hold what 1F1B holds on the first: what the F's of p microbatches leave. Raises
        StageLayersError where no schedule's stages fit the layers, PlanError where none fits the limit.
        """
        specs, impossible = self.candidates()
        limits, in_stages = specs[0].limits, specs[0].limit_in_stages
        if limits is None:
            in_stages = self.parallel.pipeline_model_parallel_size
            limits = specs[0].costs.left_by_forwards(specs[0].placement, in_stages)
        specs = [dataclasses.replace(one, limits=limits, limit_in_stages=in_stages) for one in specs]
        best = fastest(specs, self.num_microbatches)
        alike = [one for one in specs if (one.placement, one.stages) == (best.placement, best.stages)]
        rivals = tuple((one.schedule, one.group_size) for one in alike)
        return dataclasses.replace(best, rivals=rivals, reasons=(*best.reasons, *impossible))

    def within(self, budget: RankBudget, costs: ModelCosts) -> ScheduleSpec:
        """What takes least under one limit of all that a rank holds, of what flags leave open.

        Raises StageLayersError where no schedule's stages fit the layers, PlanError where nothing fits the limit.
        """
        specs, impossible = self._open_under_a_limit()
        lanes = budget.lanes(costs.layer().f)
        every = [
            dataclasses.replace(
                spec,
                costs=costs.of_stages(spec.stages),
                estimated=True,
                stages_units=stage_units(costs, spec.stages, spec.placement, sizes),
                residency=asked,
                lanes=lanes,
            )
            for spec in specs
            for asked, sizes in budget.rows
        ]
        best, reasons = joint(every, self.num_microbatches)
        return dataclasses.replace(best.spec, reasons=(*reasons, *impossible))

    def _open_under_a_limit(self) -> tuple[list[ScheduleSpec], list[str]]:
        named = self.parallel.pipeline_schedule
        return self.candidates(_CHUNKS, every_group=True, named=named if named in SCHEDULES else None)

    def on_the_stages_of(self, spec: ScheduleSpec) -> list[ScheduleSpec]:
        """What a run under one limit can still choose once its layers lie where they do."""
        stages = spec.placement, spec.stages
        return [one for one in self._open_under_a_limit()[0] if (one.placement, one.stages) == stages]

    def with_gathered_inputs(self, spec: ScheduleSpec) -> ScheduleSpec:
        """With what sequence parallel has gathered kept from F to W, where all ranks have memory for that and the step
        takes no longer; else as it is."""
        model = self.costs
        if spec.limits is None or not spec.estimated or model is None or not model.sequence_parallel:
            return spec
        if spec.file is not None or not spec.row.splits:
            return spec
        costs = dataclasses.replace(model, keeps_gathered=True).of_stages(spec.stages)
        kept = dataclasses.replace(spec, costs=costs, keeps_gathered=True)
        try:
            return kept if fastest((spec, kept), self.num_microbatches).keeps_gathered else spec
        except PlanError:
            return spec  # neither fits, which whoever plans will say

    def candidates(
        self, chunks: Sequence[int] = (), *, every_group: bool = False, named: str | None = None
    ) -> tuple[list[ScheduleSpec], list[str]]:
        """What can be chosen from, and a line for each schedule whose stages do not fit the layers.

        chunks: on each rank where no flag says how many; (): as many as the schedule's row has. every_group: gis with
        groups of half as many microbatches as ranks to as many, where no flag says so. named: of this schedule alone.
        """
        specs: list[ScheduleSpec] = []
        errors: list[tuple[str, StageLayersError]] = []
        parallel, ranks = self.parallel, self.parallel.pipeline_model_parallel_size
        groups = (
            range(-(-ranks // 2), ranks + 1) if every_group and not parallel.interleave_group_size else ()
        )
        open_ones = [name for name, row in SCHEDULES.items() if row.like is None] if ranks > 1 else ["1f1b"]
        for name in open_ones if named is None else [named]:
            row = SCHEDULES[name]
            for count in (chunks or (row.chunks,)) if row.placement == LOOPED else (None,):
                try:
                    one = self.spec(name)
                    if count is not None and one.placement.num_chunks == 1:  # no flag says how many
                        of = dataclasses.replace(parallel, num_virtual_stages_per_pipeline_rank=count)
                        one = dataclasses.replace(self, parallel=of).spec(name)
                except StageLayersError as error:
                    errors.append((name if count is None else f"{name}, {count} chunks", error))
                    continue
                if one not in specs and (row.placement != LINEAR or one.placement.num_chunks == 1):
                    sized = groups if name == "gis" else ()
                    specs += [dataclasses.replace(one, group_size=group) for group in sized] or [one]
        if not specs:
            raise errors[0][1]
        return specs, [f"{name}: not possible: {error}" for name, error in errors]
