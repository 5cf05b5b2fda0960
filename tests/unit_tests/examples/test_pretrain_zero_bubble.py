"""examples/pretrain_zero_bubble.sh: each of the fork's variables becomes the flags it stands for; they are accepted."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from megatron.core.parallelism_config import asked_schedules
from megatron.training.config.launch_env import LaunchEnv
from megatron.training.config.problems import ConfigurationError
from megatron.training.run.arguments import parse_config

SCRIPT = Path(__file__).parents[3] / "examples" / "pretrain_zero_bubble.sh"
SYNC = {"SYNC_OPTIMIZER": "1"}


def run(variables, *flags):
    """The script with only these variables, saying its command."""
    environment = {"PATH": os.environ["PATH"], "DRY_RUN": "1", **variables}
    return subprocess.run(
        ["bash", str(SCRIPT), *flags], capture_output=True, text=True, env=environment, timeout=30
    )


def words_of(variables, *flags):
    """(launcher's words, trainer's words)."""
    done = run(variables, *flags)
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout)
    assert words[1:3] == ["-m", "torch.distributed.run"]
    trainer = words.index("pretrain_gpt.py")
    return words[3:trainer], words[trainer + 1 :]


def value(words, flag):
    return words[words.index(flag) + 1]


@pytest.mark.parametrize(
    ("variables", "flags"),
    [
        ({}, ""),
        (
            {"ZERO_BUBBLE_V_SCHEDULE": "1"},
            "--zero-bubble-v-schedule --allow-padding-num-layers --enable-optimizer-post-validation",
        ),
        (
            {"ZERO_BUBBLE_V_SCHEDULE": "1", "ZERO_BUBBLE_MEM_SETUP": "half", **SYNC},
            "--zero-bubble-v-schedule --allow-padding-num-layers --zero-bubble-v-schedule-mem-setup half",
        ),
        ({"ENABLE_ZERO_BUBBLE": "1", **SYNC}, "--enable-zero-bubble"),
        (
            {"ENABLE_ZERO_BUBBLE": "1", "ZERO_BUBBLE_MEM_LIMIT": "4", **SYNC},
            "--enable-zero-bubble --zero-bubble-max-pending-backward 4",
        ),
        (
            {"ENABLE_ZERO_BUBBLE": "1", "ZERO_BUBBLE_TIMER_START": "20", **SYNC},
            "--enable-zero-bubble --zero-bubble-pipeline-timers-start-iter 20 "
            "--zero-bubble-pipeline-timers-end-iter 30",
        ),
        (
            {
                "ENABLE_ZERO_BUBBLE": "1",
                "ZERO_BUBBLE_TIMER_START": "20",
                "ZERO_BUBBLE_TIMER_END": "25",
                **SYNC,
            },
            "--enable-zero-bubble --zero-bubble-pipeline-timers-start-iter 20 "
            "--zero-bubble-pipeline-timers-end-iter 25",
        ),
        ({"ENABLE_1F1B_V": "1"}, "--enable-1f1b-v"),
        ({"INTERLEAVED_1F1B": "1"}, "--num-layers-per-virtual-pipeline-stage 1"),
        ({"PIPELINE_SCHEDULE": "v-min"}, "--pipeline-schedule v-min --enable-optimizer-post-validation"),
        ({"PIPELINE_SCHEDULE": "auto"}, "--pipeline-schedule auto --enable-optimizer-post-validation"),
        ({"PIPELINE_SCHEDULE": "zb-h1", **SYNC}, "--pipeline-schedule zb-h1"),
        ({"PIPELINE_SCHEDULE": "1f1b-v"}, "--pipeline-schedule 1f1b-v"),
        (
            {"PIPELINE_SCHEDULE": "zbv", "ZERO_BUBBLE_TIMER_START": "5", "ZERO_BUBBLE_TIMER_END": "9"},
            "--pipeline-schedule zbv --zero-bubble-pipeline-timers-start-iter 5 "
            "--zero-bubble-pipeline-timers-end-iter 9 --enable-optimizer-post-validation",
        ),
        ({"ZERO_BUBBLE_TIMER_END": "9"}, "--zero-bubble-pipeline-timers-end-iter 9"),
        (
            {"ZERO_BUBBLE_TIMER_START": "9"},
            "--zero-bubble-pipeline-timers-start-iter 9 --zero-bubble-pipeline-timers-end-iter 19",
        ),
        (
            {"ZERO_BUBBLE_V_SCHEDULE": "1", "ZERO_BUBBLE_MEM_LIMIT": "3", **SYNC},
            "--zero-bubble-v-schedule --allow-padding-num-layers --zero-bubble-max-pending-backward 3",
        ),
        ({"ZERO_BUBBLE_MEM_SETUP": "half"}, "--zero-bubble-v-schedule-mem-setup half"),
        ({"ZERO_BUBBLE_MEM_LIMIT": "3"}, "--zero-bubble-max-pending-backward 3"),
        (
            {"ZERO_BUBBLE_V_SCHEDULE": "1", "ENABLE_ZERO_BUBBLE": "1", "ENABLE_1F1B_V": "1", **SYNC},
            "--zero-bubble-v-schedule --allow-padding-num-layers --enable-zero-bubble --enable-1f1b-v",
        ),
        (
            {"INTERLEAVED_1F1B": "1", "PIPELINE_SCHEDULE": "gis", **SYNC},
            "--num-layers-per-virtual-pipeline-stage 1 --pipeline-schedule gis",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_schedules(variables, flags):
    """Nothing more and nothing less than the plain run has."""
    plain = words_of({"CPU": "1"})[1]
    words = words_of({"CPU": "1", **variables}, "--seed", "5")[1]
    assert words == [*plain, *flags.split(), "--seed", "5"]


@pytest.mark.parametrize(
    ("variables", "asked"),
    [
        ({"ZERO_BUBBLE_V_SCHEDULE": "1"}, "zbv"),
        ({"ZERO_BUBBLE_V_SCHEDULE": "1", "ZERO_BUBBLE_MEM_SETUP": "min"}, "v-min"),
        ({"ENABLE_ZERO_BUBBLE": "1"}, "zb-1p"),
        ({"ENABLE_ZERO_BUBBLE": "1", "ZERO_BUBBLE_MEM_LIMIT": "8", "PIPELINE_SIZE": "4"}, "zb-2p"),
        ({"ENABLE_1F1B_V": "1"}, "1f1b-v"),
        ({"INTERLEAVED_1F1B": "1"}, None),
        ({"TP_SIZE": "2"}, None),
        ({"ZERO_BUBBLE_V_SCHEDULE": "1", "ZERO_BUBBLE_MEM_LIMIT": "3"}, "zbv"),
        ({"ZERO_BUBBLE_V_SCHEDULE": "1", "ENABLE_ZERO_BUBBLE": "1"}, "zbv"),
        ({"PIPELINE_SCHEDULE": "zbv", "ZERO_BUBBLE_TIMER_START": "5"}, None),
    ],
    ids=str,
)
def test_the_trainer_accepts_them_and_takes_the_schedule(variables, asked):
    launcher, words = words_of({"CPU": "1", **variables})
    ranks = int(value(launcher, "--nproc-per-node"))
    config = parse_config(words, env=LaunchEnv(world_size=ranks, local_world_size=ranks))
    assert list(asked_schedules(config.parallel).values()) == ([] if asked is None else [asked])
    assert config.parallel.sequence_parallel == ("TP_SIZE" in variables)


@pytest.mark.parametrize(
    ("variables", "rule"),
    [
        ({"ZERO_BUBBLE_TIMER_END": "9"}, "pipeline-timers"),
        ({"ZERO_BUBBLE_V_SCHEDULE": "1", "ENABLE_1F1B_V": "1"}, "schedule-flags"),
        ({"ENABLE_ZERO_BUBBLE": "1", "PIPELINE_SCHEDULE": "1f1b"}, "schedule-flags"),
    ],
    ids=str,
)
def test_what_contradicts_itself_is_refused_by_the_trainer(variables, rule):
    words = words_of({"CPU": "1", **variables})[1]
    with pytest.raises(ConfigurationError) as refused:
        parse_config(words, env=LaunchEnv(world_size=2, local_world_size=2))
    assert [problem.rule for problem in refused.value.problems] == [rule]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ZERO_BUBBLE_V_SCHEDULE", "1"),
        ("ENABLE_1F1B_V", "1"),
        ("ENABLE_ZERO_BUBBLE", "1"),
        ("PIPELINE_SCHEDULE", "zbv"),
    ],
)
def test_interleaving_and_another_schedule_are_refused(name, text):
    done = run({"CPU": "1", "INTERLEAVED_1F1B": "1", name: text})
    assert done.returncode == 2
    assert done.stderr.startswith(f"INTERLEAVED_1F1B and {name}")
    assert not done.stdout


def test_post_validation_is_for_pipelines_and_toys_are_long_enough_for_it():
    words = words_of({"CPU": "1", "PIPELINE_SIZE": "1", "PIPELINE_SCHEDULE": "auto"})[1]
    assert "--enable-optimizer-post-validation" not in words
    config = parse_config(
        words_of({"CPU": "1", "ENABLE_ZERO_BUBBLE": "1"})[1],
        env=LaunchEnv(world_size=2, local_world_size=2),
    )
    assert config.parallel.enable_optimizer_post_validation
    assert config.training.train_iters > config.parallel.post_validation_after + 1


def test_sizes_precision_and_data():
    words = words_of({"GPUS_PER_NODE": "8", "PIPELINE_SIZE": "2", "LAYERS": "30"})[1]
    assert (value(words, "--num-layers"), value(words, "--hidden-size")) == ("30", "8192")
    assert {"--fp16", "--sequence-parallel", "--use-distributed-optimizer", "--mock-data"} <= set(words)
    assert "--fp16" not in words_of({"GPUS_PER_NODE": "4", "FP32": "1"})[1]
    assert "--bf16" in words_of({"GPUS_PER_NODE": "4", "BF16": "1"})[1]
    words = words_of({"GPUS_PER_NODE": "4", "DATASET": "c4", "TOKENIZER_MODEL": "t.model"})[1]
    assert (value(words, "--data-path"), value(words, "--tokenizer-model")) == ("c4", "t.model")
    assert "--mock-data" not in words
    exact = words_of(
        {"CPU": "1", "ENABLE_EXACTLY_NUMERIC_MATCH": "1", "EXIT_INTERVAL": "7", "PROFILED": "1"}
    )[1]
    assert (value(exact, "--hidden-dropout"), value(exact, "--exit-interval")) == ("0.0", "7")
    assert value(exact, "--log-pipeline-timeline") == "runs/pretrain_zero_bubble/timeline"
    assert "--enable-exactly-numeric-match" in exact


def test_machines():
    alone = words_of({"CPU": "1", "PIPELINE_SIZE": "4"})[0]
    assert alone == ["--nproc-per-node", "4", "--standalone"]
    of_many = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "first", "GPUS_PER_NODE": "4"}
    assert words_of(of_many)[0] == (
        "--nproc-per-node 4 --nnodes 2 --node-rank 1 --master-addr first --master-port 10086".split()
    )
    for missing in ("RANK", "MASTER_ADDR"):
        done = run({name: text for name, text in of_many.items() if name != missing})
        assert done.returncode != 0
        assert missing in done.stderr
