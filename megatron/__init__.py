"""Megatron-Zero. Its package has the name of megatron-core's, so an environment holds one of the two."""

import os
import sys
import warnings

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
