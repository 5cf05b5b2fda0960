"""Megatron's import paths and names: where they live here, and for those that cannot be had what to use.

`names.csv` has a row a name: path; name (`*`: every name in the home's `__all__`); home, `module` or `module:name`; and
without a home what to use instead. A row without a name is of a whole path that cannot be had, and of those below it.
"""

from __future__ import annotations

import csv
import functools
import importlib
import importlib.abc
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron.core.safe_files import read_text


@functools.cache
def table() -> list[dict[str, str]]:
    """The rows."""
    text = read_text(Path(__file__).with_name("names.csv"), max_bytes=1 << 20)
    return list(csv.DictReader(text.splitlines()))


def look_up(path: str, name: str) -> Any:
    """What Megatron has under this name. Raises ImportError that says what to use, AttributeError for unknown names."""
    for row in (row for row in table() if row["path"] == path and row["name"] in (name, "*")):
        if row["instead"]:
            raise ImportError(f"{path}.{name} is not here: {row['instead']}")
        module, _, attribute = row["home"].partition(":")
        home = importlib.import_module(module)
        if row["name"] == name or name in home.__all__:
            return home if row["name"] == name and not attribute else getattr(home, attribute or name)
    raise AttributeError(f"module {path!r} has no attribute {name!r}")


def find_spec(path: str) -> ModuleSpec | None:
    """Of a path that is no module here. Raises ModuleNotFoundError that says what to use; it has no `name`, or else
    `from package import path` would hide it."""
    refused = [row for row in table() if not row["name"] and f"{path}.".startswith(row["path"] + ".")]
    known = any(f"{row['path']}.".startswith(path + ".") for row in table())
    if refused or not (known or path.rpartition(".")[2].startswith("_")):
        why = (
            refused[0]["instead"]
            if refused
            else "docs/megatron_compat.md lists the names of Megatron's that are"
        )
        raise ModuleNotFoundError(f"{path} is not here: {why}")
    return ModuleSpec(path, _Loader(), is_package=True) if known else None


class _Loader(importlib.abc.Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _MadeModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__getattr__"] = functools.partial(look_up, module.__name__)


class _MadeModule(ModuleType):
    """Of the table's rows. `distributed.finalize_model_grads` is both a module and the function in it of that name."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, self.__name__.rpartition(".")[2])(*args, **kwargs)
