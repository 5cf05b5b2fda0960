"""Megatron's path of the parallel state: ours is `megatron.core.transport.parallel_state`, its functions those of
`megatron.compat.parallel_state`."""

import importlib
from typing import Any

from megatron.core.transport.parallel_state import *  # noqa: F403


def __getattr__(name: str) -> Any:
    return importlib.import_module("megatron.compat.names").look_up(__name__, name)
