"""Words of a command line or values of a YAML file, turned into a field's value (floor 0)."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from megatron.core.config_base import ValueType, arg_info, value_type
from megatron.core.list_expression import parse_list_expression, parse_pair
from megatron.training.flag_lists import KNOWN_CHOICES


def convert_words(field: dataclasses.Field[Any], words: list[str]) -> Any:
    """The value that the words after a flag spell. Raises ValueError saying what was expected."""
    info, kind = arg_info(field), value_type(field.type)
    assert info is not None, f"field {field.name} is no flag"
    assert kind.kind is not bool, f"field {field.name} takes no words"
    if not kind.many and len(words) != 1:
        raise ValueError(f"expects one value, got {_listed(words)}")
    if kind.many and not words:
        raise ValueError("expects at least one value")
    if isinstance(info.nargs, int) and len(words) != info.nargs:
        raise ValueError(f"expects {info.nargs} values, got {_listed(words)}")
    values = tuple(
        info.parse(word) if info.parse is not None else _word(field.name, kind, word) for word in words
    )
    return values if kind.many else values[0]


def _listed(words: list[str]) -> str:
    return " ".join(words) if words else "none"


def _word(name: str, kind: ValueType, word: str) -> Any:
    if kind.choices:
        return _choice(name, kind.choices, word)
    if kind.kind is int:
        try:
            return int(word)
        except ValueError:
            raise ValueError(f"expects an integer, got {word!r}") from None
    if kind.kind is float:
        try:
            number = float(word)
        except ValueError:
            raise ValueError(f"expects a number, got {word!r}") from None
        if not math.isfinite(number):
            raise ValueError(f"expects a finite number, got {word!r}")
        return number
    return word


def _choice(name: str, choices: tuple[str, ...], word: str) -> str:
    if word in choices:
        return word
    elsewhere = KNOWN_CHOICES.get(name, {}).get(word)
    if elsewhere is not None:
        raise ValueError(f"{word} is not supported ({elsewhere}); supported: {', '.join(choices)}")
    raise ValueError(f"expects one of {', '.join(choices)}, got {word!r}")


def convert_loaded(field: dataclasses.Field[Any], value: Any) -> Any:
    """A value read from a YAML file: typed already, or a word as on the command line. Raises ValueError."""
    kind = value_type(field.type)
    if value is None:
        return field.default
    if kind.kind is bool:
        if not isinstance(value, bool):
            raise ValueError(f"expects true or false, got {value!r}")
        return value
    if isinstance(value, list):
        if not kind.many:
            raise ValueError(f"expects one value, got a list of {len(value)}")
        if not value and field.default == ():
            return ()
    items = value if isinstance(value, list) else str(value).split() if kind.many else [value]
    for item in items:
        if isinstance(item, bool | dict | list):
            raise ValueError(f"expects {kind.kind.__name__}, got {item!r}")
    return convert_words(field, [str(item) for item in items])


def check_shape(name: str, words: list[str]) -> None:
    """Values of flags that are known but not fields, where their shape can be wrong. Raises ValueError."""
    if name in ("moe_layer_freq", "no_rope_freq", "linear_attention_freq") and words:
        parse_list_expression(words[0])
    if name == "window_size" and words:
        parse_pair(words[0])
