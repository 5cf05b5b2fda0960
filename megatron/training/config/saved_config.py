"""The configuration in a checkpoint, every field of the type that its flag has (floor 0)."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

from megatron.core.config_base import value_type
from megatron.core.dist_checkpointing.catalog import Found, checkpoint_config
from megatron.core.schema import (
    MAX_INT,
    Check,
    Place,
    Schema,
    array,
    boolean,
    check,
    integer,
    number,
    one_of,
    or_null,
)
from megatron.training.config.config import FIELDS

# Factors of the sizes of matrices that every layer has.
_MATRICES = (
    ("ffn_hidden_size", "hidden_size"),
    ("num_attention_heads", "kv_channels", "hidden_size"),
    ("num_query_groups", "kv_channels", "hidden_size"),
)
_LAYER = re.compile(r"model\.decoder\.layers\.([0-9]{1,6})\.")
EMBEDDING = "model.embedding.word_embeddings.weight"


def _text(value: Any, place: Place) -> None:
    if not isinstance(value, str):
        place.fail("text", value)


_OF: dict[type, Check] = {
    bool: boolean,
    int: integer(low=-MAX_INT),
    float: number(),
    str: _text,
}


def _schema_of(field: dataclasses.Field[Any]) -> Schema:
    """What a flag's value is in JSON: null while nothing has given it."""
    kind = value_type(field.type)
    one = one_of(*kind.choices) if kind.choices else _OF[kind.kind]
    return or_null(array(one) if kind.many else one)


SCHEMAS = {name: _schema_of(field) for name, (_, field) in FIELDS.items()}


def check_config(found: Found, config: dict[str, Any]) -> None:
    """Raises CheckpointError naming the field. Names that are no flags here are others' business.

    Sizes that decide how much memory a model takes have to agree with the tensors that are there.
    """
    place = found.place("common.config")
    for name, schema in SCHEMAS.items():
        if name in config:
            check(schema, config[name], place.at(name))
    embedding = found.manifest.tensors.get(EMBEDDING)
    if embedding is None or len(embedding.shape) != 2:
        return  # a model of the user's own
    for name, size in zip(("padded_vocab_size", "hidden_size"), embedding.shape, strict=True):
        if config.get(name) not in (None, size):
            place.at(name).fail(f"{size} as in the shape of {EMBEDDING}", config[name])
    elements = sum(math.prod(tensor.shape) for tensor in found.manifest.tensors.values())
    for names in _MATRICES:
        for name in names:
            check(or_null(integer(low=1, high=elements)), config.get(name), place.at(name))
        if math.prod(config.get(name) or 1 for name in names) > elements:
            place.at(names[0]).fail(
                f"a matrix that fits into the {elements} elements stored", config[names[0]]
            )
    layers = {int(match[1]) for name in found.manifest.tensors if (match := _LAYER.match(name))}
    if layers and config.get("num_layers") not in (None, max(layers) + 1):
        place.at("num_layers").fail(f"{max(layers) + 1} as in the names of tensors", config["num_layers"])


def saved_config(load: str, ckpt_step: int | None = None) -> dict[str, Any] | None:
    """Of the checkpoint that `--load` and `--ckpt-step` name; None where there is none. Raises CheckpointError."""
    return checkpoint_config(load, ckpt_step, check_config)
