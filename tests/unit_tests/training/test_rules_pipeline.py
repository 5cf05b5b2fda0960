"""Rules on pipeline schedules: every conflict in words, every schedule by its flags, and nothing refused in vain."""

import dataclasses
import re
import typing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.models.gpt.stage_layers import StageLayersError
from megatron.core.parallelism_config import (
    ModelParallelConfig,
    bytes_of,
    count_or_auto,
    describe_schedule,
)
from megatron.core.pipeline_parallel.plan.build import build_plan, plan_for
from megatron.core.pipeline_parallel.plan.measuring.replan import solve_again
from megatron.core.pipeline_parallel.plan.passes.lower import lower
from megatron.core.pipeline_parallel.plan.pipeline_summary import bubble_rate, facts_lines, pipeline_facts
from megatron.core.pipeline_parallel.plan.placement import LINEAR, LOOPED, V_SHAPED
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.plan.schedules import AUTO, SCHEDULES
from megatron.core.pipeline_parallel.plan.spec import PlanPurpose
from megatron.core.pipeline_parallel.plan.text import to_json
from megatron.training.config.config import FIELDS
from megatron.training.config.launch_env import LaunchEnv
from megatron.training.config.resolve import Machine, resolve
from megatron.training.config.rule_table import RuleContext
from megatron.training.config.rules import broken_rules
from megatron.training.run.arguments import ConfigurationError, parse_config
from megatron.training.staged_model import stages_of
from tests.harness.described import planned_config
from tests.harness.launch_lines import SMALL

PP, VPP = "--pipeline-model-parallel-size", "--num-virtual-stages-per-pipeline-rank"
GROUP, LAYOUT = "--microbatch-group-size-per-vp-stage", "--pipeline-model-parallel-layout"
V, ZB, ONE_V, GIS = (
    "--zero-bubble-v-schedule",
    "--enable-zero-bubble",
    "--enable-1f1b-v",
    "--interleave-group-size",
)
PENDING, SETUP = "--zero-bubble-max-pending-backward", "--zero-bubble-v-schedule-mem-setup"
PERCENTILE = "--zero-bubble-adaptive-memory-limit-percentile"
TIMERS = "--zero-bubble-pipeline-timers"
LIMIT, FILE, PAD = "--pipeline-memory-limit", "--pipeline-schedule-file", "--allow-padding-num-layers"


def configure(words, world_size=2):
    env = LaunchEnv(world_size=world_size, local_world_size=world_size)
    flags = [
        *SMALL,
        "--micro-batch-size",
        "1",
        "--global-batch-size",
        "8",
        PP,
        str(world_size),
        *words.split(),
    ]
    return planned_config(flags, env=env)


def problems_of(words, world_size=2):
    try:
        configure(words, world_size)
    except ConfigurationError as error:
        return error.problems
    return ()


def test_the_flag_knows_every_schedule():
    choices = typing.get_args(typing.get_type_hints(ModelParallelConfig)["pipeline_schedule"])
    assert choices == (*SCHEDULES, AUTO)
    assert FIELDS["pipeline_schedule"][0] == "parallel"


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_is_said_of_a_schedule_is_true_of_its_plan(name):
    plan = build_plan(name, Request(2, 4))
    assert plan.placement.kind == SCHEDULES[name].placement
    assert all(op[0] not in (1, 2) for row in plan.rows for op in row) == (not SCHEDULES[name].splits)


# what is asked for -> the schedule, by chunks of the placement
ASKED = [
    (ZB, "zb-1p", 2),
    (f"{ZB} {PENDING} auto", "zb-1p", 2),
    (f"{ZB} {PENDING} 3", "zb-1p", 2),
    (f"{ZB} {PENDING} 4", "zb-2p", 2),
    (f"{V} --num-layers 4", "zbv", 4),
    (f"{V} {SETUP} half --num-layers 4", "v-half", 4),
    (f"{V} {SETUP} min --num-layers 4 {ZB}", "v-min", 4),
    (f"{V} --num-layers 4 {PENDING} 1", "zbv", 4),
    (f"{V} {PAD} --num-layers 1", "zbv", 4),
    (f"{V} {PAD} --num-layers 5 --enable-zb-runtime --enable-exactly-numeric-match", "zbv", 4),
    (f"{V} --num-layers 4 {VPP} 2", "zbv", 4),
    (f"{V} --num-layers 4 {LAYOUT} Et|t|tt|L", "zbv", 4),
    (f"{ONE_V} --num-layers 4", "1f1b-v", 4),
    (f"{GIS} 1 --num-layers 4 {VPP} 2", "gis", 4),
    (f"{GIS} 0 --num-layers 4 {VPP} 2", "interleaved", 4),
    (f"{ZB} --pipeline-schedule zb-h2", "zb-h2", 2),
    (f"--pipeline-schedule gis {GIS} 2 --num-layers 8 {VPP} 4", "gis", 8),
    ("--pipeline-schedule dualpipe-v --num-layers 4", "dualpipe-v", 4),
    ("--num-seq-splits 1", "1f1b", 2),
    (f"{LIMIT} 10M", "1f1b", 2),
    (f"{ZB} {LIMIT} 10M", "zb-1p", 2),
]


