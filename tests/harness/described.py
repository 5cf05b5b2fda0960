"""Configurations as a run has them before it builds anything, and models as they are described."""

import dataclasses

from megatron.core.models.gpt.stage_layers import StageSpec
from megatron.estimate.model_costs import ModelCosts
from megatron.training.config.launch_env import LaunchEnv
from megatron.training.config.rules import plan_problems
from megatron.training.run.arguments import ConfigurationError, parse_config
from megatron.training.run.build import imagined_world
from megatron.training.run.describe import described, described_model
from tests.harness.launch_lines import SMALL


def planned_config(words, *, env=None):
    """Described where the plan reads what stages cost. Raises ConfigurationError with what rules say of the plan."""
    env = env or LaunchEnv()
    config = parse_config(words, env=env)
    if config.staged_model.reads_costs:
        config = described(config)
    if problems := plan_problems(config, env):
        raise ConfigurationError(problems)
    return config


def whole(model):
    """One stage of everything."""
    return StageSpec(tuple(range(model.num_layers)), embedding=True, loss=True)


def costs_of_model(model, vocabulary, stages=None, *, words="", ranks=1, **rates):
    """Of a `TransformerConfig`. stages: that are asked for. words: further flags, as many ranks share a layer."""
    flags = f"--tensor-model-parallel-size {ranks} --micro-batch-size 2 --global-batch-size 8 {words}"
    config = parse_config([*SMALL, *flags.split()], env=LaunchEnv(world_size=ranks))
    model = dataclasses.replace(model, padded_vocab_size=vocabulary)
    config = dataclasses.replace(config, model=model)
    description = described_model(config, imagined_world(config).state(0), stages or [whole(model)])
    return ModelCosts(description, model, **rates)
