"""One frozen dataclass per group of flags; parser, help, YAML keys and docs/flags.md are generated from it.

A group is an ordinary frozen dataclass whose fields are made by `arg`. The field's name is Megatron's
destination name (`args.hidden_size`), its annotation gives the type of the value:

    int, float, str, bool              one value
    int | None, float | None, ...      the same, unset by default
    tuple[int, ...], tuple[str, ...]   several values after the flag
    Literal["a", "b"]                  one of the choices
    float | Literal["a"] | None        a number or one of these words, read by `parse`
    Annotated[int, Bounds(1, 100)]     a number within these; Ranks, Layers, Rate and others below have names

Numbers have a least and a largest value, COUNT and FLOAT if no other, which every source of values is held to: words,
YAML, JSON, checkpoints, the launcher, and what is derived (`training/config/values.py`).

A boolean flag takes no value: its presence turns the default round (`--no-data-sharding` of a field `data_sharding`
that defaults to True stores False).

Group files do not use `from __future__ import annotations`: the annotations must stay types, not strings.
A field with `required` or `derived` is annotated with the type it has after `resolve`, and is None before.
"""

from __future__ import annotations

import dataclasses
import sys
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any, Literal


@dataclasses.dataclass(frozen=True)
class Bounds:
    """The values from `least` to `most`. below: `most` itself is one too many."""

    least: float
    most: float
    below: bool = False

    def hold(self, value: float) -> bool:
        """Whether they do. NaN is never within."""
        return self.least <= value < self.most or (value == self.most and not self.below)


# [Note: bounds] The largest values are beyond every run that is meant, and within what the arithmetic behind them
# takes: int64 in NumPy, torch and stores, float32 in kernels, lists as long as there are ranks or layers.
COUNT = Bounds(1, 2**40)
RANKS = Bounds(1, 2**18)
LAYERS = Bounds(1, 2**16)
STAGES = Bounds(1, 2**14)
BATCH = Bounds(1, 2**31)
IDS = Bounds(1, 2**30)
THREADS = Bounds(1, 1024)
FLOAT = Bounds(0, (2 - 2**-23) * 2.0**127)  # kernels refuse what float32 cannot hold
FINITE = Bounds(0, sys.float_info.max)

Index = Annotated[int, Bounds(0, 2**40)]  # iterations, samples, intervals, where 0 says never or none
Ranks = Annotated[int, RANKS]  # more than the largest machine has; groups of all ranks are lists
Layers = Annotated[int, LAYERS]  # a stage's layers are a list
Stages = Annotated[int, STAGES]
Batch = Annotated[int, BATCH]
Size = Annotated[int, Bounds(1, 2**20)]  # of one dimension of a tensor
Length = Annotated[int, Bounds(1, 2**24)]  # of a sequence, of the MLP's inner dimension
Ids = Annotated[int, IDS]  # token ids are 32 bits wide, and the vocabulary is padded
Bytes = Annotated[int, Bounds(1, 2**60)]
Threads = Annotated[int, THREADS]  # far more than cores end the process where the system refuses a thread
Finite = Annotated[float, FINITE]  # of what is computed in Python: learning rates
Share = Annotated[float, Bounds(0, 1)]
Rate = Annotated[float, Bounds(0, 1, below=True)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArgInfo:
    """What `arg` records beside a field's default.

    flags: every accepted spelling, the documented one first; empty = `--`, or `--no-` where the default is True, and
           the field's name with dashes.
    unit:  shown in the help and the docs page ("tokens", "samples", "bytes", "s", "iterations").
    nargs: exact count or "+", for tuples; default "+".
    parse: turns one word into the value, where the annotation is not enough (list expressions, sizes).
    ours:  True for a flag that Megatron does not have.
    required: no default that could serve; a rule demands it.
    derived: how `resolve` fills the value when it is unset, in words (the default is then None).
    weights: whether it decides what weights mean, or the setting and its value with which alone it does. A load
             compares it with the checkpoint's, and --use-checkpoint-args takes the checkpoint's.
    from_checkpoint: of a setting that is not compared, when --use-checkpoint-args takes it all the same: always, or
             where it is unset here.
    """

    help: str
    flags: tuple[str, ...] = ()
    unit: str | None = None
    nargs: int | str | None = None
    parse: Callable[[str], Any] | None = None
    ours: bool = False
    required: bool = False
    derived: str | None = None
    weights: bool | tuple[str, str | bool] = False
    from_checkpoint: Literal["always", "unset"] | None = None


def arg(default: Any, help: str, **details: Any) -> Any:
    """A dataclass field that is also a command-line flag. details: as `ArgInfo` names them."""
    return dataclasses.field(default=default, metadata={"arg": ArgInfo(help=help, **details)})


def arg_info(field: dataclasses.Field[Any]) -> ArgInfo | None:
    """The `arg` record of a field, or None for a field that is no flag."""
    info = field.metadata.get("arg")
    assert info is None or isinstance(info, ArgInfo), f"field {field.name}: metadata 'arg' is {info!r}"
    return info


def flag_names(field: dataclasses.Field[Any]) -> tuple[str, ...]:
    """Every spelling of a field's flag, the documented one first."""
    info = arg_info(field)
    assert info is not None, f"field {field.name} is no flag"
    return info.flags or (("--no-" if field.default is True else "--") + field.name.replace("_", "-"),)


def bounds_of(field: dataclasses.Field[Any]) -> Bounds | None:
    """Of a field that holds numbers; None for the others."""
    kind = value_type(field.type)
    return kind.bounds or {int: COUNT, float: FLOAT}.get(kind.kind)


@dataclasses.dataclass(frozen=True)
class ValueType:
    """What one field holds: `kind` of one word, whether several follow, whether it may be unset. bounds: of numbers,
    where they are not those of every int, or float."""

    kind: type
    choices: tuple[str, ...] = ()
    many: bool = False
    optional: bool = False
    bounds: Bounds | None = None


def value_type(annotation: Any) -> ValueType:
    """Read an annotation of the forms listed at the top of this module."""
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        number, bounds = typing.get_args(annotation)
        return ValueType(kind=number, bounds=bounds)
    if origin in (types.UnionType, typing.Union):
        args = typing.get_args(annotation)
        inner = [a for a in args if a is not type(None)]
        kinds = [value_type(a) for a in inner]
        # A number, or words: the number's kind, with the words as its choices.
        assert [k.choices != () for k in kinds] in ([False], [True], [False, True]), (
            f"annotation {annotation!r}"
        )
        return dataclasses.replace(kinds[0], choices=kinds[-1].choices, optional=len(inner) < len(args))
    if origin is typing.Literal:
        return ValueType(kind=str, choices=tuple(typing.get_args(annotation)))
    if origin is tuple:
        item, ellipsis = typing.get_args(annotation)
        assert ellipsis is ..., f"annotation {annotation!r}: write tuple[X, ...]"
        return dataclasses.replace(value_type(item), many=True)
    assert annotation in (int, float, str, bool), f"annotation {annotation!r} is not understood"
    return ValueType(kind=annotation)
