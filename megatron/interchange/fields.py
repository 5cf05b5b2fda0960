"""Settings of a Hugging Face config.json as settings of ours, both ways (floor 0, pure).

A setting is a `Field`; the functions here make those that several architectures have. A setting that our model cannot
have is refused by its name in config.json.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from megatron.core.transformer.model_config import TransformerConfig
from megatron.core.words import plain

Json = Mapping[str, Any]
_MISSING = object()
_MOST = 1 << 31


class SettingError(ValueError):
    """A field of config.json that is missing, of another kind, or asks for what the model lacks."""


class Field(NamedTuple):
    """A setting.

    keys: of config.json, that it reads and writes. means: what it is here, for docs/interchange.md. read: our fields,
    out of config.json and of the fields that flags give, which count instead; raises SettingError. write: theirs; what
    they do not say of a model is refused by `Architecture.write`, which reads them again.
    """

    keys: tuple[str, ...]
    means: str
    read: Callable[[Json, Json], dict[str, Any]]
    write: Callable[[TransformerConfig], dict[str, Any]]


def integer_of(json: Json, key: str, default: Any = _MISSING) -> int:
    """An integer of at least 1; 500000.0 is one. Raises SettingError."""
    value = json.get(key, default)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is not int or not 0 < value < _MOST:
        raise _expected(key, f"an integer from 1 to {_MOST - 1}", value)
    return value


def number_of(json: Json, key: str, default: Any = _MISSING) -> float:
    """A finite number of at least 0. Raises SettingError."""
    value = json.get(key, default)
    if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
        raise _expected(key, "a finite number of at least 0", value)
    return float(value)


def truth_of(json: Json, key: str, default: Any = _MISSING) -> bool:
    """Raises SettingError for what is neither true nor false."""
    value = json.get(key, default)
    if not isinstance(value, bool):
        raise _expected(key, "true or false", value)
    return value


def shown(value: Any) -> str:
    """A value of config.json, for a message."""
    return "nothing" if value is _MISSING else f"{value!r:.80}"


def _expected(key: str, what: str, value: Any) -> SettingError:
    return SettingError(f"{key}: expected {what}, found {shown(value)}")


def flag(ours: str) -> str:
    """A field of ours as the docs name it."""
    return f"`--{ours.replace('_', '-')}`"


def integer(key: str, ours: str) -> Field:
    """An integer that has another name there."""
    return Field(
        (key,),
        flag(ours),
        lambda json, given: {ours: integer_of(json, key)},
        lambda c: {key: getattr(c, ours)},
    )


def number(key: str, ours: str, default: float) -> Field:
    """A number that has another name there. default: where config.json leaves it out."""
    return Field(
        (key,),
        f"{flag(ours)}, {plain(default)} where it is left out",
        lambda json, given: {ours: number_of(json, key, default)},
        lambda config: {key: getattr(config, ours)},
    )


def only(key: str, values: tuple[Any, ...], why: str, *, written: bool = True) -> Field:
    """A setting of which the model can have these values alone. values: the first is written, and what is meant where
    config.json leaves it out. why: what the others would need."""

    def read(json: Json, given: Json) -> dict[str, Any]:
        value = json.get(key, values[0])
        if not any(type(value) is type(known) and value == known for known in values):
            raise SettingError(f"{key} {shown(value)}: {why}")
        return {}

    texts = " or ".join(
        {None: "null", True: "true", False: "false"}.get(value, f"{value}") for value in values
    )
    return Field((key,), f"{texts} alone: {why}", read, lambda config: {key: values[0]} if written else {})


def head_dim(default: int | None = None, *, fixed: bool = False) -> Field:
    """default: where config.json leaves it out; None: hidden size / heads. fixed: config.json has no such field."""

    def read(json: Json, given: Json) -> dict[str, Any]:
        split = integer_of(json, "hidden_size") // integer_of(json, "num_attention_heads")
        channels = default or split
        if json.get("head_dim") is not None:
            channels = integer_of(json, "head_dim")
        if fixed and channels != split:
            raise SettingError(f"head_dim {channels}: this architecture has hidden size / heads, {split}")
        return {"kv_channels": channels}

    usual = default or "hidden size / heads"
    means = f"{usual} alone" if fixed else f"{flag('kv_channels')}, {usual} where it is left out"
    return Field(("head_dim",), means, read, lambda c: {} if fixed else {"head_dim": c.kv_channels})


def tied(default: bool) -> Field:
    """Whether the output layer is the word embeddings' matrix. default: of files that leave it out."""
    key, ours = "tie_word_embeddings", "untie_embeddings_and_output_weights"
    return Field(
        (key,),
        f"without {flag(ours)}, {str(default).lower()} where it is left out",
        lambda json, given: {ours: not truth_of(json, key, default)},
        lambda config: {key: not getattr(config, ours)},
    )


