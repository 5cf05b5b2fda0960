"""Megatron's path of the command line: `megatron.training.run.arguments`."""

from megatron.training.run.arguments import *  # noqa: F403
