"""examples/fsdp_zero_bubble/pretrain.sh: its variables become flags, which are accepted on CPU ranks and on GPUs."""

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

SCRIPT = Path(__file__).parents[3] / "examples" / "fsdp_zero_bubble" / "pretrain.sh"
CPU = {"CPU": "1"}
GPUS = {"GPUS_PER_NODE": "8"}


def words_of(variables, *flags):
    """(launcher's words, trainer's words) of the script with only these variables."""
    done = subprocess.run(
        ["bash", str(SCRIPT), *flags],
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"], "DRY_RUN": "1", **variables},
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout)
    trainer = words.index("pretrain_gpt.py")
    return words[3:trainer], words[trainer + 1 :]


def config_of(variables):
    launcher, words = words_of(variables)
    ranks = int(launcher[1]) * int(variables.get("NUM_NODES", "1"))
    return parse_config(words, env=LaunchEnv(world_size=ranks, local_world_size=int(launcher[1])))


@pytest.mark.parametrize(
    ("variables", "schedule", "sharding", "ranks"),
    [
        (CPU, "zbv", ("optim_grads_params", "memory", None), 2),
        (GPUS, "zbv", ("optim_grads_params", "memory", None), 2),
        ({**CPU, "POLICY": "step", "MEM_SETUP": "half"}, "v-half", ("optim_grads_params", "step", None), 2),
        ({**CPU, "POLICY": "budget", "BUDGET": "9000"}, "zbv", ("optim_grads_params", "budget", 9000), 2),
        ({**GPUS, "STRATEGY": "optim", "MEM_SETUP": "min"}, "v-min", ("optim", "memory", None), 2),
        (
            {**GPUS, "STRATEGY": "optim_grads", "TP_SIZE": "2", "NUM_NODES": "2", "NODE_RANK": "1"}
            | {"MASTER_ADDR": "first"},
            "zbv",
            ("optim_grads", "memory", None),
            2,
        ),
    ],
    ids=str,
)
def test_the_trainer_takes_what_the_variables_say(variables, schedule, sharding, ranks):
    config = config_of(variables)
    assert set(asked_schedules(config.parallel).values()) == {schedule}
    ddp = config.ddp
    assert sharding == (
        ddp.data_parallel_sharding_strategy,
        ddp.fsdp_reshard_policy,
        ddp.fsdp_memory_budget,
    )
    assert (ddp.use_custom_fsdp, config.data_parallel_size) == (True, ranks)
    assert config.parallel.sequence_parallel == ("TP_SIZE" in variables)


def test_cpu_ranks_and_gpus_differ_in_size_and_precision_only():
    small, large = words_of(CPU, "--seed", "5")[1], words_of(GPUS)[1]
    assert small[-2:] == ["--seed", "5"]
    assert [word for word in large if word.startswith("--") and word not in small] == ["--bf16"]


def test_machines():
    launcher = words_of({**GPUS, "NUM_NODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "first"})[0]
    assert launcher == (
        "--nproc-per-node 8 --nnodes 2 --node-rank 1 --master-addr first --master-port 6000".split()
    )


def test_what_needs_one_stage_is_refused_by_the_trainer():
    with pytest.raises(ConfigurationError) as refused:
        config_of({**CPU, "POLICY": "backward"})
    assert [problem.rule for problem in refused.value.problems] == ["reshard-policy-stages"]
