"""Rules on what pipelines plan with: memory limits, measuring, saved plans, post-validation (floor 0)."""

from __future__ import annotations

from megatron.core.models.gpt.parameter_count import count_parameters
from megatron.core.models.gpt.stage_layers import StageLayersError
from megatron.core.pipeline_parallel.plan.ir import PlanError
from megatron.core.pipeline_parallel.plan.schedules import AUTO
from megatron.core.pipeline_parallel.plan.spec import order_within_limits
from megatron.training.config.config import Config
from megatron.training.config.rule_table import RuleContext, RuleTable
from megatron.training.config.rules_parallel import chunks_of
from megatron.training.config.rules_pipeline import COUNTS, OF_SCHEDULES
from megatron.training.config.state_bytes import state_bytes

RULES = RuleTable()
rule = RULES.rule


@rule(
    "post-validation-settings",
    "--post-validation-rollback --post-validation-after --enable-optimizer-post-validation",
    "give --enable-optimizer-post-validation too, or leave the flag out",
)
def _post_validation_settings(s: RuleContext) -> str | None:
    if s.value("enable_optimizer_post_validation"):
        return None
    given = s.differing(("post_validation_rollback", "post_validation_after"))
    return f"{s.told(given[0])} without --enable-optimizer-post-validation" if given else None


@rule(
    "validated-memory",
    "--enable-optimizer-post-validation --post-validation-rollback --data-parallel-sharding-strategy",
    "leave --enable-optimizer-post-validation out, give --post-validation-rollback inverse (no copies; approximate: "
    "docs/pipelines.md), or shard more, over more ranks",
)
def _validated_memory(s: RuleContext) -> str | None:
    """What a step leaves until it is decided on, gradients at rest among it, beside all other states; on CPU, where
    ranks share the machine. What is free is looked at once the engine has its memory."""
    config, model = s.config, s.config.model
    if not s.value("enable_optimizer_post_validation") or s.has_gpu or s.check_only or not _can_plan(s):
        return None
    row, place = config.sharding, config.shard_place
    if config.model_costs is None or model.padded_vocab_size is None or row is None or place is None:
        return None
    spec = config.staged_model.spec(s.value("pipeline_schedule")) if _is_named(s) else None
    if spec is None:
        return None
    held = count_parameters(
        model,
        model.padded_vocab_size,
        tp=config.parallel.tensor_model_parallel_size,
        stages=spec.stages,
        placement=spec.placement,
    )
    copies = s.value("post_validation_rollback") == "snapshot"
    sizes = state_bytes(config.ddp, row, place, config.params_flag, copies=copies)
    each = sum(size / ways for size, ways in sizes.at_rest)
    needed, here = max(held.per_rank) * each, s.env.local_world_size
    if needed * here <= s.memory_bytes:
        return None
    kept = f"gradients{' and copies' if copies else ''} that are kept until a step is decided on"
    return (
        f"a rank holds {needed / 2**30:.1f} GiB of weights, optimizer state, {kept}; this machine has "
        f"{s.memory_bytes / 2**30:.1f} GiB for {here} ranks"
    )


def _is_named(s: RuleContext) -> bool:
    return s.value("pipeline_schedule_file") is None and s.value("pipeline_schedule") != AUTO


@rule(
    "pipeline-limits",
    "--pipeline-memory-limit --zero-bubble-max-pending-backward --zero-bubble-v-schedule-mem-setup",
    "keep one of them; --zero-bubble-v-schedule keeps to any limit",
)
def _pipeline_limits(s: RuleContext) -> str | None:
    limits = (
        "zero_bubble_max_pending_backward",
        "pipeline_memory_limit",
        "zero_bubble_v_schedule_mem_setup",
    )
    told = [s.told(name) for name in s.differing(limits)]
    return f"{' and '.join(told)} are {COUNTS[len(told)]} limits of one thing" if len(told) > 1 else None


# What one limit of all that a rank holds decides on by itself.
_OF_LIMIT = (
    "pipeline_memory_limit",
    "fsdp_memory_budget",
    "fsdp_reshard_policy",
    "zero_bubble_max_pending_backward",
    "zero_bubble_adaptive_memory_limit_percentile",
    "zero_bubble_v_schedule_mem_setup",
    "pipeline_schedule_file",
)


@rule(
    "rank-memory-limit",
    "--rank-memory-limit --pipeline-memory-limit --fsdp-memory-budget --fsdp-reshard-policy --pipeline-schedule-file "
    "--zero-bubble-max-pending-backward --zero-bubble-adaptive-memory-limit-percentile "
    "--zero-bubble-v-schedule-mem-setup",
    "keep --rank-memory-limit, which decides on all of them, or leave it out",
)
def _rank_memory_limit(s: RuleContext) -> str | None:
    limit = s.value("rank_memory_limit")
    given = [s.told(name) for name in s.differing(_OF_LIMIT)]
    if limit is None or not given:
        return None
    return f"--rank-memory-limit {limit} with {', '.join(given)}: one limit of all that a rank holds says what each may"


