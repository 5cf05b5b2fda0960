"""The pipeline plans of a run, one for each number of microbatches that it meets."""

from __future__ import annotations

import dataclasses
import functools

from megatron.core import safe_files
from megatron.core.models.gpt.stage_layers import StageSpec
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import B, Kind, Plan, PlanError, W
from megatron.core.pipeline_parallel.plan.kinds import IS_COMPUTE
from megatron.core.pipeline_parallel.plan.passes.forward_only import forward_only
from megatron.core.pipeline_parallel.plan.passes.lower import lower
from megatron.core.pipeline_parallel.plan.passes.post_validation import post_validation
from megatron.core.pipeline_parallel.plan.placement import Placement
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.plan.schedules import AUTO, SCHEDULES, build_plan
from megatron.core.pipeline_parallel.plan.text import from_json
from megatron.core.pipeline_parallel.plan.verify import peak_activation, verify
from megatron.training.config import Config
from megatron.training.schedule_choice import (
    Layout,
    choose_again,
    choose_layout,
    layout_of,
    limits_of_flags,
    with_gathered_inputs,
)

# [Note: size of plans] A plan is a list of operations that Python makes and checks before the first step: some
# microseconds and half a kilobyte for each forward. A search weighs its candidates too, in a time that grows faster.
MOST_FORWARDS = 2**18
MOST_SEARCHED_FORWARDS = 2**16
MAX_FILE_BYTES = 1 << 24  # of a saved plan: 64 ranks with 1024 microbatches on a V

# Sums of activations are compared with this much of tolerance, relative to the limit.
_TOLERANCE = 1e-9


