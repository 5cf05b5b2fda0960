"""The configuration in a checkpoint: checked, and what a run takes from it (floor 0).

Every field is of the type that its flag has. --use-checkpoint-args takes the model's shape and its tokenizer; every
load takes the padded vocabulary, which of a checkpoint does not follow the tensor parallel size.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

from megatron.core import schema
from megatron.core.config_base import IDS, value_type
from megatron.core.dist_checkpointing.catalog import Found, checkpoint_config
from megatron.core.dist_checkpointing.files import CheckpointError
from megatron.core.schema import Place, check, integer, or_null
from megatron.training.config.config import FIELDS, Config
from megatron.training.config.flag_table import flag_table
from megatron.training.config.problems import ConfigurationError, Problem
from megatron.training.config.values import convert_loaded

CHECKPOINT = "checkpoint"  # the origin of a value that a checkpoint gave

# What --use-checkpoint-args takes.
CHECKPOINT_FIELDS = (
    "num_layers hidden_size ffn_hidden_size num_attention_heads kv_channels group_query_attention "
    "num_query_groups seq_length max_position_embeddings position_embedding_type rotary_base "
    "rotary_percent rotary_interleaved rotary_seq_len_interpolation_factor use_rope_scaling "
    "rope_scaling_factor untie_embeddings_and_output_weights make_vocab_size_divisible_by "
    "padded_vocab_size normalization norm_epsilon apply_layernorm_1p qk_layernorm swiglu geglu geglu_tanh "
    "embedding_multiplier add_attention_output_bias quick_geglu squared_relu openai_gelu add_bias_linear "
    "add_qkv_bias apply_query_key_layer_scaling tokenizer_type tokenizer_model vocab_file merge_file "
    "vocab_size tiktoken_pattern tiktoken_num_special_tokens tiktoken_special_tokens"
).split()
# Of these, what a flag may still change: training on longer or shorter sequences is legal.
_FLAG_WINS = ("seq_length", "tokenizer_model", "vocab_file", "merge_file")
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


def _schema_of(field: dataclasses.Field[Any]) -> schema.Schema:
    """What a flag's value is in JSON: null while nothing has given it."""
    kind, number = value_type(field.type), integer(low=-schema.MAX_INT)
    kinds = {bool: schema.boolean, int: number, float: schema.number(), str: _text}
    one = schema.one_of(*kind.choices) if kind.choices else kinds[kind.kind]
    return or_null(schema.array(one) if kind.many else one)


SCHEMAS = {name: _schema_of(field) for name, (_, field) in FIELDS.items()}


def check_config(found: Found, config: dict[str, Any]) -> None:
    """Raises CheckpointError naming the field. Names that are no flags here are others' business.

    Sizes that decide how much memory a model takes have to agree with the tensors that are there.
    """
    place = found.place("common.config")
    for name, expected in SCHEMAS.items():
        if name in config:
            check(expected, config[name], place.at(name))
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
            fits = f"a matrix that fits into the {elements} elements stored"
            place.at(names[0]).fail(fits, config[names[0]])
    layers = {int(match[1]) for name in found.manifest.tensors if (match := _LAYER.match(name))}
    if layers and config.get("num_layers") not in (None, max(layers) + 1):
        place.at("num_layers").fail(f"{max(layers) + 1} as in the names of tensors", config["num_layers"])


def saved_config(load: str, ckpt_step: int | None = None) -> dict[str, Any] | None:
    """Of the checkpoint that `--load` and `--ckpt-step` name; None where there is none. Raises CheckpointError."""
    return checkpoint_config(load, ckpt_step, check_config)


def apply_checkpoint_args(
    values: Mapping[str, Any], origin: Mapping[str, str], saved: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """The model's shape from a checkpoint's configuration over what was given: values, origins, warnings.

    Raises ValueError for a saved value that is none.
    """
    values, origin, warnings = dict(values), dict(origin), []
    for name in CHECKPOINT_FIELDS:
        if name not in saved or (name in _FLAG_WINS and name in values):
            continue
        try:
            value = convert_loaded(flag_table()[name], saved[name])
        except ValueError as error:
            raise ValueError(f"{name} {error}") from None
        if name in values and values[name] != value:
            told = f"{name} is {value} as in the checkpoint, not {values[name]}"
            warnings.append(f"--use-checkpoint-args: {told}")
        values[name], origin[name] = value, CHECKPOINT
    return values, origin, warnings


def saved_padded_vocabulary(settings: Mapping[str, Any]) -> int | None:
    """Of the checkpoint that `--load` and `--ckpt-step` of these settings name; None where there is none.

    A checkpoint that cannot be read is told of when it is loaded, with what to do about it.
    """
    if settings.get("load") is None:
        return None
    try:
        saved = saved_config(settings["load"], settings.get("ckpt_step"))
    except CheckpointError:
        return None
    size = None if saved is None else saved.get("padded_vocab_size")
    return size if isinstance(size, int) and IDS.hold(size) else None


def with_saved_vocabulary(config: Config, size: int) -> Config:
    """The configuration with a checkpoint's padded vocabulary, which TP must divide. Raises ConfigurationError."""
    tp = config.parallel.tensor_model_parallel_size
    if size % tp == 0:
        return config.replace(padded_vocab_size=size, origin=CHECKPOINT)
    told = f"the checkpoint in {config.checkpoint.load} has a padded vocabulary of {size}, which "
    told += f"--tensor-model-parallel-size {tp} does not divide"
    flags, fix = (
        ("--load", "--tensor-model-parallel-size"),
        f"choose a tensor parallel size that divides {size}",
    )
    raise ConfigurationError([Problem("vocabulary", flags, told, fix)])


def check_holds_tokenizer(config: Config, vocab_size: int) -> None:
    """Refuse a padded vocabulary with fewer than the tokenizer's `vocab_size` ids. Raises ConfigurationError."""
    padded = config.model.padded_vocab_size
    assert padded is not None, "the padded vocabulary is not known yet"
    if padded >= vocab_size:
        return
    flags, told = "--padded-vocab-size", f"--padded-vocab-size {padded}"
    fix = f"leave it unset, or give at least {vocab_size}"
    if config.origin.get("padded_vocab_size") == CHECKPOINT:
        told = f"the padded vocabulary of {padded} of the checkpoint in {config.checkpoint.load}"
        flags, fix = "--load --tokenizer-type", "use the tokenizer of that run"
    message = f"{told} is smaller than the tokenizer's vocabulary of {vocab_size}"
    raise ConfigurationError([Problem("padded-vocab-size", tuple(flags.split()), message, fix)])
