"""Names of Megatron-LM's that this package lacks are those of `megatron.compat`."""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    return importlib.import_module("megatron.compat.names").look_up(__name__, name)
