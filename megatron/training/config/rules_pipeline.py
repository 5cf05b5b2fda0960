"""Rules on pipelines: stages, schedules, their chunks and microbatches, memory limits and saved plans (floor 0)."""

from __future__ import annotations

import contextlib

from megatron.core.model_parallel_config import V_BY_MEMORY, asked_schedules, describe_schedule
from megatron.core.models.gpt.parameter_count import count_parameters
from megatron.core.models.gpt.stage_layers import MAX_LAYERS, MAX_STAGES, StageLayersError
from megatron.core.models.gpt.stage_schedule import stages_of
from megatron.core.pipeline_parallel.plan.ir import PlanError
from megatron.core.pipeline_parallel.plan.placement import LINEAR, LOOPED
from megatron.core.pipeline_parallel.plan.schedules import AUTO, SCHEDULES, Schedule
from megatron.core.pipeline_parallel.plan.spec import order_within_limits
from megatron.training.config.config import Config
from megatron.training.config.rule_table import Predicate, RuleContext, refusal, spelled
from megatron.training.config.state_bytes import state_bytes

_GROUP = "microbatch_group_size_per_vp_stage"
_COUNTS = {1: "one", 2: "two", 3: "three", 4: "four"}
_LIMITS = ("zero_bubble_max_pending_backward", "pipeline_memory_limit", "zero_bubble_v_schedule_mem_setup")
# What one limit of all that a rank holds decides on by itself.
_OF_RANK_LIMIT = (
    "pipeline_memory_limit",
    "fsdp_memory_budget",
    "fsdp_reshard_policy",
    "zero_bubble_max_pending_backward",
    "zero_bubble_adaptive_memory_limit_percentile",
    "zero_bubble_v_schedule_mem_setup",
    "pipeline_schedule_file",
)
# Without a plan for a configuration that breaks one of these.
_BEFORE_PLANS = (
    "schedule-flags schedule-ranks interleaving-chunks pipeline-schedule microbatch-group interleave-group "
    "interleaving-microbatches dualpipe-v-microbatches pipeline-limits rank-memory-limit plan-size"
)
# Numbers of layers and stages of which a rank has one at least.
_SIZES = (
    "num_layers",
    "pipeline_model_parallel_size",
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
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


def _chunks(c: RuleContext) -> int | None:
    """Model chunks on a rank, or None where the layers do not divide (told by its own rule)."""
    with contextlib.suppress(StageLayersError):
        if c.pipeline_model_parallel_size >= 1:
            return _num_stages(c) // c.config.parallel.pipeline_model_parallel_size
    return None


def _schedule(c: RuleContext) -> Schedule | None:
    """The schedule by name; None for `auto`, and where a file says it."""
    return None if c.pipeline_schedule_file is not None else SCHEDULES.get(c.pipeline_schedule or "")


def _pipeline_layers(c: RuleContext) -> str | None:
    beyond = (c.num_layers or 0) > MAX_LAYERS or c.pipeline_model_parallel_size > MAX_STAGES
    below = any(getattr(c, name) is not None and getattr(c, name) < 1 for name in _SIZES)
    if c.num_layers is None or beyond or below:
        return None  # has a rule of its own
    return refusal(lambda: _num_stages(c), StageLayersError)


def _schedule_flags(c: RuleContext) -> str | None:
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


def _needs_ranks(c: RuleContext) -> bool:
    row = _schedule(c)
    return row is not None and c.pipeline_model_parallel_size == 1 and not row.alone


def _interleaving_chunks(c: RuleContext) -> str | None:
    row = _schedule(c)
    if row is None or row.placement != LOOPED or _chunks(c) != 1 or _needs_ranks(c):
        return None
    return f"{describe_schedule(c.config.parallel)} needs several chunks of the model a rank: the flags ask for one"


def _one_chunk(c: RuleContext) -> str | None:
    row, chunks = _schedule(c), _chunks(c)
    if row is None or row.placement != LINEAR or chunks is None or chunks <= 1 or _needs_ranks(c):
        return None
    return f"{describe_schedule(c.config.parallel)} has one chunk of the model a rank, and the flags ask for {chunks}"


def _microbatch_group(c: RuleContext) -> str | None:
    group, ranks, row = getattr(c, _GROUP), c.pipeline_model_parallel_size, _schedule(c)
    by_name = c.pipeline_schedule == AUTO and c.pipeline_schedule_file is None
    if (
        group is None
        or not 1 <= group < ranks
        or not (by_name or (row is not None and row.group_size == _GROUP))
    ):
        return None  # without interleaving a warning
    return f"{spelled(_GROUP)} {group} is below --pipeline-model-parallel-size {ranks}"


def _interleave_group(c: RuleContext) -> str | None:
    group, ranks = c.interleave_group_size, c.pipeline_model_parallel_size
    least = -(-ranks // 2)
    if group <= 0 or ranks < 2 or least <= group <= ranks:
        return None
    return f"--interleave-group-size {group} with {ranks} pipeline ranks: must be {least} to {ranks}"


def _interleaving_microbatches(c: RuleContext) -> str | None:
    group, row = getattr(c, _GROUP), _schedule(c)
    if group is None or row is None or not row.whole_group or (_chunks(c) or 1) == 1:
        return None
    flag = spelled(_GROUP) if c.given(_GROUP) else "--pipeline-model-parallel-size"
    return _too_few(c, group, f"fewer than the {group} that interleaving takes in turn ({flag})")


def _microbatches_a_rank(c: RuleContext) -> str | None:
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
    return f"{where} has {fewest} microbatch{'' if fewest == 1 else 'es'} a rank, {why}"


def _post_validation_settings(c: RuleContext) -> str | None:
    given = c.differing(("post_validation_rollback", "post_validation_after"))
    if c.enable_optimizer_post_validation or not given:
        return None
    return f"{c.told(given[0])} without --enable-optimizer-post-validation"


def _validated_memory(c: RuleContext) -> str | None:
    """What a step leaves until it is decided on, gradients at rest among it, beside all other states; on CPU, where
    ranks share the machine. What is free is looked at once the engine has its memory."""
    config, model = c.config, c.config.model
    named = c.pipeline_schedule_file is None and c.pipeline_schedule != AUTO
    if not c.enable_optimizer_post_validation or c.has_gpu or c.check_only or not _can_plan(c) or not named:
        return None
    row, place, vocabulary = config.sharding, config.shard_place, model.padded_vocab_size
    if config.model_costs is None or vocabulary is None or row is None or place is None:
        return None
    spec, tp = config.staged_model.spec(c.pipeline_schedule), config.parallel.tensor_model_parallel_size
    if spec is None:
        return None
    held = count_parameters(model, vocabulary, tp=tp, stages=spec.stages, placement=spec.placement)
    copies = c.post_validation_rollback == "snapshot"
    sizes = state_bytes(config.ddp, row, place, config.params_flag, copies=copies)
    needed = max(held.per_rank) * sum(size / ways for size, ways in sizes.at_rest)
    if needed * c.env.local_world_size <= c.memory_bytes:
        return None
    return (
        f"a rank holds {needed / 2**30:.1f} GiB of weights, optimizer state, gradients{' and copies' * copies} that "
        f"are kept until a step is decided on; this machine has {c.memory_bytes / 2**30:.1f} GiB for "
        f"{c.env.local_world_size} ranks"
    )


def _pipeline_limits(c: RuleContext) -> str | None:
    told = [c.told(name) for name in c.differing(_LIMITS)]
    return f"{' and '.join(told)} are {_COUNTS[len(told)]} limits of one thing" if len(told) > 1 else None


def _rank_memory_limit(c: RuleContext) -> str | None:
    given = ", ".join(c.told(name) for name in c.differing(_OF_RANK_LIMIT))
    if c.rank_memory_limit is None or not given:
        return None
    return (
        f"{c.told('rank_memory_limit')} with {given}: one limit of all that a rank holds says what each may"
    )


def _schedule_file(c: RuleContext) -> str | None:
    if c.pipeline_schedule_file is None or not _can_plan(c):
        return None
    return _plan_error(c.config.replace(pipeline_memory_limit=None))


def _file_residency(c: RuleContext) -> str | None:
    if c.pipeline_schedule_file is None or not _can_plan(c) or _schedule_file(c) is not None:
        return None
    file = c.config.replace(pipeline_memory_limit=None).schedule_spec.file
    assert file is not None, "a plan file that was read"
    planned, place = file.plan.residency, c.config.shard_place
    if planned is None or place is None:
        return None
    ours = (place.inner_size, place.outer_size, c.data_parallel_sharding_strategy, c.fsdp_reshard_policy)
    theirs = (planned.ways, planned.outer, planned.strategy, planned.policy)
    words = "{} ranks that share states in {} instances, strategy {}, policy {}"
    if ours == theirs:
        return None
    told = f"--pipeline-schedule-file {file.path} has gathers and reductions for {words.format(*theirs)}"
    return f"{told}; the flags say {words.format(*ours)}"


def _plan_size(c: RuleContext) -> str | None:
    chunks = _chunks(c) if c.num_layers is not None else None
    if chunks is None or c.pipeline_schedule_file is not None:
        return None
    return c.config.staged_model.size_fault(chunks * c.pipeline_model_parallel_size)


def _pipeline_plan(c: RuleContext) -> str | None:
    limits = (c.pipeline_memory_limit, c.zero_bubble_max_pending_backward)
    if c.pipeline_schedule != AUTO and limits == (None, None) and c.config.rank_budget is None:
        return None  # every other rule together says whether there is a plan
    if any(limit is not None and limit < 1 for limit in limits) or not _can_plan(c):
        return None  # has a rule of its own
    return None if _schedule_file(c) is not None else _plan_error(c.config)


def _can_plan(c: RuleContext) -> bool:
    """Whether the flags say all that a plan needs, and none of them breaks a rule of its own."""
    complete = c.config.batch_schedule_or_none() is not None and c.num_layers is not None
    return complete and _chunks(c) is not None and not any(BROKEN[rule](c) for rule in _BEFORE_PLANS.split())


def _plan_error(config: Config) -> str | None:
    """Why there is no plan for the fewest microbatches of the run, or for the most."""
    schedule = config.batch_schedule_or_none()
    assert schedule is not None, "asked without a batch"
    last = 0 if schedule.rampup is None else schedule.rampup[2] + 1
    try:
        for num_microbatches in {schedule.num_microbatches(0), schedule.num_microbatches(last)}:
            order_within_limits(config.schedule_spec, num_microbatches)
    except (PlanError, StageLayersError) as error:
        return str(error)
    return None


BROKEN: dict[str, Predicate] = {
    "pipeline-layers": _pipeline_layers,
    "schedule-flags": _schedule_flags,
    "schedule-ranks": lambda c: (
        _needs_ranks(c)
        and f"{describe_schedule(c.config.parallel)} needs --pipeline-model-parallel-size 2 or more"
    ),
    "interleaving-chunks": _interleaving_chunks,
    "pipeline-schedule": _one_chunk,
    "microbatch-group": _microbatch_group,
    "interleave-group": _interleave_group,
    "interleaving-microbatches": _interleaving_microbatches,
    "dualpipe-v-microbatches": _microbatches_a_rank,
    "post-validation-settings": _post_validation_settings,
    "validated-memory": _validated_memory,
    "pipeline-limits": _pipeline_limits,
    "rank-memory-limit": _rank_memory_limit,
    "sharding-auto": lambda c: (
        c.data_parallel_sharding_strategy == "auto"
        and not (c.use_custom_fsdp and c.known("rank_memory_limit"))
    ),
    "pipeline-timers": lambda c: (
        c.zero_bubble_pipeline_timers_start_iter >= c.zero_bubble_pipeline_timers_end_iter
    ),
    "pipeline-schedule-file": _schedule_file,
    "schedule-file-residency": _file_residency,
    "plan-size": _plan_size,
    "pipeline-plan": _pipeline_plan,
}