@pytest.mark.parametrize(("words", "schedule", "stages"), ASKED)
def test_every_way_to_ask_for_a_schedule(words, schedule, stages):
    config = configure(words)
    spec = config.planner().spec
    assert config.parallel.pipeline_schedule == spec.schedule == schedule
    assert len(spec.stages) == spec.placement.num_stages == stages
    assert spec.placement.kind == SCHEDULES[schedule].placement
    assert plan_for(spec, 8, PlanPurpose.TRAIN).schedule == schedule


# (ranks, words, the rules broken, a word of the message)
REFUSED = [
    (2, f"{ZB} {ONE_V} --num-layers 4", "schedule-flags", "different schedules"),
    (2, f"{V} {GIS} 2 --num-layers 4", "schedule-flags", "different schedules"),
    (2, f"{V} --num-layers 4 --pipeline-schedule v-half", "schedule-flags", "asks for zbv"),
    (2, f"{V} --num-layers 4 --pipeline-schedule auto", "schedule-flags", f"{V} asks for zbv, --pipeline-schedule for"),
    (2, f"{ONE_V} --num-layers 4 --pipeline-schedule auto", "schedule-flags", f"{ONE_V} asks for 1f1b-v"),
    (2, f"{GIS} 2 --num-layers 4 {VPP} 2 --pipeline-schedule auto", "schedule-flags", f"{GIS} asks for gis"),
    (2, f"{ZB} --pipeline-schedule 1f1b", "schedule-flags", "--enable-zero-bubble asks for zb-1p"),
    (2, f"{ZB} {FILE} p.json", "schedule-flags", "the file says"),
    (2, f"--pipeline-schedule zbv {FILE} p.json", "schedule-flags", "the file says"),
    (2, V, "pipeline-layers", "2 pipeline ranks x 2 chunks"),
    (2, f"{V} --num-layers 6 {VPP} 3", "pipeline-layers", "has 2 on each rank"),
    (2, f"{V} --num-layers 4 {LAYOUT} Ett|ttL", "pipeline-layers", "makes 2 stages"),
    (1, f"{V} --num-layers 4 {PAD}", "pipeline-layers schedule-ranks", "needs --pipeline-model-parallel-size 2"),
    (1, ZB, "schedule-ranks", "--enable-zero-bubble (schedule zb-1p) needs --pipeline-model-parallel-size 2"),
    (2, f"{ZB} --num-layers 4 {VPP} 2", "pipeline-schedule", "has one chunk of the model a rank"),
    (2, "--pipeline-schedule gis", "interleaving-chunks", "needs several chunks of the model"),
    (2, f"{GIS} 2", "interleaving-chunks", "--interleave-group-size (schedule gis)"),
    (2, f"{GIS} 3 --num-layers 4 {VPP} 2", "interleave-group", "must be 1 to 2"),
    (4, f"{GIS} 1 --num-layers 8 {VPP} 2", "interleave-group", "must be 2 to 4"),
    (2, f"{GIS} -1", "range-interleave-group-size", "at least 0"),
    (4, "--pipeline-schedule dualpipe-v --num-layers 8 --global-batch-size 7", "dualpipe-v-microbatches",
     "--global-batch-size 7 has 7 microbatches a rank, fewer than two a pipeline rank, 8"),
    (2, "--pipeline-schedule dualpipe-v --num-layers 4 --rampup-batch-size 2 2 100", "dualpipe-v-microbatches",
     "the first batch of --rampup-batch-size has 2"),
    (2, f"{TIMERS}-start-iter 110", "pipeline-timers", "no iteration is between them"),
    (2, f"{TIMERS}-start-iter 5 {TIMERS}-end-iter 5", "pipeline-timers", "start-iter 5, "),
    (2, f"{TIMERS}-start-iter 0 {TIMERS}-end-iter 5", "range-zero-bubble-pipeline-timers-start-iter", "at least 1"),
    # limits
    (2, f"{ZB} {PENDING} 0", "range-zero-bubble-max-pending-backward", "at least 1"),
    (2, f"{ZB} {PENDING} some", "value", "a whole number or auto"),
    (2, f"{ZB} {PENDING} 2 {LIMIT} 1G", "pipeline-limits", "two limits of one thing"),
    (2, f"{V} {SETUP} half --num-layers 4 {LIMIT} 1G", "pipeline-limits",
     f"{LIMIT} 1073741824 and {SETUP} half are two limits of one thing"),
    (2, f"{ZB} {LIMIT} 10Q", "value", "512M or 4G"),
    (2, f"{ZB} {LIMIT} 1K", "pipeline-plan", "raise --pipeline-memory-limit"),
    (2, f"{LIMIT} 1K", "pipeline-plan", "1f1b holds"),
    (2, f"--pipeline-schedule auto {LIMIT} 1K", "pipeline-plan", "no pipeline schedule can run"),
    (2, "--zero-bubble-adaptive-memory-limit-percentile 101", "limit-zero-bubble-adaptive-memory-limit-percentile",
     "at most 100"),
    (2, f"{FILE} nowhere.json", "pipeline-schedule-file", "nowhere.json cannot be read"),
    # not built
    (2, "--num-seq-splits 2", "not-supported", "--num-seq-splits 2"),
    (2, "--post-validation-after 3", "post-validation-settings", "--post-validation-after 3 without --enable"),
    (2, "--post-validation-rollback inverse", "post-validation-settings", "inverse without --enable"),
    (2, "--enable-optimizer-post-validation --post-validation-after -1", "range-post-validation-after", "least 0"),
]  # fmt: skip


