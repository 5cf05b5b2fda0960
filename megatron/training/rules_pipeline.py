"""Rules on pipeline schedules: their flags, chunks, microbatches, memory limits and files (floor 0)."""

from __future__ import annotations

from megatron.core.models.gpt.stage_layers import StageLayersError
from megatron.core.pipeline_parallel.plan.ir import PlanError
from megatron.core.pipeline_parallel.plan.placement import LOOPED, V_SHAPED
from megatron.core.pipeline_parallel.plan.registry import FUSED, PLACEMENTS, SEARCHED
from megatron.training.config import FIELDS, Config
from megatron.training.plans import Plans
from megatron.training.rule_table import RuleTable, Situation, spelled
from megatron.training.rules_parallel import chunks_of
from megatron.training.schedule_choice import AUTO, asked_schedules

RULES = RuleTable()
rule = RULES.rule

INTERLEAVED, GROUPED, DUALPIPE_V = "interleaved", "gis", "dualpipe-v"
_ALONE = ("gpipe", "1f1b", AUTO)  # what a pipeline of one rank can do
_LIMITED_BY_COUNT = (*sorted(SEARCHED), AUTO)
_COUNTS = {2: "two", 3: "three"}


def _schedule(s: Situation) -> str | None:
    """The schedule by name; None where a file says it."""
    name: str | None = s.value("pipeline_schedule")
    return None if s.value("pipeline_schedule_file") is not None else name


def told_schedule(config: Config, runs: str | None = None) -> str:
    """The flag that asks for the schedule. runs: what is run, for flags that leave that to a choice or to a file."""
    parallel, name = config.parallel, config.parallel.pipeline_schedule
    if parallel.pipeline_schedule_file is not None:
        told = f"--pipeline-schedule-file {parallel.pipeline_schedule_file}"
        return told if runs is None else f"{told} (schedule {runs})"
    for flag, asked in asked_schedules(parallel).items():
        if asked == name:
            return f"{flag} (schedule {name})"
    told = f"--pipeline-schedule {name}"
    return f"{told} (which has chosen {runs})" if name == AUTO and runs is not None else told


def _told(s: Situation) -> str:
    return told_schedule(s.config)


def _default(name: str) -> object:
    """Of a field. A file that was printed gives every value, so that `given` says nothing of those."""
    return FIELDS[name][1].default


@rule(
    "schedule-flags",
    "--pipeline-schedule --pipeline-schedule-file --enable-zero-bubble --zero-bubble-v-schedule --enable-1f1b-v "
    "--interleave-group-size",
    "keep one of them: --pipeline-schedule takes the name of any schedule",
)
def _schedule_flags(s: Situation) -> str | None:
    asked, schedule = asked_schedules(s.config.parallel), s.value("pipeline_schedule")
    if s.value("pipeline_schedule_file") is not None:
        if schedule is not None:  # nothing is derived beside a file
            return f"--pipeline-schedule {schedule} and --pipeline-schedule-file: the file says what is run"
        flag = next(iter(asked), None)
        return None if flag is None else f"{flag} and --pipeline-schedule-file: the file says what is run"
    if len(set(asked.values())) > 1:
        return " and ".join(f"{flag} ({name})" for flag, name in asked.items()) + " are different schedules"
    if not s.given("pipeline_schedule"):
        return None
    for flag, name in asked.items():
        any_split = (
            flag == "--enable-zero-bubble" and schedule not in FUSED
        )  # auto: the fastest, whichever it is
        if name != schedule and not any_split:
            return f"{flag} asks for {name}, --pipeline-schedule for {schedule}"
    return None


@rule(
    "v-memory",
    "--zero-bubble-v-schedule-mem-setup --zero-bubble-v-schedule",
    "give --zero-bubble-v-schedule too, or --pipeline-schedule v-half or v-min instead",
)
def _v_memory(s: Situation) -> str | None:
    setup = s.value("zero_bubble_v_schedule_mem_setup")
    if s.value("zero_bubble_v_schedule") or setup == "zb":
        return None
    return f"--zero-bubble-v-schedule-mem-setup {setup} without --zero-bubble-v-schedule"


