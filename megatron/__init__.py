"""Megatron-Zero. Import paths and names of Megatron-LM's that are not here are asked of `megatron.compat.names`."""

import importlib
import sys
from collections.abc import Callable
from typing import Any


def names_of(module: str) -> Callable[[str], Any]:
    """`__getattr__` of a module of ours at an import path of Megatron's: names that it lacks are the facade's."""
    return lambda name: importlib.import_module("megatron.compat.names").look_up(module, name)


class _MegatronPaths:
    """Is asked last, for import paths that are no modules here."""

    @staticmethod
    def find_spec(path: str, parents: Any = None, target: Any = None) -> Any:
        if path.startswith(("megatron.core.", "megatron.training.", "megatron.legacy")):
            return importlib.import_module("megatron.compat.names").find_spec(path)


sys.meta_path.append(_MegatronPaths)
