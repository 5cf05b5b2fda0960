"""The planner of a run: the one decider of its pipeline's schedule, and of every plan of it (floor 0).

Built once, from what flags say of stages. It chooses a schedule, is then told of the engine that was built and of what
steps were measured to cost, and answers with plans.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence

from megatron.core.distributed.custom_fsdp.data_parallel_config import DistributedDataParallelConfig
from megatron.core.models.gpt.stage_layers import StageLayersError
from megatron.core.pipeline_parallel.plan.auto import fastest
from megatron.core.pipeline_parallel.plan.budget_search import fastest_within_limit
from megatron.core.pipeline_parallel.plan.build import order_within_limits, plan_for
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.held.lanes import LaneCosts
from megatron.core.pipeline_parallel.plan.held.state_bytes import RankBudget
from megatron.core.pipeline_parallel.plan.held.units import StageUnits
from megatron.core.pipeline_parallel.plan.ir import Plan, PlanError
from megatron.core.pipeline_parallel.plan.measuring.measured_costs import Figures
from megatron.core.pipeline_parallel.plan.measuring.replan import MeasuredPlan, replanned
from megatron.core.pipeline_parallel.plan.placement import LINEAR, LOOPED
from megatron.core.pipeline_parallel.plan.residency import PlannedResidency, Residency
from megatron.core.pipeline_parallel.plan.schedules import AUTO, SCHEDULES
from megatron.core.pipeline_parallel.plan.spec import PlanPurpose, ScheduleSpec
from megatron.core.pipeline_parallel.plan.text import load_plan
from megatron.estimate.model_costs import ModelCosts
from megatron.estimate.own_description import OwnCosts
from megatron.training.staged_model import StagedModel

_CHUNKS = (2, 4, 8)  # a rank, that are tried under one limit


class Planner:
    """What every rank of the pipeline does in a step.

    chosen: by flags alone. spec: by which steps are planned now. costs: as the run has measured them, None before.
    Ranks that are told the same come to the same plans.
    """

    def __init__(
        self, model: StagedModel, budget: RankBudget | None = None, decided: ScheduleSpec | None = None
    ) -> None:
        """budget: by which all is chosen together. decided: in place of a choice.

        Raises StageLayersError where layers do not divide over stages, PlanError where --pipeline-schedule-file is no
        plan for these ranks, or where nothing fits the limits.
        """
        self.model, self.budget = model, budget
        file = model.parallel.pipeline_schedule_file
        found = decided or (None if file is None else _of_file(model, file))
        self.chosen = found or _chosen(model, budget)
        self.spec, self.costs = self.chosen, None
        self.residencies: Mapping[int, PlannedResidency] = {}
        self._plans: dict[tuple[int, PlanPurpose], Plan] = {}

    costs: CostModel | None

    def sharded(self, config: DistributedDataParallelConfig) -> DistributedDataParallelConfig:
        """With the strategy of the sharding table that the budget has decided on."""
        asked = self.chosen.residency
        if self.budget is None or asked is None:
            return config
        return dataclasses.replace(config, data_parallel_sharding_strategy=asked.strategy)

    def plan(self, num_microbatches: int, purpose: PlanPurpose) -> Plan:
        """The verified plan of a step, the same object until something is decided anew. Raises PlanError."""
        key = num_microbatches, purpose
        if key not in self._plans:
            self._plans[key] = plan_for(self.spec, *key)
        return self._plans[key]

    def fault(self, sizes: Iterable[int]) -> str | None:
        """Why there is no plan of steps of these numbers of microbatches."""
        try:
            for num_microbatches in sizes:
                order_within_limits(self.spec, num_microbatches)
        except PlanError as error:
            return str(error)
        return None

    # What is told on the way -----------------------------------------------------------------------------

    def adopt(self, spec: ScheduleSpec) -> None:
        """Plan by this one from now on. Between steps, on all ranks alike; layers stay where they are."""
        assert (spec.placement, spec.stages) == (self.spec.placement, self.spec.stages), (
            f"layers cannot move from {self.spec.placement} to {spec.placement}"
        )
        self.spec = spec
        self._plans.clear()

    def limit_activations(self, limits: tuple[float, ...]) -> None:
        """By rank, what its device has left for activations."""
        self.adopt(with_gathered_inputs(self.model, dataclasses.replace(self.spec, limits=limits)))

    def serve(self, units: tuple[StageUnits, ...], residency: Residency) -> None:
        """What data parallelism asks of plans: units by global stage, of the engine. What the wire was chosen by stays,
        as a plan that just fits a limit is found with it alone."""
        self.adopt(dataclasses.replace(self.spec, stages_units=units, residency=residency))

    def keep_groupings(self, residencies: Mapping[int, PlannedResidency]) -> None:
        """Plan with these groups of microbatches from now on, between steps: those of a saved run, or of this one."""
        self.residencies = dict(residencies)
        groupings = tuple((size, one.grouping) for size, one in sorted(residencies.items()))
        self.adopt(dataclasses.replace(self.spec, groupings=groupings))

    @property
    def ran(self) -> Mapping[int, PlannedResidency]:
        """Of training plans, by their number of microbatches: how gradients are grouped."""
        trained = {
            size: plan.residency
            for (size, purpose), plan in self._plans.items()
            if purpose is not PlanPurpose.EVALUATE and plan.residency is not None
        }
        return {**self.residencies, **trained}

    def replan(
        self,
        iteration: int,
        figures: Sequence[Figures],
        num_microbatches: tuple[int, int],
        *,
        splits: bool,
        lanes: LaneCosts | None,
    ) -> tuple[ScheduleSpec, tuple[str, ...], MeasuredPlan]:
        """Decide again by what ranks have measured, see `replanned`; groups of microbatches stay. Returns what was
        decided, with its gathers and reductions though none may move, reasons of a choice, and what is told of it.
        """
        self.keep_groupings(self.ran)
        spec, moves = self.spec, self.spec.residency is not None
        if self.budget is not None and not moves:  # nothing moves, but there is a limit
            units = self.chosen.stages_units
            spec = dataclasses.replace(spec, stages_units=units, residency=self.chosen.residency)
        again, self.costs, reasons, told = replanned(
            iteration, figures, spec, num_microbatches, splits=splits, lanes=lanes
        )
        if told.kept is None:
            self.adopt(again if moves else again.bare)
        return again, reasons, told


# The choice of the start -----------------------------------------------------------------------------------


@functools.lru_cache(maxsize=8)
def _chosen(model: StagedModel, budget: RankBudget | None) -> ScheduleSpec:
    """By rules of flags, by the session and by user code alike: found once."""
    limited = budget is not None or model.parallel.pipeline_memory_limit is not None
    assert model.costs is not None or not limited, "a limit in bytes, and a model that nobody has described"
    if budget is not None and model.costs is not None:
        return within(model, budget, model.costs)
    name = model.parallel.pipeline_schedule
    spec = fastest_of(model) if name == AUTO else model.spec(name)
    return spec if model.parallel.pipeline_memory_limit is None else with_gathered_inputs(model, spec)


def _of_file(model: StagedModel, path: str) -> ScheduleSpec:
    parallel = model.parallel
    validates, ranks = parallel.enable_optimizer_post_validation, parallel.pipeline_model_parallel_size
    file = load_plan(path, ranks, post_validation=validates)
    return dataclasses.replace(model.spec(file.plan.schedule, file.plan.placement), file=file)


def fastest_of(model: StagedModel) -> ScheduleSpec:
    """The fastest schedule for steps of the full batch.

    Without a limit every rank may hold what 1F1B holds on the first: what the F's of p microbatches leave. Raises
    StageLayersError where no schedule's stages fit the layers, PlanError where none fits the limit.
    """
    specs, impossible = candidates(model)
    limits, in_stages = specs[0].limits, specs[0].limit_in_stages
    if limits is None:
        in_stages = model.parallel.pipeline_model_parallel_size
        limits = specs[0].costs.left_by_forwards(specs[0].placement, in_stages)
    specs = [dataclasses.replace(one, limits=limits, limit_in_stages=in_stages) for one in specs]
    best = fastest(specs, model.num_microbatches)
    alike = [one for one in specs if (one.placement, one.stages) == (best.placement, best.stages)]
    rivals = tuple((one.schedule, one.group_size) for one in alike)
    return dataclasses.replace(best, rivals=rivals, reasons=(*best.reasons, *impossible))


def within(model: StagedModel, budget: RankBudget, costs: ModelCosts | OwnCosts) -> ScheduleSpec:
    """What takes least under one limit of all that a rank holds, of what flags leave open.

    Raises StageLayersError where no schedule's stages fit the layers, PlanError where nothing fits the limit.
    """
    specs, impossible = _open_under_a_limit(model)
    lanes = budget.lanes(costs.unit_flops)
    every = [
        dataclasses.replace(
            spec,
            costs=costs.of_placement(spec.stages, spec.placement),
            estimated=True,
            stages_units=costs.stage_units(spec.stages, spec.placement, sizes),
            residency=asked,
            lanes=lanes,
        )
        for spec in specs
        for asked, sizes in budget.rows
    ]
    best, reasons = fastest_within_limit(every, model.num_microbatches)
    return dataclasses.replace(best.spec, reasons=(*reasons, *impossible))


def possible_specs(model: StagedModel, budget: RankBudget | None) -> list[ScheduleSpec]:
    """All that may be chosen: of whose stages a description has to know.

    Raises StageLayersError where no schedule's stages fit the layers, PlanError for a file that is no plan.
    """
    file, name = model.parallel.pipeline_schedule_file, model.parallel.pipeline_schedule
    if file is not None:
        return [_of_file(model, file)]
    if budget is not None:
        return _open_under_a_limit(model)[0]
    return candidates(model)[0] if name == AUTO else [model.spec(name)]


def _open_under_a_limit(model: StagedModel) -> tuple[list[ScheduleSpec], list[str]]:
    named = model.parallel.pipeline_schedule
    return candidates(model, _CHUNKS, every_group=True, named=named if named in SCHEDULES else None)


def with_gathered_inputs(model: StagedModel, spec: ScheduleSpec) -> ScheduleSpec:
    """With what sequence parallel has gathered kept from F to W, where all ranks have memory for that and the step
    takes no longer; else as it is."""
    costs = None if model.costs is None else model.costs.keeping_gathered
    if spec.limits is None or not spec.estimated or costs is None:
        return spec
    if spec.file is not None or not spec.row.splits:
        return spec
    kept = dataclasses.replace(spec, costs=costs.of_stages(spec.stages), keeps_gathered=True)
    try:
        return kept if fastest((spec, kept), model.num_microbatches).keeps_gathered else spec
    except PlanError:
        return spec  # neither fits, which whoever plans will say


def candidates(
    model: StagedModel, chunks: Sequence[int] = (), *, every_group: bool = False, named: str | None = None
) -> tuple[list[ScheduleSpec], list[str]]:
    """What can be chosen from, and a line for each schedule whose stages do not fit the layers.

    chunks: on each rank where no flag says how many; (): as many as the schedule's row has. every_group: gis with
    groups of half as many microbatches as ranks to as many, where no flag says so. named: of this schedule alone.
    """
    specs: list[ScheduleSpec] = []
    errors: list[tuple[str, StageLayersError]] = []
    parallel, ranks = model.parallel, model.parallel.pipeline_model_parallel_size
    groups = range(-(-ranks // 2), ranks + 1) if every_group and not parallel.interleave_group_size else ()
    open_ones = [name for name, row in SCHEDULES.items() if row.like is None] if ranks > 1 else ["1f1b"]
    for name in open_ones if named is None else [named]:
        row = SCHEDULES[name]
        for count in (chunks or (row.chunks,)) if row.placement == LOOPED else (None,):
            try:
                one = model.spec(name)
                if count is not None and one.placement.num_chunks == 1:  # no flag says how many
                    of = dataclasses.replace(parallel, num_virtual_stages_per_pipeline_rank=count)
                    one = dataclasses.replace(model, parallel=of).spec(name)
                if model.costs is not None:
                    model.costs.check(one.placement, splits=row.splits)
            except StageLayersError as error:
                errors.append((name if count is None else f"{name}, {count} chunks", error))
                continue
            if one not in specs and (row.placement != LINEAR or one.placement.num_chunks == 1):
                sized = groups if name == "gis" else ()
                specs += [dataclasses.replace(one, group_size=group) for group in sized] or [one]
    if not specs:
        raise errors[0][1]
    return specs, [f"{name}: not possible: {error}" for name, error in errors]