@rule(
    "schedule-ranks",
    "--pipeline-schedule --pipeline-model-parallel-size",
    "use 2 pipeline ranks or more; one rank runs gpipe, 1f1b or auto",
)
def _schedule_ranks(s: Situation) -> str | None:
    schedule = _schedule(s)
    if schedule is None or s.value("pipeline_model_parallel_size") != 1 or schedule in _ALONE:
        return None
    return f"{_told(s)} needs --pipeline-model-parallel-size 2 or more"


@rule(
    "interleaving-chunks",
    "--pipeline-schedule --interleave-group-size --num-virtual-stages-per-pipeline-rank "
    "--num-layers-per-virtual-pipeline-stage --pipeline-model-parallel-layout",
    "give --num-virtual-stages-per-pipeline-rank 2 (or more; layers have to divide over all chunks), or use a schedule "
    "of one chunk",
)
def _interleaving_chunks(s: Situation) -> str | None:
    schedule, chunks = _schedule(s), chunks_of(s)
    if PLACEMENTS.get(schedule or "") != LOOPED or chunks != 1 or _schedule_ranks(s) is not None:
        return None
    return f"{_told(s)} needs several chunks of the model a rank: the flags ask for one"


@rule(
    "pipeline-schedule",
    "--pipeline-schedule --num-layers-per-virtual-pipeline-stage --num-virtual-stages-per-pipeline-rank "
    "--pipeline-model-parallel-layout",
    "leave the flags of chunks out, or use a schedule that has them: interleaved or gis with two or more, a V schedule "
    "with two",
)
def _pipeline_schedule(s: Situation) -> str | None:
    schedule, chunks = _schedule(s), chunks_of(s)
    if schedule is None or chunks is None or schedule == AUTO or _schedule_ranks(s) is not None:
        return None
    if PLACEMENTS[schedule] not in (LOOPED, V_SHAPED) and chunks > 1:
        return f"{_told(s)} has one chunk of the model a rank, and the flags ask for {chunks}"
    return None


@rule(
    "microbatch-group",
    "--microbatch-group-size-per-virtual-pipeline-stage --pipeline-model-parallel-size",
    "leave it out, or interleave and give the number of pipeline ranks at least",
)
def _microbatch_group(s: Situation) -> str | None:
    group, ranks = s.value("microbatch_group_size_per_vp_stage"), s.value("pipeline_model_parallel_size")
    chunks, schedule = chunks_of(s), _schedule(s)
    if group is None or group < 1 or chunks is None:
        return None
    told = f"--microbatch-group-size-per-virtual-pipeline-stage {group}"
    if chunks == 1:
        return f"{told} without interleaving: there is one chunk of the model a rank"
    if schedule != INTERLEAVED and s.given("microbatch_group_size_per_vp_stage"):
        instead = "; gis has --interleave-group-size" if schedule == GROUPED else ""
        return f"{told} with {_told(s)}: it is of the schedule interleaved{instead}"
    return f"{told} is below --pipeline-model-parallel-size {ranks}" if group < ranks else None


