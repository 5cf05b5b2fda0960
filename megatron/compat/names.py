"""Megatron's import paths and names: where they live here, and for those that cannot be had what to use.

`names.csv`: path; names in it (a module or anything else; `*`, in a path's last row, every name of another path, or of
the home's `__all__`); home, where they are; and without a home what to use instead.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import itertools
import sys
import traceback
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron.core.safe_files import read_rows

_LISTED = "docs/megatron_compat.md lists the names of Megatron's that are"


@functools.cache
def rows_of(table: str) -> list[dict[str, str]]:
    """Of a table of this package, a row a name."""
    rows = read_rows(Path(__file__).with_name(table))
    return [{**row, "name": name} for row in rows for name in row["names"].split()]


@functools.cache
def paths() -> set[str]:
    """That have rows."""
    return {row["path"] for row in rows_of("names.csv")}


def look_up(path: str, name: str, asked: str = "") -> Any:
    """What Megatron has under this name. asked: the path that messages name, where `path` stands for another.

    Raises AttributeError that says what to use.
    """
    asked = asked or path
    for row in (row for row in rows_of("names.csv") if row["path"] == path and row["name"] in (name, "*")):
        if row["instead"]:
            raise AttributeError(f"{asked}.{name} is not here: {row['instead']}")
        if row["home"] in paths():
            return look_up(row["home"], name, asked)
        home = importlib.import_module(row["home"])
        if row["name"] == name or name in home.__all__:
            return getattr(home, name)
    if f"{path}.{name}" in paths():
        return importlib.import_module(f"{path}.{name}")
    raise AttributeError(f"{asked}.{name} is not here: {_LISTED}")


def find_spec(path: str) -> ModuleSpec | None:
    """Of a path, or of a name in one, that is no module here. `importlib.util.find_spec` gets None, an import
    ModuleNotFoundError that says what to use; without `name`, or else `from package import path` would hide it."""
    package, _, name = path.rpartition(".")
    if any(f"{one}.".startswith(path + ".") for one in paths()):
        return ModuleSpec(path, _Loader(), is_package=True)
    if _is_imported() and not name.startswith("_"):
        try:
            look_up(package, name)
        except AttributeError as error:
            raise ModuleNotFoundError(str(error)) from None
    return None


def _is_imported() -> bool:
    """Whether an import asks for a spec, not `importlib.util.find_spec` or another's search, which finders cannot tell.

    An import makes of None an error without our help, and a spec that cannot be loaded would look like a feature that
    is there (`if find_spec("megatron.core.models.hybrid")`). So the modules on the stack tell. If importlib's had other
    names, the help would be lost, no more.
    """
    modules = (frame.f_globals.get("__name__") for frame, _ in traceback.walk_stack(sys._getframe()))
    _this, _finder, *asking = [name for name, _ in itertools.islice(itertools.groupby(modules), 4)]
    return asking[:1] == ["importlib._bootstrap"] and asking[1:] != ["importlib.util"]


class _Loader(importlib.abc.Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _TableModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__getattr__"] = functools.partial(look_up, module.__name__)


class _TableModule(ModuleType):
    """Of the table's rows. `distributed.finalize_model_grads` is both a module and the function in it of that name."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, self.__name__.rpartition(".")[2])(*args, **kwargs)
