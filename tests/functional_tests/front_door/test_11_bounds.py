"""`--check-config` never crashes, hangs or grows, and what it accepts can run."""

import contextlib
import dataclasses
import datetime
import io
import json
import os
import random
import resource
import sys
from pathlib import Path

import pytest

from megatron.core.config_base import bounds_of
from megatron.core.dist_checkpointing.files import CheckpointError
from megatron.core.pipeline_parallel.plan.build import plan_for
from megatron.core.pipeline_parallel.plan.ir import plan_hash
from megatron.core.pipeline_parallel.plan.spec import PlanPurpose
from megatron.core.pipeline_parallel.plan.text import from_json, to_json
from megatron.training.config.check_config import build_report, render_json, render_text
from megatron.training.config.config import FIELDS, train_step_flops
from megatron.training.config.flag_table import Arity, spellings
from megatron.training.config.launch_env import LaunchEnv, LaunchEnvError
from megatron.training.config.microbatches import BatchSchedule
from megatron.training.config.problems import ConfigurationError
from megatron.training.config.rules import plan_problems
from megatron.training.config.saved_config import apply_checkpoint_args
from megatron.training.run.arguments import launch_config, parse_config
from megatron.training.run.describe import described
from tests.harness.launch_lines import SMALL

MIB = 1 << 20
MOST_GROWTH = 200 * MIB
HOSTILE = (
    *(
        "2147483648",
        "9223372036854775808",
        "-1",
        "0",
        "1",
        "7",
        "1" + 18 * "0",
        "1" * 5000,
        "9" * 300,
        "65536",
        "1048576",
    ),
    *(
        "nan",
        "inf",
        "1e5000",
        "1e38",
        "1e-320",
        "",
        " 1",
        "1_000",
        "0x10",
        "\u0661",
        "a\0b",
        "\udcff",
        "x" * 5000,
    ),
    *("[0]*10**9", "auto", "1,1", "/dev/zero", ".", "../" * 500, "-", "--", "="),
)


