"""What rules ask of pipelines: stages, schedules, their chunks and microbatches, memory limits and saved plans
(floor 0)."""

from __future__ import annotations

import contextlib

from megatron.core.models.gpt.stage_layers import MAX_LAYERS, MAX_STAGES, StageLayersError
from megatron.core.parallelism_config import V_BY_MEMORY, asked_schedules, describe_schedule
from megatron.core.pipeline_parallel.plan.ir import PlanError
from megatron.core.pipeline_parallel.plan.residency import over_ranks
from megatron.core.pipeline_parallel.plan.schedules import AUTO, SCHEDULES, Schedule
from megatron.core.words import counted, size_text
from megatron.training.config.config import Config
from megatron.training.config.rule_table import RuleContext, refusal, spelled
from megatron.training.staged_model import stages_of

_GROUP = "microbatch_group_size_per_vp_stage"
_COUNTS = {1: "one", 2: "two", 3: "three", 4: "four"}
_LIMITS = ("zero_bubble_max_pending_backward", "pipeline_memory_limit", "zero_bubble_v_schedule_mem_setup")
# What one limit of all that a rank holds decides on by itself.
_OF_RANK_LIMIT = (
    "pipeline_memory_limit fsdp_memory_budget fsdp_reshard_policy zero_bubble_max_pending_backward "
    "zero_bubble_adaptive_memory_limit_percentile zero_bubble_v_schedule_mem_setup pipeline_schedule_file"
)
# Numbers of layers and stages of which a rank has one at least.
_SIZES = (
    "num_layers pipeline_model_parallel_size num_layers_per_virtual_pipeline_stage "
    "num_virtual_stages_per_pipeline_rank decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers"
)


def _num_stages(c: RuleContext) -> int:
    """Stages that the schedule makes of the layers; of `auto`, those of the flags or of a V. Raises StageLayersError.

    A plan from a file has a rule of its own.
    """
    parallel, num_layers = c.config.parallel, c.num_layers or 0
    if parallel.pipeline_schedule_file is not None:
        return parallel.pipeline_model_parallel_size
    try:
        return len(stages_of(parallel, num_layers, parallel.pipeline_schedule))
    except StageLayersError:
        if parallel.pipeline_schedule != AUTO or parallel.pipeline_model_parallel_size == 1:
            raise
        with contextlib.suppress(StageLayersError):
            return len(stages_of(parallel, num_layers, V_BY_MEMORY["zb"]))
        raise


def chunks(c: RuleContext) -> int | None:
    """Model chunks on a rank, or None where the layers do not divide (told by its own rule)."""
    with contextlib.suppress(StageLayersError):
        if c.pipeline_model_parallel_size >= 1:
            return _num_stages(c) // c.config.parallel.pipeline_model_parallel_size
    return None


def _schedule(c: RuleContext) -> Schedule | None:
    """The schedule by name; None for `auto`, and where a file says it."""
    return None if c.pipeline_schedule_file is not None else SCHEDULES.get(c.pipeline_schedule or "")


def placement(c: RuleContext) -> str | None:
    row = _schedule(c)
    return None if row is None else row.placement


def schedule_flag(c: RuleContext) -> str:
    return describe_schedule(c.config.parallel)


def layers_fault(c: RuleContext) -> str | None:
    beyond = (c.num_layers or 0) > MAX_LAYERS or c.pipeline_model_parallel_size > MAX_STAGES
    sizes = [getattr(c, name) for name in _SIZES.split()]
    if c.num_layers is None or beyond or any(size is not None and size < 1 for size in sizes):
        return None  # has a rule of its own
    return refusal(lambda: _num_stages(c), StageLayersError)


def schedule_flags_fault(c: RuleContext) -> str | None:
    """Flags that ask for different schedules."""
    asked, schedule, row = asked_schedules(c.config.parallel), c.pipeline_schedule, _schedule(c)
    if c.pipeline_schedule_file is not None:  # beside which nothing is derived
        flag = next(iter(asked), None) if schedule is None else f"--pipeline-schedule {schedule}"
        return flag and f"{flag} and --pipeline-schedule-file: the file says what is run"
    if len(set(asked.values())) > 1:
        return " and ".join(f"{flag} ({name})" for flag, name in asked.items()) + " are different schedules"
    for flag, name in asked.items() if c.given("pipeline_schedule") else ():
        # auto: the fastest, whichever it is
        any_split = flag == "--enable-zero-bubble" and (row is None or row.splits)
        if name != schedule and not any_split:
            return f"{flag} asks for {name}, --pipeline-schedule for {schedule}"
    return None


def needs_ranks(c: RuleContext) -> bool:
    """Whether the schedule is one of several ranks, and there is one."""
    row = _schedule(c)
    return row is not None and c.pipeline_model_parallel_size == 1 and not row.alone