class Plans:
    """What every rank of the pipeline does in a step, by the flags of a run (pure).

    schedule: its name, where `auto` was asked for the one chosen, `reasons` then says why, a line a candidate. stages:
    by global stage. group_size: microbatches that interleaving takes in turn, None without. costs: of stages;
    estimated: they are the model's (times in layers, activations in bytes), else equal ranks with F = B = W. limits: by
    rank, what it may hold of activations in that unit; None: what the schedule has of itself.

    Raises StageLayersError where layers do not divide over stages, PlanError where --pipeline-schedule-file is no plan
    for these ranks, or where `auto` finds nothing.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._masked = config.data.reset_attention_mask
        self._file: Plan | None = None
        self._limits_of_device = False
        self.reasons: tuple[str, ...] = ()
        parallel = config.parallel
        if parallel.pipeline_schedule_file is not None:
            self._file = load_plan(parallel.pipeline_schedule_file, parallel.pipeline_model_parallel_size)
            if _steps(self._file) and not parallel.enable_optimizer_post_validation:
                raise PlanError(
                    f"--pipeline-schedule-file {parallel.pipeline_schedule_file} makes and validates the optimizer's "
                    "steps: give --enable-optimizer-post-validation"
                )
            self._layout = layout_of(config, self._file.schedule, placement=self._file.placement)
            self.limits = limits_of_flags(config, self._layout)
        elif parallel.pipeline_schedule == AUTO:
            _check_size(config, parallel.pipeline_model_parallel_size)
            chosen = choose_layout(config, last_num_microbatches(config))
            self._layout, self.limits, self.reasons = chosen.layout, chosen.limits, chosen.lines
        else:
            self._layout = layout_of(config, parallel.pipeline_schedule)
            _check_size(config, self._layout.placement.num_stages)
            self.limits = limits_of_flags(config, self._layout)
        if parallel.pipeline_memory_limit is not None:
            self._price_gathers()
        self._forget()

    @property
    def schedule(self) -> str:
        return self._layout.schedule

    @property
    def placement(self) -> Placement:
        return self._layout.placement

    @property
    def stages(self) -> tuple[StageSpec, ...]:
        return self._layout.stages

    @property
    def group_size(self) -> int | None:
        return self._layout.group_size

    @property
    def costs(self) -> CostModel:
        return self._layout.costs

    @property
    def estimated(self) -> bool:
        return self._layout.estimated

    @property
    def keeps_gathered(self) -> bool:
        """Whether F keeps what sequence parallel has gathered, because memory allows it: W does not gather again."""
        return self._layout.keeps_gathered

    @property
    def layout(self) -> Layout:
        """Stages, placement and costs together."""
        return self._layout

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients are computed apart from the backward of the input."""
        if self._file is not None:
            return any(op[0] in (B, W) for row in self._file.rows for op in row)
        return SCHEDULES[self.schedule].splits

    @property
    def of_file(self) -> bool:
        """Whether the plan is that of --pipeline-schedule-file."""
        return self._file is not None

    @property
    def reads_costs(self) -> bool:
        """Whether other costs may make another plan: a schedule that is searched, or `auto`."""
        chosen = self._config.parallel.pipeline_schedule == AUTO
        return self._file is None and (chosen or SCHEDULES[self.schedule].searched)

    @property
    def asks_device(self) -> bool:
        """Whether the memory limit is what the device has left: --zero-bubble-max-pending-backward auto on CUDA."""
        parallel = self._config.parallel
        by_flags = parallel.enable_zero_bubble and not parallel.zero_bubble_v_schedule
        return self._file is None and self.limits is None and by_flags and self.estimated

    def computations(self, num_microbatches: int) -> Plan:
        """Without transfers. Raises PlanError."""
        if self._file is not None:
            return self._of_file(num_microbatches)
        plan = _built(self.schedule, self._layout.request(num_microbatches, self.limits))
        self._check_limits(plan)
        return plan

    def train(self, num_microbatches: int) -> Plan:
        """With transfers, verified. Raises PlanError."""
        return self._train(num_microbatches)

    def train_and_step(self, num_microbatches: int) -> Plan:
        """`train`, with the operations of post-validation. Raises PlanError."""
        return self._train_and_step(num_microbatches)

    def evaluate(self, num_microbatches: int) -> Plan:
        """The same order of forwards, without backwards. Raises PlanError."""
        return self._evaluate(num_microbatches)

    def local_stages(self, pp_rank: int) -> tuple[int, ...]:
        """Global stages of a pipeline rank, by chunk."""
        return tuple(self.placement.stage_of(pp_rank, chunk) for chunk in range(self.placement.num_chunks))

    def reads_data(self, pp_rank: int) -> bool:
        """Whether a pipeline rank needs batches: for the embedding, the loss, or the masks that all its layers need."""
        mine = (self.stages[stage] for stage in self.local_stages(pp_rank))
        return self._masked or any(spec.embedding or spec.loss for spec in mine)

    def limit(self, limits: tuple[float, ...]) -> None:
        """Plan within these limits from now on, by rank in the unit of the costs' activations."""
        assert len(limits) == self.placement.num_ranks, (
            f"{len(limits)} limits, {self.placement.num_ranks} ranks"
        )
        self.limits, self._limits_of_device = limits, True
        self._price_gathers()
        self._forget()

    def use_layout(self, layout: Layout, limits: tuple[float, ...] | None) -> None:
        """Plan by this schedule and these costs from now on, such as measured ones. Layers stay where they are, and a
        plan from a file as it is. limits: in the costs' unit; None: the schedule's own."""
        assert (layout.placement, layout.stages) == (self.placement, self.stages), (
            f"layers cannot move from {self.placement} to {layout.placement}"
        )
        self._layout, self.limits = layout, limits
        self._forget()

    def limits_under(self, costs: CostModel) -> tuple[float, ...] | None:
        """The limits, by measured costs in bytes. What is given in bytes stays; activations are counted anew."""
        parallel = self._config.parallel
        if self.limits is None or self._limits_of_device or parallel.pipeline_memory_limit is not None:
            return self.limits
        layout = dataclasses.replace(self._layout, costs=costs)
        if parallel.zero_bubble_max_pending_backward is not None:
            return limits_of_flags(self._config, layout)
        return (self.placement.num_ranks * layout.whole_stage,) * self.placement.num_ranks  # auto's own

    def layout_under(
        self, costs: CostModel, limits: tuple[float, ...] | None, num_microbatches: int, *, splits: bool
    ) -> tuple[Layout, tuple[str, ...]]:
        """The schedule to run by these costs, and for `auto` why: one whose layers lie where they lie.

        splits: the model's backwards can be split. Raises PlanError where nothing fits.
        """
        if self._config.parallel.pipeline_schedule != AUTO:
            return dataclasses.replace(self._layout, costs=costs), ()
        assert limits is not None, "auto has limits"
        chosen = choose_again(self._config, self._layout, costs, limits, num_microbatches, splits=splits)
        return chosen.layout, chosen.lines

    @staticmethod
    def computations_of(layout: Layout, num_microbatches: int, limits: tuple[float, ...] | None) -> Plan:
        """Of a schedule that is not (yet) that of the run. Raises PlanError."""
        return _built(layout.schedule, layout.request(num_microbatches, limits))

    def _price_gathers(self) -> None:
        """Under a limit in bytes: whether there is room to keep gathered inputs."""
        if self._file is None and self.limits is not None:
            count = last_num_microbatches(self._config)
            self._layout = with_gathered_inputs(self._config, self._layout, self.limits, count)

    def _forget(self) -> None:
        self._train = functools.lru_cache(maxsize=None)(self._build)
        self._train_and_step = functools.lru_cache(maxsize=None)(self._build_with_step)
        self._evaluate = functools.lru_cache(maxsize=None)(self._build_forward_only)

    def _build(self, num_microbatches: int) -> Plan:
        computations = self.computations(num_microbatches)
        if self._file is not None and self._file.has_transfers and not _steps(self._file):
            return self._file
        return lower(computations, self.costs)

    def _build_with_step(self, num_microbatches: int) -> Plan:
        train = self.train(num_microbatches)
        if self._file is not None and _steps(self._file):
            return self._file
        return post_validation(train, self.costs)

    def _build_forward_only(self, num_microbatches: int) -> Plan:
        # A whole validation set may end with fewer microbatches than the schedule needs: of a larger plan, those that
        # there are.
        plan = forward_only(self.computations(max(num_microbatches, self._least())))
        rows = tuple(tuple(op for op in row if op[2] < num_microbatches) for row in plan.rows)
        return lower(dataclasses.replace(plan, num_microbatches=num_microbatches, rows=rows), self.costs)

    def _least(self) -> int:
        """The fewest microbatches that the schedule can be planned for."""
        if self._file is not None:
            return self._file.num_microbatches
        return SCHEDULES[self.schedule].least_microbatches(self.placement.num_ranks, self.group_size)

    def _of_file(self, num_microbatches: int) -> Plan:
        """The file's computations. Raises PlanError for another number of microbatches."""
        plan = self._file
        assert plan is not None
        if plan.num_microbatches != num_microbatches:
            raise PlanError(
                f"--pipeline-schedule-file {self._config.parallel.pipeline_schedule_file} is a plan for "
                f"{plan.num_microbatches} microbatches a step, this one has {num_microbatches}: change "
                "--global-batch-size, or save a plan for it"
            )
        self._check_limits(plan)
        rows = tuple(tuple(op for op in row if IS_COMPUTE[op[0]]) for row in plan.rows)
        return dataclasses.replace(plan, rows=rows)

    def _check_limits(self, plan: Plan) -> None:
        """Searches keep to limits; fixed orders hold what they hold. Raises PlanError."""
        if self.limits is None or (self._file is None and SCHEDULES[self.schedule].searched):
            return
        for rank, limit in enumerate(self.limits):
            peak = peak_activation(rank, plan.rows[rank], self.costs)
            if peak > limit * (1 + _TOLERANCE):
                held, allowed = (_amount(size, self.estimated) for size in (peak, limit))
                raise PlanError(
                    f"{plan.schedule} holds {held} of activations on pipeline rank {rank}, and --pipeline-memory-limit "
                    f"is {allowed}: raise it, or use zb-1p, zbv or auto, which plan within it"
                )