@rule(
    "interleave-group",
    "--interleave-group-size --pipeline-model-parallel-size",
    "give half as many microbatches as pipeline ranks (rounded up) to as many as ranks",
)
def _interleave_group(s: Situation) -> str | None:
    group, ranks = s.value("interleave_group_size"), s.value("pipeline_model_parallel_size")
    if group <= 0 or ranks < 2 or -(-ranks // 2) <= group <= ranks:
        return None
    return f"--interleave-group-size {group} with {ranks} pipeline ranks: must be {-(-ranks // 2)} to {ranks}"


@rule(
    "interleaving-microbatches",
    "--global-batch-size --micro-batch-size --rampup-batch-size --pipeline-model-parallel-size "
    "--microbatch-group-size-per-virtual-pipeline-stage",
    "use a larger global batch (and a larger first batch of the ramp), smaller microbatches, or no interleaving",
)
def _interleaving_microbatches(s: Situation) -> str | None:
    group = s.value("microbatch_group_size_per_vp_stage")
    if group is None or _schedule(s) != INTERLEAVED or (chunks_of(s) or 1) == 1:
        return None
    given = s.given("microbatch_group_size_per_vp_stage")
    flag = "--microbatch-group-size-per-virtual-pipeline-stage" if given else "--pipeline-model-parallel-size"
    return _too_few(s, group, f"fewer than the {group} that interleaving takes in turn ({flag})")


@rule(
    "dualpipe-v-microbatches",
    "--global-batch-size --micro-batch-size --rampup-batch-size --pipeline-model-parallel-size --pipeline-schedule",
    "use a larger global batch (and a larger first batch of the ramp), smaller microbatches, or the schedule zbv",
)
def _dualpipe_v_microbatches(s: Situation) -> str | None:
    ranks = s.value("pipeline_model_parallel_size")
    if _schedule(s) != DUALPIPE_V or ranks < 2:
        return None
    return _too_few(s, 2 * ranks, f"fewer than two a pipeline rank, {2 * ranks}, which dualpipe-v needs")


def _too_few(s: Situation, least: int, why: str) -> str | None:
    schedule = s.config.batch_schedule_or_none()
    if schedule is None:
        return None  # has a rule of its own
    fewest = schedule.num_microbatches(0)  # a ramp only rises: its first batch is the smallest of the run
    if fewest >= least:
        return None
    batch = f"--global-batch-size {s.value('global_batch_size')}"
    where = "the first batch of --rampup-batch-size" if s.value("rampup_batch_size") else batch
    noun = "microbatch" if fewest == 1 else "microbatches"
    return f"{where} has {fewest} {noun} a rank, {why}"


@rule(
    "post-validation",
    "--enable-optimizer-post-validation --pipeline-model-parallel-size",
    "use 2 pipeline ranks or more, or leave the flags of post-validation out",
)
def _post_validation(s: Situation) -> str | None:
    if not s.value("enable_optimizer_post_validation") or s.value("pipeline_model_parallel_size") > 1:
        return None
    return "--enable-optimizer-post-validation with one pipeline rank: there is nobody to wait for"


@rule(
    "post-validation-settings",
    "--post-validation-rollback --post-validation-after --enable-optimizer-post-validation",
    "give --enable-optimizer-post-validation too, or leave the flag out",
)
def _post_validation_settings(s: Situation) -> str | None:
    if s.value("enable_optimizer_post_validation"):
        return None
    for name in ("post_validation_rollback", "post_validation_after"):
        if s.value(name) != _default(name):
            return f"{spelled(name)} {s.value(name)} without --enable-optimizer-post-validation"
    return None


# Memory, files: what only planning tells


@rule(
    "pending-backward",
    "--zero-bubble-max-pending-backward --enable-zero-bubble",
    "give --enable-zero-bubble, or another schedule that is planned within a limit "
    f"({', '.join(_LIMITED_BY_COUNT)})",
)
def _pending_backward(s: Situation) -> str | None:
    pending = s.value("zero_bubble_max_pending_backward")
    if pending is None or _schedule(s) in _LIMITED_BY_COUNT:
        return None
    return f"--zero-bubble-max-pending-backward {pending} without a schedule that is planned within a limit"


@rule(
    "pipeline-limits",
    "--pipeline-memory-limit --zero-bubble-max-pending-backward --zero-bubble-v-schedule-mem-setup",
    "keep one of them; --zero-bubble-v-schedule keeps to any limit",
)
def _pipeline_limits(s: Situation) -> str | None:
    told = []
    for name in (
        "zero_bubble_max_pending_backward",
        "pipeline_memory_limit",
        "zero_bubble_v_schedule_mem_setup",
    ):
        if s.value(name) != _default(name):
            told.append(f"{spelled(name)} {s.value(name)}")
    return f"{' and '.join(told)} are {_COUNTS[len(told)]} limits of one thing" if len(told) > 1 else None


@rule(
    "adaptive-memory-limit",
    "--zero-bubble-adaptive-memory-limit-percentile --enable-zero-bubble --zero-bubble-max-pending-backward",
    "leave it out, or give --enable-zero-bubble and no other limit: it is the share of a device's memory that sets the "
    "limit then",
)
def _adaptive_memory_limit(s: Situation) -> str | None:
    name, schedule = "zero_bubble_adaptive_memory_limit_percentile", _schedule(s)
    if s.value(name) == _default(name) or not 1 <= s.value(name) <= 100:
        return None  # has a rule of its own
    told = f"{spelled(name)} {s.value(name)}"
    if s.value("pipeline_schedule_file") is not None:
        return f"{told} with --pipeline-schedule-file: the file says what is run"
    if s.value("zero_bubble_v_schedule"):
        return f"{told} with --zero-bubble-v-schedule, whose limit does not depend on the device"
    if not s.value("enable_zero_bubble"):
        return f"{told} without --enable-zero-bubble"
    for limit in ("zero_bubble_max_pending_backward", "pipeline_memory_limit"):
        if s.value(limit) is not None:
            return f"{told} with {spelled(limit)} {s.value(limit)}, which says the limit"
    if schedule not in SEARCHED:
        return f"{told} with --pipeline-schedule {schedule}, which does not ask the device for its limit"
    return None


@rule(
    "pipeline-timers",
    "--zero-bubble-pipeline-timers-start-iter --zero-bubble-pipeline-timers-end-iter",
    "give both, the end behind the start: iterations from the start on, before the end, are measured",
)
def _pipeline_timers(s: Situation) -> str | None:
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
def _pipeline_schedule_file(s: Situation) -> str | None:
    if s.value("pipeline_schedule_file") is None or not _can_plan(s):
        return None
    return _plan_error(s.config.replace(pipeline_memory_limit=None))


@rule(
    "pipeline-plan",
    "--pipeline-memory-limit --zero-bubble-max-pending-backward --pipeline-schedule",
    "raise the limit or leave it out, use smaller microbatches or more recomputation, or another schedule",
)
def _pipeline_plan(s: Situation) -> str | None:
    limits = (s.value("pipeline_memory_limit"), s.value("zero_bubble_max_pending_backward"))
    if s.value("pipeline_schedule") != AUTO and limits == (None, None):
        return None  # every other rule together says whether there is a plan
    if any(limit is not None and limit < 1 for limit in limits) or not _can_plan(s):
        return None  # has a rule of its own
    return None if _pipeline_schedule_file(s) is not None else _plan_error(s.config)


def _can_plan(s: Situation) -> bool:
    """Whether the flags say all that a plan needs, and none of them breaks a rule of its own."""
    told_before = (
        *(_schedule_flags, _schedule_ranks, _interleaving_chunks, _pipeline_schedule, _microbatch_group),
        *(_interleave_group, _pending_backward, _pipeline_limits),
        *(_interleaving_microbatches, _dualpipe_v_microbatches),
    )
    complete = s.config.batch_schedule_or_none() is not None and s.value("num_layers") is not None
    complete = complete and s.value("pipeline_model_parallel_size") >= 1 and chunks_of(s) is not None
    return complete and all(one(s) is None for one in told_before)


def _plan_error(config: Config) -> str | None:
    """Why there is no plan for the fewest microbatches of the run, or for the most."""
    schedule = config.batch_schedule_or_none()
    assert schedule is not None, "asked without a batch"
    last = 0 if schedule.rampup is None else schedule.rampup[2] + 1
    try:
        plans = Plans(config)
        for num_microbatches in {schedule.num_microbatches(0), schedule.num_microbatches(last)}:
            plans.computations(num_microbatches)
    except (PlanError, StageLayersError) as error:
        return str(error)
    return None