@pytest.mark.parametrize(("ranks", "words", "expected", "told"), REFUSED)
def test_conflicts_are_refused_at_once_in_words(ranks, words, expected, told):
    problems = problems_of(words, ranks)
    assert [problem.rule for problem in problems] == expected.split()
    assert told in " ".join(problem.message for problem in problems)
    assert all(problem.flags and problem.fix for problem in problems)


# (ranks, words, the rule, a word of the fix)
FIXES = [
    (2, f"{GIS} 1", "interleaving-chunks", "give --num-virtual-stages-per-pipeline-rank 2"),
    (2, "--pipeline-schedule interleaved", "interleaving-chunks", "give --num-virtual-stages-per-pipeline-rank 2"),
    (1, ZB, "schedule-ranks", "raise it, or use --pipeline-schedule gpipe, 1f1b or auto"),
    (2, f"{ZB} --num-layers 4 {VPP} 2", "pipeline-schedule", "leave the flags of chunks out"),
    (2, "--post-validation-rollback inverse", "post-validation-settings", "give --enable-optimizer-post-validation"),
    (2, f"{FILE} nowhere.json", "pipeline-schedule-file", "name a plan in JSON"),
    (2, f"{ZB} {PENDING} 2 {LIMIT} 1G", "pipeline-limits", "keep one of them"),
    (2, f"{LIMIT} 1K", "pipeline-plan", "raise the limit"),
]  # fmt: skip


@pytest.mark.parametrize(("ranks", "words", "rule", "fix"), FIXES)
def test_what_to_do_fits_the_cause(ranks, words, rule, fix):
    (problem,) = problems_of(words, ranks)
    assert problem.rule == rule
    assert fix in problem.fix
    assert ("raise the limit" in problem.fix) == (rule == "pipeline-plan")


def test_the_flag_that_asks_for_a_schedule_is_named():
    def told(words, runs=None):
        return describe_schedule(configure(f"--num-layers 4 {words}").parallel, runs)

    assert told("") == "--pipeline-schedule 1f1b"
    assert told("--pipeline-schedule zbv", "zbv") == "--pipeline-schedule zbv"
    assert told(f"{V} {SETUP} min", "v-min") == f"{V} (schedule v-min)"
    assert told(ZB, "zb-1p") == f"{ZB} (schedule zb-1p)"
    assert told(f"{ZB} --pipeline-schedule zb-h2", "zb-h2") == "--pipeline-schedule zb-h2"
    assert told("--pipeline-schedule auto", "zbv") == "--pipeline-schedule auto (which has chosen zbv)"
    assert told("--pipeline-schedule auto") == "--pipeline-schedule auto"


def test_the_percentile_is_read_where_the_device_is_asked():
    for words in (ZB, f"{ZB} {PENDING} auto", f"{ZB} --pipeline-schedule zbv --num-layers 4"):
        config = configure(f"{words} {PERCENTILE} 50")
        assert config.staged_model.asks_device(config.planner().spec)
        assert config.parallel.zero_bubble_adaptive_memory_limit_percentile == 50


