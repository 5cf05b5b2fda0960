"""Megatron-Zero. Megatron-LM's import paths that are no modules here are made by `megatron.compat.names`."""

import importlib
import sys
from typing import Any


class _MegatronPaths:
    """Asked last, for what nobody else has found."""

    @staticmethod
    def find_spec(fullname: str, path: Any = None, target: Any = None) -> Any:
        if not fullname.startswith("megatron.") or fullname.startswith("megatron.compat"):
            return None
        return importlib.import_module("megatron.compat.names").find_spec(fullname)


sys.meta_path.append(_MegatronPaths)  # type: ignore[arg-type]
