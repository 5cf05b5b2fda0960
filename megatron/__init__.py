"""Megatron-Zero. Its package has the name of megatron-core's, so an environment holds one of the two.

Import paths and names of Megatron-LM's that are not here are asked of `megatron.compat.names`.
"""

import importlib
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

__version__ = "0.1.0"  # the only place: packaging, checkpoints and megatron.core.__version__ read it


def _warn_beside_megatron_core() -> None:
    """Reads names of folders alone: importlib.metadata, which would do the same, takes 25 ms to import."""
    for folder in sys.path:
        try:
            names = os.listdir(folder or ".")
        except OSError:
            continue
        for name in names:
            if name.startswith("megatron_core-") and name.endswith("-info"):
                release = name.removeprefix("megatron_core-").rpartition(".")[0]
                told = (
                    f"megatron-core {release} ({folder}) and megatron-zero {__version__} both have a package "
                )
                told += "`megatron` and overwrite each other's files. Give each an environment of its own, or run  "
                told += "pip uninstall megatron-core megatron-zero  and install again the one to use"
                return warnings.warn(told, stacklevel=3)


_warn_beside_megatron_core()


def names_of(module: str) -> Callable[[str], Any]:
    """`__getattr__` of a module of ours at an import path of Megatron's: names that it lacks are the facade's. Each has
    a `__path__`, so that `from module import name` asks `_MegatronPaths` too, which says what to use instead."""
    return lambda name: (
        [] if name == "__path__" else importlib.import_module("megatron.compat.names").look_up(module, name)
    )


class _MegatronPaths:
    """Is asked last, for import paths that are no modules here."""

    @staticmethod
    def find_spec(path: str, parents: Any = None, target: Any = None) -> Any:
        if path.startswith(("megatron.core.", "megatron.training.", "megatron.legacy")):
            return importlib.import_module("megatron.compat.names").find_spec(path)


sys.meta_path.append(_MegatronPaths)
