"""The only place that asks whether an optional package is there, and names the pip line when it is not."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

DISTRIBUTION = "megatron-zero"


class MissingPackageError(ValueError):
    """An optional package that the user's choice needs is not installed."""


def available(module: str) -> bool:
    """Whether `module` (dotted name) can be found; nothing is imported but its parent packages."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False


def require(module: str, extra: str) -> ModuleType:
    """Import and return an optional package.

    module: dotted name, e.g. "tokenizers".
    extra:  the extra of this distribution that brings it; named in the error.
    Raises MissingPackageError where the package is absent; one that is there but broken raises its own error.
    """
    if not available(module):
        raise MissingPackageError(
            f"the Python package {module!r} is needed here and is not installed: "
            f"run  pip install '{DISTRIBUTION}[{extra}]'"
        )
    return importlib.import_module(module)