def test_conflicts_are_told_together():
    words = f"{ZB} {ONE_V} --num-layers 4 {SETUP} half {GIS} 9 --num-seq-splits 4"
    rules = [problem.rule for problem in problems_of(words)]
    assert rules == ["not-supported", "schedule-flags", "interleave-group"]


def saved(path, name, ranks=2, microbatches=8, lowered=False):
    plan = build_plan(name, Request(ranks, microbatches))
    if lowered:
        plan = lower(plan, configure("", ranks).planner().spec.costs)
    path.write_text(to_json(plan))
    return plan


@pytest.mark.parametrize("lowered", [False, True])
def test_a_saved_plan_is_what_runs(tmp_path, lowered):
    plan = saved(tmp_path / "p.json", "1f1b" if lowered else "v-half", lowered=lowered)
    spec = configure(f"--num-layers 4 {FILE} {tmp_path / 'p.json'}").planner().spec
    assert (spec.schedule, spec.placement) == (plan.schedule, plan.placement)
    assert spec.splits_backward is not lowered
    rows = [[op for op in row if op[0] <= 3] for row in plan.rows]
    train = plan_for(spec, 8, PlanPurpose.TRAIN)
    assert [[op for op in row if op[0] <= 3] for row in train.rows] == rows
    assert (train == plan) is lowered
    assert plan_for(spec, 3, PlanPurpose.EVALUATE).num_microbatches == 3


def test_a_file_that_is_no_plan_for_this_run_is_refused(tmp_path):
    path = tmp_path / "p.json"
    for name, ranks, microbatches, words, told in (
        ("zbv", 2, 8, "--num-layers 5", "is not divisible by"),
        ("zbv", 4, 8, "--num-layers 4", "is a plan for 4 pipeline ranks"),
        ("zbv", 2, 7, "--num-layers 4", "is a plan for 7 microbatches a step, this one has 8"),
        ("1f1b", 2, 8, "--num-layers 4 --rampup-batch-size 4 4 100", "for 8 microbatches a step, this one has 4"),
        ("gpipe", 2, 8, f"--num-layers 4 {LIMIT} 1K", "gpipe holds"),
    ):  # fmt: skip
        saved(path, name, ranks, microbatches)
        (problem,) = problems_of(f"{words} {FILE} {path}")
        assert problem.rule == ("pipeline-plan" if LIMIT in words else "pipeline-schedule-file")
        assert ("raise the limit" in problem.fix) == (LIMIT in words)
        assert told in problem.message
    saved(path, "1f1b")
    text = path.read_text()
    for changed, told in (
        (text.replace('"0F1"', '"0F2"', 1), "hash"),
        ("{}", "no list of operations"),
        ("\x00", "no plan"),
    ):
        path.write_text(changed)
        (problem,) = problems_of(f"{FILE} {path}")
        assert (problem.rule, told in problem.message) == ("pipeline-schedule-file", True)
        assert str(path) in problem.message


def test_auto_says_why_and_keeps_to_the_limit():
    wide = configure("--pipeline-schedule auto --num-layers 4")
    spec = wide.planner().spec
    assert spec.schedule in SCHEDULES
    assert spec.limits is not None
    told = "\n".join(spec.reasons)
    for name in ("1f1b", "zb-h1", "zbv", "interleaved"):
        assert name in told
    assert told.count("chosen") == 1
    assert re.search(
        r"^zbv: step time [\d.]+ x F of a layer, .* peak [\d.,]+ [KM]iB of [\d.,]+ [KM]iB \(rank", told, re.M
    )
    assert any("auto: " in line for line in facts_lines(pipeline_facts(spec, 8)))
    assert pipeline_facts(spec, 8)["reasons"] == list(spec.reasons)
    # no V of 2 x 2 stages in 2 layers: the linear ones are left
    narrow = configure("--pipeline-schedule auto").planner().spec
    assert narrow.placement.kind == LINEAR
    assert any(line.startswith("zbv: not possible: --num-layers 2") for line in narrow.reasons)
    # one rank: nothing to choose
    assert configure("--pipeline-schedule auto", 1).planner().spec.schedule == "1f1b"


def test_auto_counts_1f1b_a_candidate_under_any_limit():
    spec = configure("--pipeline-schedule 1f1b --num-layers 4 --pipeline-memory-limit 1G").planner().spec
    peak = max(
        sum(spec.costs.activation[stage] for stage in range(2) if spec.placement.rank_of(stage) == rank) * (2 - rank)
        for rank in range(2)
    )  # fmt: skip
    chosen = configure(f"--pipeline-schedule auto --num-layers 4 {LIMIT} {int(peak) + 1}").planner().spec
    line = next(one for one in chosen.reasons if one.startswith("1f1b:"))
    assert "not possible" not in line
    assert "too much" not in line


