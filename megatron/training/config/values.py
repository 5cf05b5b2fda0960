"""Words of a command line, or values of a file, turned into a field's value within its bounds (floor 0)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from megatron.core.config_base import arg_info, bounds_of, value_type
from megatron.core.list_expression import parse_list_expression, parse_pair
from megatron.training.config.flag_table import FlagEntry

MAX_WORDS = 1 << 14  # after one flag; longer lists of corpora belong into a file (--data-args-path)
MAX_WORD_BYTES = 4096  # of a path, where the system ends
_MAX_SHOWN = 60
_MAX_BITS = 64


class BoundsError(ValueError):
    """A number beyond its field's bounds. rule: `range` below them, `limit` above. fix: what to give."""

    def __init__(self, rule: str, message: str, fix: str) -> None:
        super().__init__(message)
        self.rule, self.fix = rule, fix


def shown(value: object) -> str:
    """A value as messages show it: no longer than a line."""
    return shortened(repr(value))


def shortened(text: str) -> str:
    """The start of a text that would fill the screen, and how long it is."""
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}... ({len(text)} characters)"


def listed(words: Sequence[str]) -> str:
    """Words as messages show them; of many their number."""
    return " ".join(words) if sum(map(len, words)) <= _MAX_SHOWN and words else f"{len(words) or 'none'}"


def check_bounds(field: dataclasses.Field[Any], value: Any) -> None:
    """Raises BoundsError for a number, or one of several, that is out of its field's bounds."""
    bounds = bounds_of(field)
    for number in value if isinstance(value, tuple) else (value,):
        if bounds is None or number is None or isinstance(number, str) or bounds.hold(number):
            continue
        rule, told, fix = "range", f"at least {bounds.least}", f"give {bounds.least} or more"
        if bounds.below:
            told, fix = f"{told} and below {bounds.most}", f"give a value in [{bounds.least}, {bounds.most})"
        elif number > bounds.most:
            rule, told, fix = "limit", f"at most {bounds.most}", f"give {bounds.most} or less"
        raise BoundsError(rule, f"{shown(value)}: must be {told}", fix)


def convert_words(entry: FlagEntry, words: Sequence[str]) -> Any:
    """The value of a field that the words after its flag spell. Raises ValueError saying what was expected."""
    assert entry.field is not None, f"{entry.spelling} is no field"
    info, kind = arg_info(entry.field), value_type(entry.field.type)
    assert info is not None, f"field {entry.name} is no flag"
    assert kind.kind is not bool, f"field {entry.name} takes no words"
    if not kind.many and len(words) != 1:
        raise ValueError(f"expects one value, got {listed(words)}")
    if kind.many and not words:
        raise ValueError("expects at least one value")
    if isinstance(info.nargs, int) and len(words) != info.nargs:
        raise ValueError(f"expects {info.nargs} values, got {listed(words)}")
    check_words(words)
    values = tuple(info.parse(word) if info.parse is not None else _value(entry, word) for word in words)
    value = values if kind.many else values[0]
    check_bounds(entry.field, value)
    return value


def check_words(words: Sequence[str]) -> None:
    """Raises ValueError for what is no text, and for more of it than any value has."""
    if len(words) > MAX_WORDS:
        raise ValueError(f"expects at most {MAX_WORDS} values, got {len(words)}")
    for word in words:
        try:
            length = len(word.encode())
        except UnicodeEncodeError:
            raise ValueError(f"expects UTF-8 text, got {shown(word)}") from None
        if "\0" in word:
            raise ValueError(f"expects a text without NUL bytes, got {shown(word)}")
        if length > MAX_WORD_BYTES:
            raise ValueError(f"expects at most {MAX_WORD_BYTES} bytes, got {length}: {shown(word)}")


def _value(entry: FlagEntry, word: str) -> Any:
    """What one word says of a field without a parser of its own."""
    assert entry.field is not None
    kind = value_type(entry.field.type)
    if kind.choices:
        if word in kind.choices:
            return word
        if word in entry.elsewhere:
            supported = ", ".join(kind.choices)
            raise ValueError(f"{word} is not supported ({entry.elsewhere_why}); supported: {supported}")
        raise ValueError(f"expects one of {', '.join(kind.choices)}, got {shown(word)}")
    if kind.kind is str:
        if not word:
            raise ValueError("expects a text, got an empty one; leave the flag out")
        return word
    try:
        number = kind.kind(word)
    except ValueError:
        expected = "an integer" if kind.kind is int else "a number"
        raise ValueError(f"expects {expected}, got {shown(word)}") from None
    if kind.kind is float and not math.isfinite(number):
        raise ValueError(f"expects a finite number, got {shown(word)}")
    return number


def convert_loaded(entry: FlagEntry, value: Any) -> Any:
    """A value read from a file: typed already, or a word as on the command line. Raises ValueError."""
    field = entry.field
    assert field is not None, f"{entry.spelling} is no field"
    kind = value_type(field.type)
    if value is None:
        return field.default
    if kind.kind is bool:
        if not isinstance(value, bool):
            raise ValueError(f"expects true or false, got {shown(value)}")
        return value
    if isinstance(value, list) and not kind.many:
        raise ValueError(f"expects one value, got a list of {len(value)}")
    if value == [] and field.default == ():
        return ()
    items = value if isinstance(value, list) else [value]
    for item in items:
        if isinstance(item, bool | dict | list):
            raise ValueError(f"expects {kind.kind.__name__}, got {type(item).__name__}")
        if isinstance(item, int) and item.bit_length() > _MAX_BITS:  # Python might not even print it
            raise ValueError(f"expects a number of at most {_MAX_BITS} bits, got one of {item.bit_length()}")
    words = [str(item) for item in items]
    return convert_words(entry, words[0].split() if kind.many and items is not value else words)


def check_shape(name: str, words: Sequence[str]) -> None:
    """Values of flags that are known but not fields, where their shape can be wrong. Raises ValueError."""
    if name in ("moe_layer_freq", "no_rope_freq", "linear_attention_freq") and words:
        parse_list_expression(words[0])
    if name == "window_size" and words:
        parse_pair(words[0])
