"""Rules on pipeline schedules: their flags, chunks and microbatches (floor 0)."""

from __future__ import annotations

from megatron.core.asked_schedules import asked_schedules, describe_schedule
from megatron.core.pipeline_parallel.plan.placement import LINEAR, LOOPED
from megatron.core.pipeline_parallel.plan.schedules import AUTO, SCHEDULES, Schedule
from megatron.training.config.rule_table import RuleContext, RuleTable, spelled
from megatron.training.config.rules_parallel import chunks_of

RULES = RuleTable()
rule = RULES.rule

_GROUP = "microbatch_group_size_per_vp_stage"
COUNTS = {1: "one", 2: "two", 3: "three", 4: "four"}


def schedule_of(s: RuleContext) -> str | None:
    """The schedule by name; None where a file says it."""
    name: str | None = s.value("pipeline_schedule")
    return None if s.value("pipeline_schedule_file") is not None else name


def _row(s: RuleContext) -> Schedule | None:
    """The schedule by name; None for `auto`, and where a file says it."""
    return SCHEDULES.get(schedule_of(s) or "")


def _told(s: RuleContext) -> str:
    return describe_schedule(s.config.parallel)


@rule(
    "schedule-flags",
    "--pipeline-schedule --pipeline-schedule-file --enable-zero-bubble --zero-bubble-v-schedule --enable-1f1b-v "
    "--interleave-group-size",
    "keep one of them: --pipeline-schedule takes the name of any schedule",
)
def _schedule_flags(s: RuleContext) -> str | None:
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
    row = _row(s)
    for flag, name in asked.items():
        # auto: the fastest, whichever it is
        any_split = flag == "--enable-zero-bubble" and (row is None or row.splits)
        if name != schedule and not any_split:
            return f"{flag} asks for {name}, --pipeline-schedule for {schedule}"
    return None


@rule(
    "schedule-ranks",
    "--pipeline-schedule --pipeline-model-parallel-size",
    "use 2 pipeline ranks or more; one rank runs gpipe, 1f1b or auto",
)
def _schedule_ranks(s: RuleContext) -> str | None:
    row = _row(s)
    if row is None or s.value("pipeline_model_parallel_size") != 1 or row.alone:
        return None
    return f"{_told(s)} needs --pipeline-model-parallel-size 2 or more"


@rule(
    "interleaving-chunks",
    "--pipeline-schedule --interleave-group-size --num-virtual-stages-per-pipeline-rank "
    "--num-layers-per-virtual-pipeline-stage --pipeline-model-parallel-layout",
    "give --num-virtual-stages-per-pipeline-rank 2 (or more; layers have to divide over all chunks), or use a schedule "
    "of one chunk",
)
def _interleaving_chunks(s: RuleContext) -> str | None:
    row = _row(s)
    if row is None or row.placement != LOOPED or chunks_of(s) != 1 or _schedule_ranks(s) is not None:
        return None
    return f"{_told(s)} needs several chunks of the model a rank: the flags ask for one"


@rule(
    "pipeline-schedule",
    "--pipeline-schedule --num-layers-per-virtual-pipeline-stage --num-virtual-stages-per-pipeline-rank "
    "--pipeline-model-parallel-layout",
    "leave the flags of chunks out, or use a schedule that has them: interleaved or gis with two or more, a V schedule "
    "with two",
)
def _pipeline_schedule(s: RuleContext) -> str | None:
    row, chunks = _row(s), chunks_of(s)
    if row is None or chunks is None or _schedule_ranks(s) is not None:
        return None
    if row.placement == LINEAR and chunks > 1:
        return f"{_told(s)} has one chunk of the model a rank, and the flags ask for {chunks}"
    return None


@rule(
    "microbatch-group",
    "--microbatch-group-size-per-virtual-pipeline-stage --pipeline-model-parallel-size",
    "leave it out, or give the number of pipeline ranks at least",
)
def _microbatch_group(s: RuleContext) -> str | None:
    group, ranks, row = s.value(_GROUP), s.value("pipeline_model_parallel_size"), _row(s)
    used = schedule_of(s) == AUTO or (row is not None and row.group_size == _GROUP)
    if group is None or not 1 <= group < ranks or not used:
        return None  # without interleaving a warning
    return f"{spelled(_GROUP)} {group} is below --pipeline-model-parallel-size {ranks}"


@rule(
    "interleave-group",
    "--interleave-group-size --pipeline-model-parallel-size",
    "give half as many microbatches as pipeline ranks (rounded up) to as many as ranks",
)
def _interleave_group(s: RuleContext) -> str | None:
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
def _interleaving_microbatches(s: RuleContext) -> str | None:
    group, row = s.value(_GROUP), _row(s)
    if group is None or row is None or not row.whole_group or (chunks_of(s) or 1) == 1:
        return None
    given = s.given(_GROUP)
    flag = "--microbatch-group-size-per-virtual-pipeline-stage" if given else "--pipeline-model-parallel-size"
    return _too_few(s, group, f"fewer than the {group} that interleaving takes in turn ({flag})")


@rule(
    "dualpipe-v-microbatches",  # of every schedule that needs several a rank
    "--global-batch-size --micro-batch-size --rampup-batch-size --pipeline-model-parallel-size --pipeline-schedule",
    "use a larger global batch (and a larger first batch of the ramp), smaller microbatches, or the schedule zbv",
)
def _dualpipe_v_microbatches(s: RuleContext) -> str | None:
    ranks, row = s.value("pipeline_model_parallel_size"), _row(s)
    if row is None or not row.microbatches_a_rank or ranks < 2:
        return None
    each, least = row.microbatches_a_rank, row.least_microbatches(ranks)
    why = f"fewer than {COUNTS.get(each, each)} a pipeline rank, {least}, which {row.name} needs"
    return _too_few(s, least, why)


def _too_few(s: RuleContext, least: int, why: str) -> str | None:
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


# In the order in which they are told.
OF_SCHEDULES = (
    *(_schedule_flags, _schedule_ranks, _interleaving_chunks, _pipeline_schedule, _microbatch_group),
    *(_interleave_group, _interleaving_microbatches, _dualpipe_v_microbatches),
)