def dropout(default: float) -> Field:
    """Two fields of one meaning here, which have to agree unless `--hidden-dropout` is given."""
    keys = ("resid_pdrop", "embd_pdrop")

    def read(json: Json, given: Json) -> dict[str, Any]:
        values = {key: number_of(json, key, default) for key in keys}
        if len(set(values.values())) > 1 and "hidden_dropout" not in given:
            both = ", ".join(f"{key} {value}" for key, value in values.items())
            raise SettingError(f"{both}: one value here, --hidden-dropout: give it")
        return {"hidden_dropout": values[keys[0]]}

    means = f"{flag('hidden_dropout')}, {plain(default)} where it is left out; refused where they differ"
    return Field(keys, means, read, lambda config: dict.fromkeys(keys, config.hidden_dropout))


def _read_groups(json: Json, given: Json) -> dict[str, Any]:
    heads = integer_of(json, "num_attention_heads")
    stated = json.get("num_key_value_heads") is not None
    groups = integer_of(json, "num_key_value_heads") if stated else heads
    if heads % groups:
        raise SettingError(f"num_key_value_heads {groups} does not divide num_attention_heads {heads}")
    return {"group_query_attention": groups != heads, "num_query_groups": groups}


KEY_VALUE_HEADS = Field(
    ("num_key_value_heads",),
    f"{flag('group_query_attention')} {flag('num_query_groups')}, as many as query heads where it is left out or null",
    _read_groups,
    lambda config: {"num_key_value_heads": config.num_query_groups},
)


def _read_bias(json: Json, given: Json) -> dict[str, Any]:
    return dict.fromkeys(
        ("add_qkv_bias", "add_attention_output_bias"), truth_of(json, "attention_bias", False)
    )


ATTENTION_BIAS = Field(
    ("attention_bias",),
    f"{flag('add_qkv_bias')} and {flag('add_attention_output_bias')}",
    _read_bias,
    lambda config: {"attention_bias": config.add_qkv_bias},
)


def _read_vocabulary(json: Json, given: Json) -> dict[str, Any]:
    integer_of(json, "vocab_size")
    return {}


VOCABULARY = Field(
    ("vocab_size",),
    "rows of the word embeddings that take part in loss and text",
    _read_vocabulary,
    lambda config: {},
)


def own_code(class_name: str) -> Field:
    """`auto_map`: files of code beside the weights that make the model where somebody lets them run. Published folders
    name the class that transformers has itself; any other makes another model."""

    def read(json: Json, given: Json) -> dict[str, Any]:
        classes = json.get("auto_map") or {}
        stem = re.sub("ForCausalLM|LMHeadModel", "", class_name)
        names = classes.values() if isinstance(classes, Mapping) else (classes,)
        if not all(str(name).rpartition(".")[2].startswith(stem) for name in names):
            raise SettingError(
                f"auto_map {shown(classes)}: code in the folder makes this model, and none is run here: remove the "
                f"field where the model is transformers' own {class_name}"
            )
        return {}

    means = "classes that transformers has itself: no code of a folder is run; not written"
    return Field(("auto_map",), means, read, lambda config: {})