def size_fault(config: Config, num_stages: int) -> str | None:
    """Why a step has more forwards than a plan holds; None where it has not. num_stages: of the flags, `auto` looks at
    V's too."""
    schedule, ranks = config.parallel.pipeline_schedule, config.parallel.pipeline_model_parallel_size
    if schedule == AUTO and ranks > 1:
        num_stages = max(num_stages, ranks * max(row.chunks for row in SCHEDULES.values()))
    searched = schedule == AUTO or (schedule in SCHEDULES and SCHEDULES[schedule].searched)
    most = MOST_SEARCHED_FORWARDS if searched else MOST_FORWARDS
    microbatches = last_num_microbatches(config)
    if microbatches * num_stages <= most:
        return None
    return (
        f"--global-batch-size {config.training.global_batch_size} is {microbatches} microbatches a step on each "
        f"replica, through {num_stages} stages {microbatches * num_stages} forwards; a plan of schedule {schedule} "
        f"holds at most {most}"
    )


def _check_size(config: Config, num_stages: int) -> None:
    if (fault := size_fault(config, num_stages)) is not None:
        raise PlanError(fault)


def _steps(plan: Plan) -> bool:
    """Whether it has the operations of post-validation."""
    return any(op[0] == Kind.STEP for row in plan.rows for op in row)


def _amount(size: float, in_bytes: bool) -> str:
    return f"{size / 2**20:.1f}M" if in_bytes else f"{size:g}"


@functools.lru_cache(maxsize=32)
def _built(schedule: str, request: Request) -> Plan:
    """Kept: the same question is asked before the run, by every model provider, and in the run."""
    return build_plan(schedule, request)


def load_plan(path: str, num_ranks: int) -> Plan:
    """A saved plan in JSON, for a pipeline of these ranks. Raises PlanError naming the file."""
    try:
        plan = from_json(safe_files.read_text(path, max_bytes=MAX_FILE_BYTES, follow=True))
        verify(plan)
    except OSError as error:
        raise PlanError(f"--pipeline-schedule-file {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise PlanError(f"--pipeline-schedule-file {path}: {error}") from None
    if plan.forward_only:
        raise PlanError(
            f"--pipeline-schedule-file {path} is the plan of an evaluation: save one for training"
        )
    if plan.placement.num_ranks != num_ranks:
        raise PlanError(
            f"--pipeline-schedule-file {path} is a plan for {plan.placement.num_ranks} pipeline ranks, "
            f"--pipeline-model-parallel-size is {num_ranks}"
        )
    return plan


def last_num_microbatches(config: Config) -> int:
    """Of one step after the ramp; one a pipeline rank where the flags make no batch, which rules tell."""
    schedule = config.batch_schedule_or_none()
    if schedule is None:
        return max(1, config.parallel.pipeline_model_parallel_size)
    return schedule.num_microbatches(schedule.rampup[2] + 1 if schedule.rampup is not None else 0)
