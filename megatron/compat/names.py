"""Megatron's import paths and names: where they live here, and for those that cannot be had what to use.

`names.csv` has a row a name: path, name (`*`: every public name of the home), home (`module` or `module:name`), and
without a home what to use instead. A row without a name is of a whole path that cannot be had. Modules of ours that
have a path of Megatron's ask `look_up` for names that they lack; other paths of the table are made by `find_spec`.
"""

from __future__ import annotations

import csv
import functools
import importlib
import importlib.abc
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from megatron.core.safe_files import read_text

CSV = Path(__file__).with_name("names.csv")
_DOCS = "docs/megatron_compat.md lists the names that there are"


class Row(NamedTuple):
    """Of the table."""

    path: str
    name: str
    home: str
    instead: str


@functools.cache
def table() -> dict[str, list[Row]]:
    """Rows by path; packages above a path stand in it, too."""
    rows = [Row(*row) for row in csv.reader(read_text(CSV, max_bytes=1 << 20, follow=True).splitlines())][1:]
    paths: dict[str, list[Row]] = {}
    for row in rows:
        path = row.path
        while path and path not in paths:
            paths[path] = []
            path = path.rpartition(".")[0]
        paths[row.path].append(row)
    return paths


def look_up(path: str, name: str) -> Any:
    """What Megatron has under this name. Raises ImportError that says what to use; AttributeError for private names."""
    rows = table().get(path, [])
    if home := next((row.home for row in rows if row.name == name and row.home), ""):
        return _at(home)
    if name.startswith("_"):
        raise AttributeError(f"module {path!r} has no attribute {name!r}")
    below, package = f"{path}.{name}", importlib.import_module(path)
    if below in table() or (hasattr(package, "__path__") and PathFinder.find_spec(below, package.__path__)):
        return importlib.import_module(below)
    for home in (importlib.import_module(row.home) for row in rows if row.name == "*"):
        if name in home.__all__:
            return getattr(home, name)
    why = next((row.instead for row in rows if row.name == name), _DOCS)
    raise ImportError(f"cannot import name {name!r} from {path!r}: it is not here; {why}", name=below)


def _at(home: str) -> Any:
    module, _, attribute = home.partition(":")
    found = importlib.import_module(module)
    return getattr(found, attribute) if attribute else found


def find_spec(path: str) -> ModuleSpec | None:
    """Of a path that is no module here; None for one that the table does not know. Raises ModuleNotFoundError for one
    that cannot be had."""
    refused = next((row for above in _above(path) for row in table().get(above, []) if not row.name), None)
    if refused is not None:
        raise ModuleNotFoundError(f"{path} is not here: {refused.instead}", name=path)
    return ModuleSpec(path, _Loader(), is_package=True) if path in table() else None


def _above(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[: end + 1]) for end in range(len(parts))]


class _Loader(importlib.abc.Loader):
    """Makes a module of the table's rows."""

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__getattr__"] = functools.partial(look_up, module.__name__)
