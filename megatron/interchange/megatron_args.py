"""Settings of a launch of Megatron-LM's as values of our fields, and back (floor 0, pure)."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron.core.config_base import value_type
from megatron.core.list_expression import parse_list_expression
from megatron.core.transformer.model_config import TransformerConfig

_PATTERN = "moe_layer_freq"  # a number or a list there, the text of one here
# Fields with several values, which are bare there where it is one.
_SEVERAL = {
    field.name
    for field in dataclasses.fields(TransformerConfig)
    if field.name.startswith("moe_") and value_type(field.type).many
}


def as_ours(name: str, value: Any) -> Any:
    """A value of args that are JSON."""
    if name in _SEVERAL:
        return tuple(value) if isinstance(value, list | tuple) else (value,)
    return str(value).replace(" ", "") if name == _PATTERN else value


def as_theirs(name: str, value: Any) -> Any:
    """A value of a resolved configuration."""
    if name in _SEVERAL:
        return value[0] if len(value) == 1 else list(value)
    if name == _PATTERN:
        pattern = parse_list_expression(value)
        return list(pattern) if isinstance(pattern, tuple) and not all(pattern) else _every(pattern)
    return value


def _every(pattern: tuple[int, ...] | int) -> int:
    return 1 if isinstance(pattern, tuple) else pattern