@rule(
    "sharding-auto",
    "--data-parallel-sharding-strategy --rank-memory-limit --use-custom-fsdp",
    "give --use-custom-fsdp and --rank-memory-limit BYTES, or name a strategy",
)
def _sharding_auto(s: RuleContext) -> str | None:
    asked = s.value("use_custom_fsdp") and s.value("rank_memory_limit") is not None
    if s.value("data_parallel_sharding_strategy") != "auto" or asked:
        return None
    return "--data-parallel-sharding-strategy auto without a limit that it is chosen by"


@rule(
    "pipeline-timers",
    "--zero-bubble-pipeline-timers-start-iter --zero-bubble-pipeline-timers-end-iter",
    "give both, the end behind the start: iterations from the start on, before the end, are measured",
)
def _pipeline_timers(s: RuleContext) -> str | None:
    start = s.value("zero_bubble_pipeline_timers_start_iter")
    end = s.value("zero_bubble_pipeline_timers_end_iter")
    if start < end:
        return None
    return (
        f"--zero-bubble-pipeline-timers-start-iter {start}, --zero-bubble-pipeline-timers-end-iter {end}: no iteration "
        "is between them"
    )


@rule(
    "pipeline-schedule-file",
    "--pipeline-schedule-file",
    "name a plan in JSON that was saved for this pipeline (a run with --save keeps pipeline-plan.json), unchanged, or "
    "use --pipeline-schedule",
)
def _pipeline_schedule_file(s: RuleContext) -> str | None:
    if s.value("pipeline_schedule_file") is None or not _can_plan(s):
        return None
    return _plan_error(s.config.replace(pipeline_memory_limit=None))


@rule(
    "schedule-file-residency",
    "--pipeline-schedule-file --data-parallel-sharding-strategy --num-distributed-optimizer-instances "
    "--fsdp-reshard-policy",
    "run it with the ranks and the sharding that it was saved for, or save a plan for these",
)
def _schedule_file_residency(s: RuleContext) -> str | None:
    if (
        s.value("pipeline_schedule_file") is None
        or not _can_plan(s)
        or _pipeline_schedule_file(s) is not None
    ):
        return None
    file = s.config.replace(pipeline_memory_limit=None).schedule_spec.file
    assert file is not None, "a plan file that was read"
    planned, place = file.plan.residency, s.config.shard_place
    if planned is None or place is None:
        return None
    strategy = s.value("data_parallel_sharding_strategy")
    ours = (place.inner_size, place.outer_size, strategy, s.value("fsdp_reshard_policy"))
    theirs = (planned.ways, planned.outer, planned.strategy, planned.policy)
    if ours == theirs:
        return None
    words = "{} ranks that share states in {} instances, strategy {}, policy {}"
    return (
        f"--pipeline-schedule-file {file.path} has gathers and reductions for {words.format(*theirs)}; the flags say "
        f"{words.format(*ours)}"
    )


@rule(
    "plan-size",
    "--global-batch-size --micro-batch-size --pipeline-model-parallel-size --pipeline-schedule",
    "lower --global-batch-size, raise --micro-batch-size, or use more data parallel ranks",
)
def _plan_size(s: RuleContext) -> str | None:
    chunks = chunks_of(s) if s.value("num_layers") is not None else None
    if chunks is None or s.value("pipeline_schedule_file") is not None:
        return None
    return s.config.staged_model.size_fault(chunks * s.value("pipeline_model_parallel_size"))


@rule(
    "pipeline-plan",
    "--pipeline-memory-limit --rank-memory-limit --zero-bubble-max-pending-backward --pipeline-schedule",
    "raise the limit or leave it out, use smaller microbatches or more recomputation, or another schedule",
)
def _pipeline_plan(s: RuleContext) -> str | None:
    limits = (s.value("pipeline_memory_limit"), s.value("zero_bubble_max_pending_backward"))
    if s.value("pipeline_schedule") != AUTO and limits == (None, None) and s.config.rank_budget is None:
        return None  # every other rule together says whether there is a plan
    if any(limit is not None and limit < 1 for limit in limits) or not _can_plan(s):
        return None  # has a rule of its own
    return None if _pipeline_schedule_file(s) is not None else _plan_error(s.config)


def _can_plan(s: RuleContext) -> bool:
    """Whether the flags say all that a plan needs, and none of them breaks a rule of its own."""
    describe_before = (*OF_SCHEDULES, _pipeline_limits, _rank_memory_limit, _plan_size)
    complete = s.config.batch_schedule_or_none() is not None and s.value("num_layers") is not None
    complete = complete and s.value("pipeline_model_parallel_size") >= 1 and chunks_of(s) is not None
    return complete and all(one(s) is None for one in describe_before)


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
