"""What a JSON value has to look like, as a table of its fields (floor 0, pure).

    SCHEDULER = {"samples": integer(), "peak": or_null(number(low=0.0)), "style": one_of("linear", "cosine")}
    check(SCHEDULER, value, Place(path, "common.scheduler"))
    FieldError: manifest.json: field 'common.scheduler.samples': expected an integer from 0 to ..., found -1

A dict is an object with these fields and no others; `optional` marks one that may be absent. Nothing is converted: what
passes is used as it is. Numbers are bounded, texts are short and printable: they end up in arithmetic and in log lines.
"""

from __future__ import annotations

import dataclasses
import re
import reprlib
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

MAX_INT = 1 << 56
MAX_NUMBER = 1e300
MAX_CHARS = 1000
MAX_DEPTH = 32

_shown = reprlib.Repr()
_shown.maxstring = _shown.maxother = _shown.maxlong = 80


class FieldError(ValueError):
    """A field of a file is not what it has to be."""


@dataclasses.dataclass(frozen=True)
class Place:
    """A value's file and the fields that lead to it, for messages. error: what is raised."""

    path: Path
    where: str = ""
    error: type[ValueError] = FieldError

    def at(self, name: str) -> Place:
        """A field of this object."""
        return Place(self.path, f"{self.where}.{name}" if self.where else name, self.error)

    def __getitem__(self, index: int) -> Place:
        return Place(self.path, f"{self.where}[{index}]", self.error)

    def fail(self, expected: str, found: Any = None, *, found_words: str = "") -> NoReturn:
        """found: the value. found_words: what was found, told instead of shown."""
        shown = found_words[:300] or _shown.repr(found)
        raise self.error(f"{self.path}: field {self.where!r:.200}: expected {expected}, found {shown}")


Check = Callable[[Any, Place], None]
Schema = Check | Mapping[str, Any]


def check(schema: Schema, value: Any, place: Place) -> None:
    """Raises the place's error, naming file and field."""
    if not isinstance(schema, Mapping):
        schema(value, place)
        return
    if not isinstance(value, dict):
        place.fail("an object", value)
    required = {name for name, field in schema.items() if not isinstance(field, optional)}
    missing, unknown = sorted(required - value.keys()), sorted(value.keys() - schema.keys())
    if missing or unknown:
        place.fail(f"the fields {sorted(schema)}", found_words=f"missing {missing}, unknown {unknown}")
    for name, inner in value.items():
        check(schema[name], inner, place.at(name))


@dataclasses.dataclass(frozen=True)
class optional:  # noqa: N801 - reads as the functions beside it
    """A field that may be absent: older files do not have it."""

    schema: Schema

    def __call__(self, value: Any, place: Place) -> None:
        check(self.schema, value, place)


def _rule(expected: str, holds: Callable[[Any], bool]) -> Check:
    def run(value: Any, place: Place) -> None:
        if not holds(value):
            place.fail(expected, value)

    return run


def integer(low: int = 0, high: int = MAX_INT) -> Check:
    return _rule(f"an integer from {low} to {high}", lambda one: _is_number(one, int) and low <= one <= high)


def number(low: float = -MAX_NUMBER, high: float = MAX_NUMBER) -> Check:
    """A finite number."""
    expected = f"a number from {low:g} to {high:g}"
    return _rule(expected, lambda one: _is_number(one, int | float) and low <= one <= high)


def _is_number(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


words = _rule("text", lambda one: isinstance(one, str))  # of any characters and length
boolean = _rule("true or false", lambda one: isinstance(one, bool))


def one_of(*values: Any) -> Check:
    expected = f"one of {list(values)}" if len(values) > 1 else repr(values[0])
    return _rule(expected, lambda one: any(one == value and type(one) is type(value) for value in values))


def text_or(words: Check, schema: Schema) -> Check:
    """Text that passes `words`, or anything else that passes `schema`."""
    return lambda value, place: check(words if isinstance(value, str) else schema, value, place)


def text(pattern: str | None = None, max_chars: int = MAX_CHARS) -> Check:
    """Printable, of bounded length."""
    wanted = re.compile(pattern or ".*", re.DOTALL)

    def run(value: Any, place: Place) -> None:
        if not isinstance(value, str) or not wanted.fullmatch(value):
            place.fail(f"text like {pattern}" if pattern else "text", value)
        if len(value) > max_chars or not value.isprintable():
            place.fail(f"at most {max_chars} printable characters", value)

    return run


def or_null(schema: Schema) -> Check:
    return lambda value, place: None if value is None else check(schema, value, place)


def array(schema: Schema, max_items: int | None = None, what: str = "items") -> Check:
    def run(value: Any, place: Place) -> None:
        if not isinstance(value, list):
            place.fail("an array", value)
        if max_items is not None and len(value) > max_items:
            place.fail(f"at most {max_items} {what}", len(value))
        for index, item in enumerate(value):
            check(schema, item, place[index])

    return run


def mapping(schema: Schema, names: Check | None = None) -> Check:
    """An object whose fields have any names that pass `names`."""
    names = names or text()

    def run(value: Any, place: Place) -> None:
        if not isinstance(value, dict):
            place.fail("an object", value)
        for name, inner in value.items():
            names(name, place)
            check(schema, inner, place.at(name))

    return run


def anything(value: Any, place: Place) -> None:
    """Any JSON that is not nested so deeply that walking it would end the interpreter's stack."""
    level = [value]
    for _ in range(MAX_DEPTH):
        outer = [
            one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)
        ]
        level = [inner for one in outer for inner in one]
        if not level:
            return
    place.fail(f"JSON nested at most {MAX_DEPTH} deep", value)


_BY_TYPE: dict[Any, Check] = {
    int: integer(),
    float: number(),
    bool: boolean,
    str: text(),
    int | None: or_null(integer()),
    float | None: or_null(number()),
}


def fields_of(cls: Any, **own: Schema) -> dict[str, Schema]:
    """The schema of a dataclass of plain values, as `asdict` writes it: by its annotations, or `own` where given.

    Counts are at least 0. What has a default may be absent: files older than the field mean the default.
    """
    types = typing.get_type_hints(cls)
    table: dict[str, Schema] = {}
    for field in dataclasses.fields(cls):
        schema = own.get(field.name) or _BY_TYPE[types[field.name]]
        table[field.name] = schema if field.default is dataclasses.MISSING else optional(schema)
    return table