def checked(*words):
    """Status and output of --check-config, in a process that may grow by MOST_GROWTH only."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        status, told = 1, ""
        try:
            grown = (
                int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
                + MOST_GROWTH
            )
            resource.setrlimit(resource.RLIMIT_AS, (grown, grown))
            out = io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
                try:
                    launch_config([*words, "--check-config"])
                except SystemExit as leaving:
                    status = leaving.code
            told = out.getvalue()
        except BaseException as error:
            told = f"{type(error).__name__}: {error!s:.500}"
        with open(write, "w", errors="backslashreplace") as pipe, contextlib.suppress(BrokenPipeError):
            pipe.write(told[-MIB:])
        os._exit(status)
    os.close(write)
    with open(read, errors="replace") as pipe:
        told = pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), told


def refused(*words):
    status, told = checked(*SMALL, *words)
    assert status == 2, told
    assert "fix: " in told
    return told


# Every size has an upper bound in its type


def test_every_number_has_a_least_and_a_largest_value_and_defaults_lie_within():
    for name, (_, field) in FIELDS.items():
        bounds = bounds_of(field)
        if bounds is None:
            continue
        if name in ("lr", "min_lr", "decoupled_lr", "decoupled_min_lr"):  # computed in Python
            assert (bounds.least, bounds.most) == (0, sys.float_info.max), name
        elif name == "embedding_multiplier":  # of either sign
            assert -bounds.least == bounds.most < 2**128, name
        elif name == "moe_expert_capacity_factor":  # negative: room for all
            most = bounds_of(FIELDS["num_experts"][1]).most
            assert (bounds.least, bounds.most) == (-1, most), name
        else:
            assert -1 < bounds.least < bounds.most < 2**128, name
        defaults = field.default if isinstance(field.default, tuple) else (field.default,)
        assert all(value is None or bounds.hold(value) for value in defaults), name


@pytest.mark.parametrize("number", [2**63, 10**18, "1" * 4000])
@pytest.mark.parametrize(
    "flag", ["--num-layers", "--hidden-size", "--world-size", "--global-batch-size", "--seq-length"]
)
def test_a_number_beyond_its_bounds_is_refused_with_flag_value_bound_and_fix(flag, number):
    told = refused(flag, str(number))
    assert f"{flag} {str(number)[:60]}" in told
    assert "must be at most" in told
    assert "or less" in told


def problems_of(*words, **options):
    with pytest.raises(ConfigurationError) as caught:
        parse_config(words, **options)
    return caught.value.problems


def test_all_sources_share_the_bounds(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(f"num_layers: {2**63}\n")
    (problem,) = problems_of(*SMALL[2:], "--yaml-cfg", str(file))
    assert (problem.rule, problem.message) == (
        "limit-num-layers",
        f"{file}:1: num_layers {2**63}: must be at most 65536",
    )
    (problem,) = problems_of(*SMALL[2:], args_defaults={"num_layers": 2**63})
    assert problem.rule == "limit-num-layers"
    derived = problems_of(*SMALL, "--micro-batch-size", str(2**31), "--world-size", "8", "--check-config")
    assert "bounds-global-batch-size" in [problem.rule for problem in derived]
    with pytest.raises(ValueError, match="num_layers 9223372036854775808: must be at most 65536"):
        apply_checkpoint_args({}, {}, {"num_layers": 2**63})
    with pytest.raises(LaunchEnvError, match="at most 262144"):
        LaunchEnv.read({"RANK": "0", "WORLD_SIZE": str(10**9)})
    with pytest.raises(LaunchEnvError, match="no integer"):
        LaunchEnv.read({"RANK": "0", "WORLD_SIZE": "1" * 5000})


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--lr nan", "finite"),
        ("--lr 1e400", "finite"),
        ("--lr -1", "at least 0"),
        ("--norm-epsilon 1e39", "at most"),
        ("--distributed-timeout-minutes 1000000000000", "at most 525600"),
        ("--split " + "9" * 400, "no split"),
        ("--data-path " + "x " * 20000, "at most 16384 values"),
        ("--save " + "x" * 5000, "at most 4096 bytes"),
        ("--save " + "x" * 300, "File name too long"),
        ("--moe-layer-freq [0]*1000000000", "no list expression"),
        ("--num-virtual-stages-per-pipeline-rank 16384 --allow-padding-num-layers", "stages"),
        (
            "--rampup-batch-size 1 1 1000000000000 --global-batch-size 1048576 --micro-batch-size 1",
            "larger increment",
        ),
    ],
)
def test_values_that_make_no_sense_are_refused_in_words(words, told):
    assert told in refused("--pipeline-model-parallel-size", "2", "--world-size", "2", *words.split())


def test_floats_that_end_a_run_at_run_time_are_accepted():
    assert parse_config([*SMALL, "--lr", "1e38"]).optimizer.lr == 1e38


# Nothing crashes, hangs or grows


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("num_layers: " + "1" * 5000, "a number of 5000 digits"),
        ("num_layers: 0x" + "f" * 60, "at most 64 bits"),
        ("lr: !!bool x", "is no bool"),
        ("".join(f"unknown_key_{n}: 1\n" for n in range(20_000)), "has 19980 more unknown settings"),
        ("a: " + "[" * 100_000, "nested too deeply"),
        pytest.param("a: [" + "1," * 400_000 + "]", "more than 65536 values", marks=pytest.mark.full),
        (
            "data_path: &x [" + "a," * 16_000 + "]\n" + "".join(f"{n}: *x\n" for n in FIELDS if "path" in n),
            "too many",
        ),
        ("lr: 1\n" * 5000, "... and 4899 more"),
        ("x" * (2 * MIB), "at most 1048576 are read"),
        ('load: "a\\0b"', "without NUL bytes"),
    ],
    ids=["digits", "bits", "tag", "unknown", "deep", "long", "aliases", "twice", "large", "nul"],
)
def test_a_yaml_file_of_any_content(text, told, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    assert told in refused("--yaml-cfg", str(file))


FILES = (
    "--yaml-cfg",
    "--vocab-file",
    "--data-args-path",
    "--per-split-data-args-path",
    "--pipeline-schedule-file",
)


@pytest.mark.parametrize("flag", FILES)
@pytest.mark.parametrize("kind", ["a pipe", "a device", "a folder"])
def test_what_is_no_regular_file_is_refused_without_waiting(flag, kind, tmp_path):
    path = tmp_path / "it"
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a folder":
        path.mkdir()
    words = [flag, "/dev/zero" if kind == "a device" else str(path)]
    if flag == "--vocab-file":
        words += ["--merge-file", words[1], "--tokenizer-type", "GPT2BPETokenizer"]
    assert f"is {kind}, not a regular file" in refused(*words)


@pytest.mark.parametrize("text", ['{"a":' * 100_000, "1" * 5000, "no json"])
def test_a_vocabulary_that_no_launch_could_read(text, tmp_path):
    vocabulary, merges = tmp_path / "vocab.json", tmp_path / "merges.txt"
    vocabulary.write_text(text)
    merges.write_text("#version: 0.2\n")
    words = [
        "--vocab-file",
        str(vocabulary),
        "--merge-file",
        str(merges),
        "--tokenizer-type",
        "GPT2BPETokenizer",
    ]
    assert f"--vocab-file {vocabulary}: not JSON" in refused(*words)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "1" * 5000, '{"ops": ' + "[" + "[]," * 100_000 + "[]]}", '{"ops": []}']
)
def test_a_schedule_file_of_any_content(text, tmp_path):
    file = tmp_path / "plan.json"
    file.write_text(text)
    assert "no plan" in (told := refused("--pipeline-schedule-file", str(file))) or "header" in told


def test_a_schedule_that_claims_more_microbatches_than_it_holds_makes_no_lists(tmp_path):
    content = json.loads(to_json(plan_for(parse_config(SMALL).planner().spec, 1, PlanPurpose.TRAIN)))
    plan = from_json(json.dumps(content))
    content.update(microbatches=10**9, hash=plan_hash(dataclasses.replace(plan, num_microbatches=10**9)))
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(content))
    assert "operations, the forwards of" in refused("--pipeline-schedule-file", str(file))


@pytest.mark.parametrize("word", ["--unknown-flag", "stray", "--lr"])
def test_20000_words(word):
    assert len(refused(*[word] * 20_000)) < 30_000


@pytest.mark.parametrize(
    "words", ["--world-size 262144 --tensor-model-parallel-size 2", "--num-layers 65536"]
)
@pytest.mark.parametrize("json_too", [["--json"], []])
def test_the_largest_values_are_told_within_the_same_memory(words, json_too):
    status, _ = checked(*SMALL, *words.split(), *json_too)
    assert status == 0


def test_a_path_that_the_terminal_cannot_show(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", stream)
    with pytest.raises(SystemExit) as ended:
        launch_config([*SMALL, "--load", "caf\u00e9", "--check-config"])
    assert ended.value.code == 0
    assert b"not found: --load caf\\xe9" in stream.buffer.getvalue()


# What it accepts must run


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ("--global-batch-size 1000000000000000000", "limit-global-batch-size"),
        ("--global-batch-size 2097152 --train-iters 1", "plan-size"),
        ("--global-batch-size 65536 --pipeline-model-parallel-size 2 --pipeline-schedule auto", "plan-size"),
        ("--global-batch-size 131072 --pipeline-model-parallel-size 2 --enable-zero-bubble", "plan-size"),
        ("--train-iters 1000000000000 --data-path a", "index-size"),
        ("--eval-iters 1000000000000 --data-path a", "index-size"),
    ],
)
def test_work_without_end_is_refused_with_an_estimate(words, rule):
    small = [word for word in SMALL if "--data-path" not in words or word != "--mock-data"]
    problems = problems_of(*small, *words.split(), "--world-size", "2", "--check-config")
    assert rule in [problem.rule for problem in problems]


def test_an_index_larger_than_this_machine_is_refused_here_and_may_be_made_elsewhere(monkeypatch, tmp_path):
    assert parse_config([*SMALL, "--train-iters", "100000000"]).data.mock_data  # which needs none
    (tmp_path / "c.bin").touch()
    (tmp_path / "c.idx").touch()
    corpus = ["--data-path", str(tmp_path / "c"), "--tokenizer-type", "ByteTokenizer"]
    words = [*(word for word in SMALL if word != "--mock-data"), *corpus, "--train-iters", "100000000"]
    monkeypatch.setattr(LaunchEnv, "memory_bytes", staticmethod(lambda: 2**28))
    (problem,) = problems_of(*words)
    assert problem.rule == "index-size"
    assert "this machine has 256 MiB" in problem.message
    assert parse_config([*words, "--check-config"]).training.train_iters == 10**8
    assert parse_config([*words, "--dataloader-type", "external"]).training.train_iters == 10**8


def test_a_ramp_of_a_trillion_samples_is_counted_at_once():
    schedule = BatchSchedule(1, 1, 4096, rampup=(1, 1, 2**40))
    iterations = schedule.iterations_for(2**40)
    assert schedule.samples_of(iterations) <= 2**40 < schedule.samples_of(iterations + 1)


def planned(config):
    """The pure part of a launch."""
    config.grid()
    schedule, microbatches = config.batch_schedule(), config.last_num_microbatches
    schedule.samples_of(config.total_iterations)
    schedule.iterations_for(2**40)
    datetime.timedelta(minutes=config.reliability.distributed_timeout_minutes)
    train_step_flops(config, schedule.target)
    if microbatches * (config.model.num_layers or 1) < 1000:
        if config.parallel.pipeline_memory_limit is not None or config.rank_budget is not None:
            config = described(config)
            if plan_problems(config, LaunchEnv(world_size=config.world_size)):
                return
        plan_for(config.planner().spec, microbatches, PlanPurpose.TRAIN)
    report = build_report(config, [])
    assert json.loads(render_json(report))
    assert render_text(report)


CASES = [
    (flag, value)
    for flag, entry in spellings().items()
    for value in (HOSTILE if entry.arity is not Arity.SWITCH else (None, "1"))
]


@pytest.mark.timeout(900)  # a thousand lines, each parsed twice
@pytest.mark.parametrize(
    "cases",
    [
        random.Random(7).sample(CASES, len(CASES) // 250),
        *(pytest.param(CASES[part::20], marks=pytest.mark.full) for part in range(20)),
    ],
    ids=["sample", *map(str, range(20))],
)
def test_every_flag_with_hostile_values_gives_a_configuration_that_can_be_planned_or_problems(cases):
    for flag, value in cases:
        words = [*SMALL, flag, *([] if value is None else [value])]
        try:
            with contextlib.suppress(ConfigurationError, CheckpointError):
                planned(parse_config([*words, "--world-size", "8", "--check-config"]))
            with contextlib.suppress(ConfigurationError, CheckpointError):
                planned(parse_config(words))
        except Exception as error:
            raise AssertionError(f"{flag} {value!r:.80}") from error
