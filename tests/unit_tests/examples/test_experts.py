"""examples/mixtral and examples/qwen3_moe: published sizes on GPUs, and toys that train on this CPU."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from megatron.core.pipeline_parallel.plan.placement import LINEAR, Placement
from megatron.training.config.launch_env import LaunchEnv
from megatron.training.run.arguments import parse_config
from tests.harness import launch
from tests.harness.described import costs_of_model, whole

EXAMPLES = Path(__file__).parents[3] / "examples"
NAMES = ("mixtral", "qwen3_moe")


def words_of(name, *flags, **variables):
    """The trainer's words, with only these variables."""
    done = subprocess.run(
        ["bash", str(EXAMPLES / name / "pretrain.sh"), *flags],
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"], "DRY_RUN": "1", **variables},
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout)
    return words[words.index("pretrain_gpt.py") + 1 :]


@pytest.mark.grid
@pytest.mark.parametrize(
    ("name", "vocabulary", "active"),
    [("mixtral", 32000, 12_879_925_248), ("qwen3_moe", 151936, 3_353_032_704)],
)
@pytest.mark.parametrize("tp", [1, 2])
def test_the_sizes_are_those_that_were_published(name, vocabulary, active, tp):
    config = parse_config(
        words_of(name, GPUS_PER_NODE="8", NUM_NODES="4", NODE_RANK="0", MASTER_ADDR="a", TP_SIZE=str(tp)),
        env=LaunchEnv(world_size=32, local_world_size=8),
    )
    experts = config.world_part().experts
    assert (experts.ep, experts.tp, experts.dp) == (8, 1, 1)
    costs = costs_of_model(config.model, vocabulary)
    assert costs.count([whole(config.model)], Placement(LINEAR, 1)).active == active
    assert config.parallel.sequence_parallel == (tp == 2)


@pytest.mark.grid
@pytest.mark.parametrize("name", NAMES)
def test_a_toy_trains(name, tmp_path):
    words = words_of(
        name, "--train-iters", "12", "--log-interval", "1", "--lr", "1e-2", CPU="1", RUN_DIR=str(tmp_path)
    )
    losses = launch.ok(launch.run_forked(words, ranks=4, cwd=tmp_path)).losses()
    values = [float(text.split()[0]) for text in losses.values()]
    assert len(values) == 12
    assert values[-1] < values[0]
