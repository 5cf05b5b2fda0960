"""Flags of scripts, as rows of their --help."""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import Field
from typing import Any

from megatron.command import program
from megatron.core.config_base import arg_info, bounds_of, flag_names, value_type
from tools.commands import as_called

_ROW = re.compile(r"(\S+)(?: ([A-Z,]+)(\.\.\.)?(?:=(.*))?)?")
_KINDS = {"N": int, "X": float}


def script_parser(script: str, about: str | None, **settings: Any) -> argparse.ArgumentParser:
    """script: its file. about: its docstring. settings: argparse's."""
    return argparse.ArgumentParser(
        prog=program(script),
        description=as_called(about or ""),
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        **settings,
    )


def add_flags(to: argparse._ActionsContainer, flags: Mapping[str, str], **settings: Any) -> None:
    """flags: rows like `--limit N`, and what each means. `--limit N=8`: 8 by default; `--text FILE...`: several words;
    `--json`: a switch. An N is an integer, an X a number, anything else a text. settings: argparse's, of all rows,
    which count instead."""
    for row, told in flags.items():
        match = _ROW.fullmatch(row)
        assert match is not None, f"{row!r} is no row of flags"
        flag, metavar, several, default = match.groups()
        if metavar is None:
            to.add_argument(flag, action="store_true", help=told)
            continue
        own: dict[str, Any] = {
            "metavar": metavar,
            "type": _KINDS.get(metavar, str),
            "nargs": several and "+",
            "help": told,
        }
        if default is not None:
            own |= {"default": default, "help": f"{told}; default {default}".removeprefix("; ")}
        to.add_argument(flag, **own | settings)


def add_settings(
    to: argparse._ActionsContainer, fields: Iterable[Field[Any]], required: Collection[str] = ()
) -> None:
    """The trainer's flags of these fields; None, or False of switches, where not given. required: names."""
    for field in fields:
        (flag,), kind, info = flag_names(field), value_type(field.type), arg_info(field)
        assert info is not None, f"{field.name} is no flag"
        if kind.kind is bool:
            to.add_argument(flag, action="store_true", help=info.help)
            continue
        words: dict[str, Any] = {"metavar": {int: "N", float: "X"}.get(kind.kind, "WORD")}
        if kind.choices:
            words = {"choices": kind.choices}
        words["nargs"] = "+" if kind.many else None
        to.add_argument(flag, type=kind.kind, required=field.name in required, help=info.help, **words)


def check_bounds(
    parser: argparse.ArgumentParser, args: argparse.Namespace, fields: Iterable[Field[Any]]
) -> None:
    """Numbers that the trainer does not take end the program with status 2."""
    for field in fields:
        bounds, value = bounds_of(field), getattr(args, field.name)
        if bounds is not None and value is not None and not bounds.hold(value):
            (flag,) = flag_names(field)
            parser.error(f"{flag} {value}: must be from {bounds.least} to {bounds.most}")


def too_small(args: argparse.Namespace, least: Mapping[str, int]) -> list[str]:
    """What to say of numbers that are given and less than they may be. least: 0 or 1, by their names in `args`."""
    given = {name: getattr(args, name) for name in least}
    return [
        f"--{name.replace('_', '-')} {value}: must be {'at least 1' if least[name] else '0 or more'}"
        for name, value in given.items()
        if value is not None and value < least[name]
    ]