def test_auto_tells_measured_costs_in_milliseconds():
    config = configure("--pipeline-schedule auto --num-layers 4")
    spec = config.planner().spec
    times = dict.fromkeys("fbw", (1.5e6,) * len(spec.stages))
    costs = dataclasses.replace(spec.costs, **times)
    _, _, reasons = solve_again(spec, costs, 8, 8, splits=True)
    assert any(
        re.match(rf"{spec.schedule}: step time \d\d(\.\d+)? ms, .* peak [\d.,]+ [KM]iB of", line)
        for line in reasons
    ), reasons


def test_limits_are_in_bytes_or_in_whole_stages():
    by_count = configure(f"{ZB} {PENDING} 3").planner().spec
    assert by_count.limits == (3 * max(by_count.costs.activation),) * 2
    by_bytes = configure(f"{ZB} {LIMIT} 2M").planner().spec
    assert by_bytes.limits == (2.0 * 2**20,) * 2
    assert configure(ZB).planner().spec.limits is None


def test_sizes_and_counts_in_words():
    assert [bytes_of(word) for word in ("1024", "3K", "2m", "4G", "1T")] == [1024, 3072, 2**21, 2**32, 2**40]
    for word in ("", "K", "-1", "1.5G", "1P", "\u0664"):
        with pytest.raises(ValueError, match="bytes"):
            bytes_of(word)
    assert (count_or_auto("auto"), count_or_auto("7")) == (None, 7)


def test_the_yaml_of_a_schedule_reads_back(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "p.json", "zbv")
    env = LaunchEnv(world_size=2, local_world_size=2)
    for words in (
        f"{V} --num-layers 4 {PENDING} 2",
        "--pipeline-schedule auto",
        f"--num-layers 4 {FILE} p.json",
    ):
        config = configure(words)
        (tmp_path / "run.yaml").write_text(config.to_yaml())
        assert parse_config(["--yaml-cfg", "run.yaml"], env=env).parallel == config.parallel


IDS = {
    *("pipeline-layers", "pipeline-schedule", "microbatch-group", "interleaving-microbatches"),
    *("dualpipe-v-microbatches", "interleave-group", "schedule-flags"),
    *("schedule-ranks", "interleaving-chunks"),
}


@settings(max_examples=150, derandomize=True, deadline=None)
@given(
    pp=st.integers(1, 4),
    num_layers=st.integers(1, 12),
    chunks=st.none() | st.integers(1, 3),
    schedule=st.none() | st.sampled_from(sorted(SCHEDULES)),
    group=st.none() | st.integers(1, 6),
    gis_group=st.integers(0, 5),
    microbatches=st.integers(1, 9),
    pad=st.booleans(),
)
def test_the_rules_refuse_exactly_what_cannot_be_planned(
    pp, num_layers, chunks, schedule, group, gis_group, microbatches, pad
):
    gis_group = gis_group if schedule in (None, "gis") else 0
    values = {"pipeline_model_parallel_size": pp, "num_layers": num_layers, "micro_batch_size": 1}
    values |= {"global_batch_size": microbatches, "num_virtual_stages_per_pipeline_rank": chunks}
    values |= {"pipeline_schedule": schedule, "microbatch_group_size_per_vp_stage": group, "train_iters": 1}
    values |= {"interleave_group_size": gis_group, "allow_padding_num_layers": pad}
    values = {name: value for name, value in values.items() if value is not None}
    config = resolve(values, dict.fromkeys(values, "flag"), Machine(world_size=pp))
    refused = {problem.rule for problem in broken_rules(RuleContext(config))} & IDS
    name = config.parallel.pipeline_schedule
    try:
        held = len(stages_of(config.parallel, num_layers, name)) // pp
    except StageLayersError:
        assert "pipeline-layers" in refused
        return
    fits = {LINEAR: held == 1, LOOPED: held > 1, V_SHAPED: held == 2}[SCHEDULES[name].placement]
    fits = fits and (pp > 1 or name in ("gpipe", "1f1b"))
    fits = fits and (group is None or name != "interleaved" or group >= pp)
    fits = fits and (gis_group == 0 or -(-pp // 2) <= gis_group <= pp)
    if not fits:
        assert refused
        return
    assert config.last_num_microbatches == microbatches
    assert (bubble_rate(config.planner().spec, microbatches) is None) == bool(refused)  # None: no such plan
