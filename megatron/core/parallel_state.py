"""Megatron's path of the parallel state: `megatron.core.transport.parallel_state`."""

from megatron.core.transport.parallel_state import *  # noqa: F403
