"""Settings of a Hugging Face config.json as settings of ours, both ways (floor 0, pure).

A kind of field is a class: `read` turns what config.json says into fields of `TransformerConfig`, `write` the other
way. A setting that our model cannot have is refused by its name in config.json.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Protocol

from megatron.core.transformer.model_config import TransformerConfig

Json = Mapping[str, Any]
_MISSING = object()


class SettingError(ValueError):
    """A field of config.json that is missing, of another kind, or asks for what the model lacks."""


class Field(Protocol):
    """A setting. theirs: the keys of config.json that it reads and writes."""

    @property
    def theirs(self) -> tuple[str, ...]: ...

    def read(self, json: Json, given: Mapping[str, Any]) -> dict[str, Any]:
        """Our fields. given: those that the user has given by flags, which count instead. Raises SettingError."""

    def write(self, config: TransformerConfig, vocab_size: int) -> dict[str, Any]:
        """Their fields. Raises SettingError where config.json cannot say it."""


def integer(json: Json, key: str, default: Any = _MISSING) -> int:
    """An integer of at least 1; 500000.0 is one. Raises SettingError."""
    value = json.get(key, default)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SettingError(f"{key}: expected an integer of at least 1, found {shown(value)}")
    return value


def number(json: Json, key: str, default: Any = _MISSING) -> float:
    """A finite number of at least 0. Raises SettingError."""
    value = json.get(key, default)
    right = isinstance(value, int | float) and not isinstance(value, bool)
    if not right or not math.isfinite(value) or value < 0:
        raise SettingError(f"{key}: expected a finite number of at least 0, found {shown(value)}")
    return float(value)


def truth(json: Json, key: str, default: Any = _MISSING) -> bool:
    """Raises SettingError for what is neither true nor false."""
    value = json.get(key, default)
    if not isinstance(value, bool):
        raise SettingError(f"{key}: expected true or false, found {shown(value)}")
    return value


def shown(value: Any) -> str:
    """A value of config.json, for a message."""
    return "nothing" if value is _MISSING else f"{value!r:.80}"


@dataclasses.dataclass(frozen=True)
class Size:
    """An integer that has another name there. default: where config.json leaves it out, or says null."""

    key: str
    ours: str
    default: int | None = None

    @property
    def theirs(self) -> tuple[str, ...]:
        return (self.key,)

    def read(self, json: Json, given: Mapping[str, Any]) -> dict[str, Any]:
        if json.get(self.key) is None and self.default is not None:
            return {self.ours: self.default}
        return {self.ours: integer(json, self.key)}

    def write(self, config: TransformerConfig, vocab_size: int) -> dict[str, Any]:
        return {self.key: getattr(config, self.ours)}


@dataclasses.dataclass(frozen=True)
class Number:
    """A number that has another name there."""

    key: str
    ours: str
    default: float

    @property
    def theirs(self) -> tuple[str, ...]:
        return (self.key,)

    def read(self, json: Json, given: Mapping[str, Any]) -> dict[str, Any]:
        return {self.ours: number(json, self.key, self.default)}

    def write(self, config: TransformerConfig, vocab_size: int) -> dict[str, Any]:
        return {self.key: getattr(config, self.ours)}


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """Rows of the word embeddings without padding."""

    theirs = ("vocab_size",)

    def read(self, json: Json, given: Mapping[str, Any]) -> dict[str, Any]:
        integer(json, "vocab_size")
        return {}

    def write(self, config: TransformerConfig, vocab_size: int) -> dict[str, Any]:
        return {"vocab_size": vocab_size}


@dataclasses.dataclass(frozen=True)
class Inner:
    """The MLP's width. factor: of the hidden size, where config.json says null."""

    key: str
    factor: int | None = None

    @property
    def theirs(self) -> tuple[str, ...]:
        return (self.key,)

    def read(self, json: Json, given: Mapping[str, Any]) -> dict[str, Any]:
        if json.get(self.key) is None and self.factor is not None:
            return {"ffn_hidden_size": self.factor * integer(json, "n_embd")}
        return {"ffn_hidden_size": integer(json, self.key)}

    def write(self, config: TransformerConfig, vocab_size: int) -> dict[str, Any]:
        usual = self.factor is not None and config.ffn_hidden_size == self.factor * config.hidden_size
        return {self.key: None if usual else config.ffn_hidden_size}


@dataclasses.dataclass(frozen=True)
class KeyValueHeads:
    """Absent or null: as many as query heads."""

    theirs = ("num_key_value_heads",)

    def read(self, json: Json, given: Mapping[str, Any]) -> dict[str, Any]:
        heads = integer(json, "num_attention_heads")
        groups = heads if json.get("num_key_value_heads") is None else integer(json, "num_key_value_heads")
        if heads % groups:
            raise SettingError(f"num_key_value_heads {groups} does not divide num_attention_heads {heads}")
        return {"group_query_attention": groups != heads, "num_query_groups": groups}

    def write(self, config: TransformerConfig, vocab_size: int) -> dict[str, Any]:
        return {"num_key_value_heads": config.num_query_groups}


