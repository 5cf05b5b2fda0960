"""examples/pretrain_zero_bubble.sh: each of the fork's variables becomes the flags it stands for; they are accepted."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from megatron.training.arguments import parse_config
from megatron.training.launch_env import LaunchEnv
from megatron.training.schedule_choice import asked_schedules

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
        ({"PIPELINE_SCHEDULE": "v-min"}, "--pipeline-schedule v-min"),
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
    ],
    ids=str,
)
def test_the_trainer_accepts_them_and_takes_the_schedule(variables, asked):
    launcher, words = words_of({"CPU": "1", **variables})
    ranks = int(value(launcher, "--nproc-per-node"))
    config = parse_config(words, env=LaunchEnv(launched=True, world_size=ranks, local_world_size=ranks))
    assert list(asked_schedules(config.parallel).values()) == ([] if asked is None else [asked])
    assert config.parallel.sequence_parallel == ("TP_SIZE" in variables)


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
    assert "--profile" in exact
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
