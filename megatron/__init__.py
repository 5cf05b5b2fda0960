"""Megatron-Zero. Its package has the name of megatron-core's, so an environment holds one of the two."""

import os
import sys
import warnings

__version__ = "0.1.0"  # the only place: packaging, checkpoints and megatron.core.__version__ read it


def _warn_beside_megatron_core() -> None:
    """Warn where a megatron-core is installed, too. Reads names of folders alone: importlib.metadata, which does the
    same, takes 25 ms to import."""
    for folder in sys.path:
        try:
            names = os.listdir(folder or ".")
        except OSError:
            continue
        found = [name for name in names if name.startswith("megatron_core-") and name.endswith("-info")]
        if found:
            release = found[0].removeprefix("megatron_core-").rpartition(".")[0]
            warnings.warn(
                f"megatron-core {release} in {folder} and megatron-zero {__version__} are both there, and each has its "
                "own package `megatron`: in one environment they overwrite each other's files. Give each an "
                "environment of its own, or:  pip uninstall megatron-core megatron-zero,  then install the one to use",
                stacklevel=3,
            )
            return


_warn_beside_megatron_core()