@dataclasses.dataclass(frozen=True)
class HeadDim:
    """default: where config.json leaves it out; None: hidden size / heads. fixed: config.json has no such field."""

    default: int | None = None
    fixed: bool = False
    theirs = ("head_dim",)

    def read(self, json: Json, given: Mapping[str, Any]) -> dict[str, Any]:
        split = integer(json, "hidden_size") // integer(json, "num_attention_heads")
        stated = json.get("head_dim") is not None
        channels = integer(json, "head_dim") if stated else self.default or split
        if self.fixed and channels != split:
            raise SettingError(f"head_dim {channels}: this architecture has hidden_size / heads, {split}")
        return {"kv_channels": channels}

    def write(self, config: TransformerConfig, vocab_size: int) -> dict[str, Any]:
        split = config.hidden_size // config.num_attention_heads
        if self.fixed and config.kv_channels != split:
            raise SettingError(
                f"--kv-channels {config.kv_channels}: this architecture has h / heads, {split}"
            )
        return {} if self.fixed else {"head_dim": config.kv_channels}


@dataclasses.dataclass(frozen=True)
class Tied:
    """Whether the output layer is the word embeddings' matrix. default: of files that leave it out."""

    default: bool
    theirs = ("tie_word_embeddings",)

    def read(self, json: Json, given: Mapping[str, Any]) -> dict[str, Any]:
        return {"untie_embeddings_and_output_weights": not truth(json, "tie_word_embeddings", self.default)}

    def write(self, config: TransformerConfig, vocab_size: int) -> dict[str, Any]:
        return {"tie_word_embeddings": not config.untie_embeddings_and_output_weights}


@dataclasses.dataclass(frozen=True)
class Only:
    """A setting of which the model can have these values alone. values: the first is written, and what is meant where
    config.json leaves it out. why: what the others would need."""

    key: str
    values: tuple[Any, ...]
    why: str
    written: bool = True

    @property
    def theirs(self) -> tuple[str, ...]:
        return (self.key,)

    def read(self, json: Json, given: Mapping[str, Any]) -> dict[str, Any]:
        value = json.get(self.key, self.values[0])
        if not any(type(value) is type(one) and value == one for one in self.values):
            raise SettingError(f"{self.key} {shown(value)}: {self.why}")
        return {}

    def write(self, config: TransformerConfig, vocab_size: int) -> dict[str, Any]:
        return {self.key: self.values[0]} if self.written else {}


@dataclasses.dataclass(frozen=True)
class Dropout:
    """keys: fields of one meaning here, which have to agree unless `--hidden-dropout` is given."""

    keys: tuple[str, ...]
    default: float = 0.0

    @property
    def theirs(self) -> tuple[str, ...]:
        return self.keys

    def read(self, json: Json, given: Mapping[str, Any]) -> dict[str, Any]:
        values = {key: number(json, key, self.default) for key in self.keys}
        if len(set(values.values())) > 1 and "hidden_dropout" not in given:
            told = ", ".join(f"{key} {value}" for key, value in values.items())
            raise SettingError(f"{told}: one value here, --hidden-dropout: give it")
        return {"hidden_dropout": values[self.keys[0]]}

    def write(self, config: TransformerConfig, vocab_size: int) -> dict[str, Any]:
        return dict.fromkeys(self.keys, config.hidden_dropout)


@dataclasses.dataclass(frozen=True)
class NoDropout:
    """An architecture without dropout on residual branches: written models get none, whatever they trained with."""

    theirs = ()

    def read(self, json: Json, given: Mapping[str, Any]) -> dict[str, Any]:
        return {"hidden_dropout": 0.0}

    def write(self, config: TransformerConfig, vocab_size: int) -> dict[str, Any]:
        return {}


@dataclasses.dataclass(frozen=True)
class AttentionBias:
    """`attention_bias` of Llama: of queries, keys, values and the output projection."""

    theirs = ("attention_bias",)

    def read(self, json: Json, given: Mapping[str, Any]) -> dict[str, Any]:
        has = truth(json, "attention_bias", False)
        return {"add_qkv_bias": has, "add_attention_output_bias": has}

    def write(self, config: TransformerConfig, vocab_size: int) -> dict[str, Any]:
        if config.add_qkv_bias != config.add_attention_output_bias:
            raise SettingError(
                "attention_bias: --add-qkv-bias needs --add-attention-output-bias in this architecture"
            )
        return {"attention_bias": config.add_qkv_bias}
