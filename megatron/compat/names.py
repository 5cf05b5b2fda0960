"""Megatron's import paths and names: where they live here, and for those that cannot be had what to use.

`names.csv`: path; names (`*`: every name in the home's `__all__`, or all rows of the home where that is a path of the
table); home, the module that has them; and without a home what to use instead. A row without names is of a whole path
that cannot be had, and of those below it.
"""

from __future__ import annotations

import csv
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

from megatron.core.safe_files import read_text

_LISTED = "docs/megatron_compat.md lists the names of Megatron's that are"


def rows_of(name: str) -> list[dict[str, str]]:
    """Of a table of this package."""
    return list(csv.DictReader(read_text(Path(__file__).with_name(name), max_bytes=1 << 20).splitlines()))


@functools.cache
def table() -> list[dict[str, str]]:
    """A row a name; in place of one that stands for another path's, these. like: the path that has them itself."""
    rows = rows_of("names.csv")
    own = [{**row, "name": name} for row in rows for name in row["names"].split() or [""]]
    return [
        {**one, "path": row["path"], "like": one["path"]}
        for row in own
        for one in [one for one in own if row["name"] == "*" and one["path"] == row["home"]] or [row]
    ]


def look_up(path: str, name: str) -> Any:
    """What Megatron has under this name. Raises AttributeError that says what to use."""
    for row in (row for row in table() if row["path"] == path and row["name"] in (name, "*")):
        if row["instead"]:
            raise AttributeError(f"{path}.{name} is not here: {row['instead']}")
        home = importlib.import_module(row["home"])
        if row["name"] == name or name in home.__all__:
            return getattr(home, name)
    if any(row["path"] == f"{path}.{name}" and row["home"] for row in table()):
        return importlib.import_module(f"{path}.{name}")
    raise AttributeError(f"module {path!r} has no attribute {name!r}: {_LISTED}")


def find_spec(path: str) -> ModuleSpec | None:
    """Of a path, or of a name in one, that is no module here. `importlib.util.find_spec` gets None, an import
    ModuleNotFoundError that says what to use; without `name`, or else `from package import path` would hide it."""
    refused = {
        f"{row['path']}.{row['name']}".rstrip("."): row["instead"] for row in table() if row["instead"]
    }
    why = next((told for one, told in refused.items() if f"{path}.".startswith(one + ".")), None)
    if why is None and any(f"{row['path']}.".startswith(path + ".") for row in table()):
        return ModuleSpec(path, _Loader(), is_package=True)
    if _is_imported() and (why or not path.rpartition(".")[2].startswith("_")):
        raise ModuleNotFoundError(f"{path} is not here: {why or _LISTED}")
    return None


def _is_imported() -> bool:
    """Whether an import asks for a spec, not `importlib.util.find_spec` or another's search, which finders cannot tell.

    An import makes of None an error without our help, and a spec that cannot be loaded would look like a feature that
    is there (`if find_spec("megatron.core.models.hybrid")`). So the modules on the stack tell. If importlib's had other
    names, the help would be lost, no more.
    """
    modules = (frame.f_globals.get("__name__") for frame, _ in traceback.walk_stack(sys._getframe()))
    _, _, searches, asks = [name for name, _ in itertools.islice(itertools.groupby(modules), 4)]
    return searches == "importlib._bootstrap" and asks != "importlib.util"


class _Loader(importlib.abc.Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _TableModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__getattr__"] = functools.partial(look_up, module.__name__)


class _TableModule(ModuleType):
    """Of the table's rows. `distributed.finalize_model_grads` is both a module and the function in it of that name."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, self.__name__.rpartition(".")[2])(*args, **kwargs)