def group_fault(c: RuleContext) -> str | None:
    """A step with fewer microbatches than interleaving takes in turn."""
    group, row = getattr(c, _GROUP), _schedule(c)
    if group is None or row is None or not row.whole_group or (chunks(c) or 1) == 1:
        return None
    flag = spelled(_GROUP) if c.given(_GROUP) else "--pipeline-model-parallel-size"
    return _too_few(c, group, f"fewer than the {group} that interleaving takes in turn ({flag})")


def microbatches_fault(c: RuleContext) -> str | None:
    """A step with fewer microbatches a rank than the schedule needs."""
    ranks, row = c.pipeline_model_parallel_size, _schedule(c)
    if row is None or not row.microbatches_a_rank or ranks < 2:
        return None
    each, least = row.microbatches_a_rank, row.least_microbatches(ranks)
    why = f"fewer than {_COUNTS.get(each, each)} a pipeline rank, {least}, which {row.name} needs"
    return _too_few(c, least, why)


def _too_few(c: RuleContext, least: int, why: str) -> str | None:
    schedule = c.config.batch_schedule_or_none()
    # A ramp only rises: its first batch is the smallest of the run.
    fewest = least if schedule is None else schedule.num_microbatches(0)
    if fewest >= least:
        return None
    where = "the first batch of --rampup-batch-size" if c.rampup_batch_size else c.told("global_batch_size")
    return f"{where} has {counted(fewest, 'microbatch')} a rank, {why}"


def validated_memory_fault(c: RuleContext) -> str | None:
    """What a step leaves until it is decided on, gradients at rest among it, beside all other states; on CPU, where
    ranks share the machine. What is free is looked at once the engine has its memory."""
    config, sizes, costs = c.config, c.config.state_bytes, c.config.model_costs
    if costs is None or sizes is None:
        return None
    spec = None if _schedule(c) is None else config.staged_model.spec(c.pipeline_schedule)
    if spec is None:
        return None
    copies = c.post_validation_rollback == "snapshot"
    try:
        needed = max(map(sizes.of_rank, costs.count(spec.stages, spec.placement).of_ranks))
    except StageLayersError:  # which whoever plans says
        return None
    if needed * c.env.local_world_size <= c.memory_bytes:
        return None
    return (
        f"a rank holds {size_text(needed)} of weights, optimizer state, gradients{' and copies' * copies} that "
        f"are kept until a step is decided on; this machine has {size_text(c.memory_bytes)} for "
        f"{counted(c.env.local_world_size, 'rank')}"
    )


def several_limits(c: RuleContext) -> str | None:
    told = [c.told(name) for name in _LIMITS if c.differs(name)]
    return f"{' and '.join(told)} are {_COUNTS[len(told)]} limits of one thing" if len(told) > 1 else None


def decided_by_limit(c: RuleContext) -> str:
    return ", ".join(c.told(name) for name in _OF_RANK_LIMIT.split() if c.differs(name))


def size_fault(c: RuleContext) -> str | None:
    """Of a step with more forwards than a plan holds."""
    return c.config.staged_model.size_fault((chunks(c) or 1) * c.pipeline_model_parallel_size)


def asks_for_plan(c: RuleContext) -> bool:
    """Whether there may be no plan though no other rule is broken: a search, or a limit."""
    limits = (c.pipeline_memory_limit, c.zero_bubble_max_pending_backward)
    if any(limit is not None and limit < 1 for limit in limits):
        return False  # has a rule of its own
    return c.pipeline_schedule == AUTO or limits != (None, None) or c.config.rank_budget is not None


def file_fault(c: RuleContext) -> str | None:
    """Why the plan of a file does not run; None without one."""
    return c.pipeline_schedule_file and plan_fault(c, c.config.replace(pipeline_memory_limit=None))


def residency_fault(c: RuleContext) -> str | None:
    """That a plan's gathers and reductions are of other ranks, or of another strategy, than the flags'."""
    file = c.config.replace(pipeline_memory_limit=None).planner().spec.file
    assert file is not None, "a plan file that was read"
    planned, place = file.plan.residency, c.config.shard_place
    if planned is None or place is None:
        return None
    ours = (over_ranks(place.groups), c.data_parallel_sharding_strategy, c.fsdp_reshard_policy)
    theirs = (over_ranks(planned.groups), planned.strategy, planned.policy)
    words = "{}, strategy {}, policy {}"
    if ours == theirs:
        return None
    told = f"--pipeline-schedule-file {file.path} has gathers and reductions for {words.format(*theirs)}"
    return f"{told}; the flags say {words.format(*ours)}"


def plan_fault(c: RuleContext, config: Config | None = None) -> str | None:
    """Why there is no plan for the fewest microbatches of the run, or for the most. config: else the context's."""
    config = config or c.config
    schedule = config.batch_schedule_or_none()
    assert schedule is not None, "asked without a batch"
    try:
        return config.planner().fault({schedule.num_microbatches(0), config.last_num_microbatches})
    except (PlanError, StageLayersError) as error:
        return str(error)
