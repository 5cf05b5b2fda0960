"""Rules on pipeline schedules: their flags, chunks, microbatches, memory limits and files (floor 0)."""

from __future__ import annotations

from megatron.core.models.gpt.stage_layers import StageLayersError
from megatron.core.pipeline_parallel.plan.ir import PlanError
from megatron.core.pipeline_parallel.plan.placement import LOOPED, V_SHAPED
from megatron.core.pipeline_parallel.plan.registry import FUSED, PLACEMENTS, SEARCHED
from megatron.training.plans import Plans
from megatron.training.rule_table import RuleTable, Situation
from megatron.training.rules_parallel import chunks_of
from megatron.training.schedule_choice import AUTO, asked_schedules

RULES = RuleTable()
rule = RULES.rule

INTERLEAVED, GROUPED, DUALPIPE_V = "interleaved", "gis", "dualpipe-v"
_ALONE = ("gpipe", "1f1b", AUTO)  # what a pipeline of one rank can do
_LIMITED_BY_COUNT = (*sorted(SEARCHED), AUTO)


def _schedule(s: Situation) -> str | None:
    """The schedule by name; None where a file says it."""
    name: str | None = s.value("pipeline_schedule")
    return None if s.value("pipeline_schedule_file") is not None else name


def _told(s: Situation) -> str:
    """The flag that asks for the schedule."""
    schedule = s.value("pipeline_schedule")
    if not s.given("pipeline_schedule"):
        for flag, name in asked_schedules(s.config.parallel).items():
            if name == schedule:
                return f"{flag} (schedule {name})"
    return f"--pipeline-schedule {schedule}"


@rule(
    "schedule-flags",
    "--pipeline-schedule --pipeline-schedule-file --enable-zero-bubble --zero-bubble-v-schedule --enable-1f1b-v "
    "--interleave-group-size",
    "keep one of them: --pipeline-schedule takes the name of any schedule",
)
def _schedule_flags(s: Situation) -> str | None:
    asked, schedule = asked_schedules(s.config.parallel), s.value("pipeline_schedule")
    if s.value("pipeline_schedule_file") is not None:
        if s.given("pipeline_schedule"):
            return f"--pipeline-schedule {schedule} and --pipeline-schedule-file: the file says what is run"
        flag = next(iter(asked), None)
        return None if flag is None else f"{flag} and --pipeline-schedule-file: the file says what is run"
    if len(set(asked.values())) > 1:
        return " and ".join(f"{flag} ({name})" for flag, name in asked.items()) + " are different schedules"
    if not s.given("pipeline_schedule") or schedule == AUTO:
        return None
    for flag, name in asked.items():
        any_split = flag == "--enable-zero-bubble" and schedule not in FUSED
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
    "pipeline-schedule",
    "--pipeline-schedule --num-layers-per-virtual-pipeline-stage --num-virtual-stages-per-pipeline-rank "
    "--pipeline-model-parallel-layout --pipeline-model-parallel-size",
    "leave --pipeline-schedule out, or: interleaved or gis with several chunks a rank, a V schedule with two, the "
    "others with one; zero-bubble schedules with 2 pipeline ranks or more",
)
def _pipeline_schedule(s: Situation) -> str | None:
    schedule, chunks = _schedule(s), chunks_of(s)
    if schedule is None:
        return None
    alone = s.value("pipeline_model_parallel_size") == 1
    if alone and schedule not in _ALONE:
        return f"{_told(s)} needs --pipeline-model-parallel-size 2 or more"
    if chunks is None or schedule == AUTO:
        return None
    kind = PLACEMENTS[schedule]
    if kind == LOOPED and chunks == 1:
        return f"{_told(s)}: the flags ask for one chunk of the model a rank"
    if kind not in (LOOPED, V_SHAPED) and chunks > 1:
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
    "--enable-optimizer-post-validation --pipeline-model-parallel-size --post-validation-rollback "
    "--post-validation-after",
    "use 2 pipeline ranks or more, or leave the flags of post-validation out",
)
def _post_validation(s: Situation) -> str | None:
    if s.value("enable_optimizer_post_validation"):
        if s.value("pipeline_model_parallel_size") > 1:
            return None
        return "--enable-optimizer-post-validation with one pipeline rank: there is nobody to wait for"
    for name, default in (("post_validation_rollback", "snapshot"), ("post_validation_after", 10)):
        if s.value(name) != default:
            flag = "--" + name.replace("_", "-")
            return f"{flag} {s.value(name)} without --enable-optimizer-post-validation"
    return None


# Memory, files: what only planning tells


@rule(
    "pending-backward",
    "--zero-bubble-max-pending-backward --enable-zero-bubble --pipeline-memory-limit",
    "give --enable-zero-bubble, or another schedule that is planned within a limit "
    f"({', '.join(_LIMITED_BY_COUNT)}); or one of the limits only",
)
def _pending_backward(s: Situation) -> str | None:
    pending, schedule = s.value("zero_bubble_max_pending_backward"), _schedule(s)
    if pending is None:
        return None
    told = f"--zero-bubble-max-pending-backward {pending}"
    if s.value("pipeline_memory_limit") is not None:
        return f"{told} and --pipeline-memory-limit are two limits of one thing"
    if s.value("zero_bubble_v_schedule_mem_setup") != "zb":
        return f"{told} and --zero-bubble-v-schedule-mem-setup are two limits of one thing"
    if schedule in _LIMITED_BY_COUNT:
        return None
    return f"{told} without a schedule that is planned within a limit"


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
    "pipeline-plan",
    "--pipeline-schedule --pipeline-schedule-file --pipeline-memory-limit --zero-bubble-max-pending-backward",
    "raise the limit, use other pipeline flags, or leave the file out",
)
def _pipeline_plan(s: Situation) -> str | None:
    from_file = s.value("pipeline_schedule_file") is not None
    limits = (s.value("pipeline_memory_limit"), s.value("zero_bubble_max_pending_backward"))
    if not from_file and s.value("pipeline_schedule") != AUTO and limits == (None, None):
        return None  # every other rule together says whether there is a plan
    schedule = s.config.batch_schedule_or_none()
    others = (
        *(_schedule_flags, _pipeline_schedule, _microbatch_group, _interleave_group, _pending_backward),
        *(_interleaving_microbatches, _dualpipe_v_microbatches),
    )
    size = s.value("pipeline_model_parallel_size")
    incomplete = schedule is None or s.value("num_layers") is None or size < 1 or chunks_of(s) is None
    if (
        incomplete
        or any(one(s) is not None for one in others)
        or any(one is not None and one < 1 for one in limits)
    ):
        return None  # has a rule of its own
    assert schedule is not None
    last = 0 if schedule.rampup is None else schedule.rampup[2] + 1
    try:
        plans = Plans(s.config)
        for num_microbatches in {schedule.num_microbatches(0), schedule.num_microbatches(last)}:
            plans.computations(num_microbatches)
    except (PlanError, StageLayersError) as error:
        return str(error)
    return None
