"""One frozen dataclass per group of flags; parser, help, YAML keys and docs/flags.md are generated from it.

A group is an ordinary frozen dataclass whose fields are made by `arg`. The field's name is Megatron's
destination name (`args.hidden_size`), its annotation gives the type of the value:

    int, float, str, bool              one value
    int | None, float | None, ...      the same, unset by default
    tuple[int, ...], tuple[str, ...]   several values after the flag
    Literal["a", "b"]                  one of the choices

A boolean flag takes no value: its presence turns the default round (`flags=("--disable-bias-linear",)` on a
field `add_bias_linear` that defaults to True stores False).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class ArgInfo:
    """What `arg` records beside a field's default."""

    help: str
    flags: tuple[str, ...]
    unit: str | None
    nargs: int | str | None
    parse: Callable[[str], Any] | None
    ours: bool


def arg(
    default: Any,
    help: str,
    *,
    flags: tuple[str, ...] = (),
    unit: str | None = None,
    nargs: int | str | None = None,
    parse: Callable[[str], Any] | None = None,
    ours: bool = False,
) -> Any:
    """A field that is also a command-line flag.

    flags: every accepted spelling, the documented one first; empty = `--` + the field's name with dashes.
    unit:  shown in the help and the docs page ("tokens", "samples", "bytes", "s", "iterations").
    nargs: exact count or "+", for tuples; default "+".
    parse: turns one word into the value, where the annotation is not enough (list expressions, sizes).
    ours:  True for a flag that Megatron does not have.
    """
    info = ArgInfo(help=help, flags=flags, unit=unit, nargs=nargs, parse=parse, ours=ours)
    return dataclasses.field(default=default, metadata={"arg": info})


def arg_info(field: dataclasses.Field[Any]) -> ArgInfo | None:
    """The `arg` record of a field, or None for a field that is no flag."""
    info = field.metadata.get("arg")
    assert info is None or isinstance(info, ArgInfo), f"field {field.name}: metadata 'arg' is {info!r}"
    return info


def flag_names(field: dataclasses.Field[Any]) -> tuple[str, ...]:
    """Every spelling of a field's flag, the documented one first."""
    info = arg_info(field)
    assert info is not None, f"field {field.name} is no flag"
    return info.flags or ("--" + field.name.replace("_", "-"),)
