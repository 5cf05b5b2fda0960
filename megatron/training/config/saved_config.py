"""The configuration in a checkpoint: checked, and what a run takes from it (floor 0).

Every field is of the type that its flag has. What decides the meaning of weights is marked at its field (`weights` of
`arg`): a load compares it, and --use-checkpoint-args takes it, with the rest of the model's shape and its tokenizer.
Every load takes the padded vocabulary, which of a checkpoint does not follow the tensor parallel size.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.core import schema
from megatron.core.config_base import IDS, arg_info, bounds_of, flag_names, value_type
from megatron.core.dist_checkpointing.catalog import (
    Found,
    LoadChoice,
    choose,
    config_of,
)
from megatron.core.dist_checkpointing.files import CheckpointError
from megatron.core.schema import check, integer, number, one_of, or_null
from megatron.interchange.foreign import EMBEDDING, Foreign
from megatron.interchange.foreign_checkpoint import opener
from megatron.training.config.config import FIELDS, Config
from megatron.training.config.flag_table import flag_table
from megatron.training.config.problems import ConfigurationError, Problem
from megatron.training.config.resolve import Machine, resolve
from megatron.training.config.training_config import CheckpointConfig
from megatron.training.config.values import convert_loaded

CHECKPOINT = "checkpoint"  # the origin of a value that a checkpoint gave
NOT_HERE = "the model's shape is the checkpoint's, which is not on this machine"
SAME_MODEL = (  # what to do where weights are of another model
    "give the same flags, or --use-checkpoint-args to take them from the checkpoint; to begin a new run of this model "
    "with its weights, --finetune"
)

_MARKS = {name: info for name, (_, field) in FIELDS.items() if (info := arg_info(field)) is not None}
# What a load compares, and what --use-checkpoint-args takes.
WEIGHT_FIELDS = tuple(name for name, info in _MARKS.items() if info.weights)
CHECKPOINT_FIELDS = tuple(name for name, info in _MARKS.items() if info.weights or info.from_checkpoint)
# Factors of the sizes of matrices that every layer has.
_MATRICES = (
    ("ffn_hidden_size", "hidden_size"),
    ("num_attention_heads", "kv_channels", "hidden_size"),
    ("num_query_groups", "kv_channels", "hidden_size"),
)
_PRECISIONS = {"BF16": {"bf16": True}, "F16": {"fp16": True}, "F64": {"fp64": True}}
_LAYER = re.compile(r"model\.decoder\.layers\.([0-9]{1,6})\.")
MODEL_PREFIX, OPTIMIZER_PREFIX = "model.", "optimizer."


def _schema_of(field: dataclasses.Field[Any]) -> schema.Schema:
    """What a flag's value is in JSON, by the type that reads its words: null while nothing has given it."""
    kind, bounds = value_type(field.type), bounds_of(field)
    most = 0 if bounds is None else bounds.most
    # Integers as earlier versions bounded them, at least.
    kinds: dict[type, schema.Schema] = {
        bool: schema.boolean,
        int: integer(-schema.MAX_INT, max(schema.MAX_INT, int(most))),
        float: number(high=most),
        str: schema.words,
    }
    value = kinds[kind.kind]
    if kind.choices:
        words = one_of(*kind.choices)
        value = words if kind.kind is str else schema.text_or(words, value)
    return or_null(schema.array(value) if kind.many else value)


SCHEMAS = {name: _schema_of(field) for name, (_, field) in FIELDS.items()}


def check_config(found: Found, config: dict[str, Any]) -> None:
    """Raises CheckpointError naming the field. Names that are no flags here are others' business.

    Sizes that decide how much memory a model takes have to agree with the tensors that are there.
    """
    place = found.place("common.config")
    for name, expected in SCHEMAS.items():
        if name in config:
            check(expected, config[name], place.at(name))
    embedding = found.tensors.get(EMBEDDING)
    if embedding is None or len(embedding.shape) != 2:
        return  # a model of the user's own
    for name, size in zip(("padded_vocab_size", "hidden_size"), embedding.shape, strict=True):
        if config.get(name) not in (None, size):
            place.at(name).fail(f"{size} as in the shape of {EMBEDDING}", config[name])
    elements = sum(math.prod(tensor.shape) for tensor in found.tensors.values())
    for names in _MATRICES:
        for name in names:
            check(or_null(integer(low=1, high=elements)), config.get(name), place.at(name))
        if math.prod(config.get(name) or 1 for name in names) > elements:
            fits = f"a matrix that fits into the {elements} elements stored"
            place.at(names[0]).fail(fits, config[names[0]])
    layers = {int(match[1]) for name in found.tensors if (match := _LAYER.match(name))}
    if layers and config.get("num_layers") not in (None, max(layers) + 1):
        place.at("num_layers").fail(f"{max(layers) + 1} as in the names of tensors", config["num_layers"])


def to_be_loaded(settings: Mapping[str, Any]) -> LoadChoice:
    """What `--load` and `--ckpt-step` of these settings name, of any format that is read. Raises CheckpointError."""
    return choose(Path(settings["load"]), settings.get("ckpt_step"), opener(settings))


def saved_config(
    load: str, ckpt_step: int | None = None, settings: Mapping[str, Any] | None = None
) -> dict[str, Any] | None:
    """Of the checkpoint that `--load` and `--ckpt-step` name; None where there is none. settings: of the run. Raises
    CheckpointError."""
    found = to_be_loaded({**(settings or {}), "load": load, "ckpt_step": ckpt_step}).found
    return None if found is None else config_of(found, check_config)


# Settings of Megatron-LM that make another model of the same tensors.
_OTHER_MODEL = (
    "window_size softmax_type softmax_scale qk_l2_norm apply_residual_connection_post_layernorm glu_linear_offset "
    "activation_func_clamp_value use_mup no_rope_freq experimental_attention_variant"
).split()


def check_expressible(found: Found) -> None:
    """Refuse a checkpoint whose weights mean a model that this trainer does not have. Raises CheckpointError."""
    args, wrong = found.args if isinstance(found, Foreign) else {}, []
    for name in _OTHER_MODEL:
        value, entry = args.get(name), flag_table()[name]
        if value not in (None, False) and not entry.asks_for_nothing((str(value).replace(" ", ""),)):
            wrong.append(f"{entry.spelling} {value!r:.80}")
    if wrong:
        raise CheckpointError(
            f"{found.described_in}: its args say {', '.join(wrong)}: models with it cannot be expressed, see "
            "docs/roadmap.md, 'model variants'"
        )


def whole_config(found: Found) -> dict[str, Any]:
    """The flat configuration of a run of a checkpoint's model: the saved one; else what the folder says of the model,
    in the precision of its weights. Raises CheckpointError."""
    check_expressible(found)
    config = config_of(found, check_config)
    if not isinstance(found, Foreign):
        return config
    dtypes = {one.dtype for name, one in found.tensors.items() if name.startswith(MODEL_PREFIX)}
    return model_config(config, found.tensors[EMBEDDING].shape[0], dtypes)


def model_config(stated: Mapping[str, Any], rows: int, dtypes: Collection[str]) -> dict[str, Any]:
    """The flat configuration of a run of a model of another format. stated: our fields of it and of its tokenizer.
    rows: of its vocabulary. dtypes: of its tensors; several are computed with as fp32."""
    precision = _PRECISIONS.get("".join(dtypes), {})
    tokenizer = (
        {} if "tokenizer_type" in stated else {"tokenizer_type": "NullTokenizer", "vocab_size": rows - 1}
    )
    values = {"seq_length": stated["max_position_embeddings"], **tokenizer, **stated, **precision}
    values |= {"padded_vocab_size": rows, "make_vocab_size_divisible_by": 1, "micro_batch_size": 1}
    return resolve(values, dict.fromkeys(values, CHECKPOINT), Machine()).flat()


def apply_checkpoint_args(
    values: Mapping[str, Any], origin: Mapping[str, str], saved: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """The model's shape from a checkpoint's configuration over what was given: values, origins, warnings. A
    configuration that is not of a whole run (a config.json) is taken whole, where nothing else is given.

    Raises ValueError for a saved value that is none.
    """
    values, origin, warnings = dict(values), dict(origin), []
    for name in CHECKPOINT_FIELDS if "micro_batch_size" in saved else saved:
        forced = name in CHECKPOINT_FIELDS and _MARKS[name].from_checkpoint != "unset"
        if name not in saved or (name in values and not forced):
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


def is_elsewhere(load: str | None) -> bool:
    """Whether `--load` names what is not on this machine."""
    return load is not None and not os.path.exists(load)


def shape_elsewhere(checkpoint: CheckpointConfig) -> bool:
    """Whether the model's shape and tokenizer are those of a checkpoint that is not on this machine."""
    return checkpoint.use_checkpoint_args and is_elsewhere(checkpoint.load)


def may_be_overruled(flags: Sequence[str], given: Collection[str]) -> bool:
    """Whether what is wrong with these flags may be right once --use-checkpoint-args has taken the checkpoint's values.
    given: settings with a value here."""
    taken = {flag: _MARKS[name] for name in CHECKPOINT_FIELDS for flag in flag_names(FIELDS[name][1])}
    stay = {flag_names(FIELDS[name][1])[0] for name in given if name in FIELDS}
    always = (taken[flag].from_checkpoint != "unset" for flag in flags if flag in taken)
    return any(always) or all(flag in taken and flag not in stay for flag in flags)


def weight_differences(saved: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """The settings that decide what weights mean and are not those of a checkpoint, each with both values.

    saved: its configuration. here: this run's, flat. What one of them does not name is not compared, but for settings
    of ours, which came later: what does not name them is of a model without. What balances experts is no part of a
    model, but for sinkhorn, which weighs them by other scores (`routing.by_sinkhorn`).
    """
    saved = {name: FIELDS[name][1].default for name in WEIGHT_FIELDS if _MARKS[name].ours} | dict(saved)
    compared = (name for name in WEIGHT_FIELDS if name in saved and name in here)
    name = "moe_router_load_balancing_type"
    balancing: list[Any] = [one.get(name) for one in (saved, here) if one.get("num_experts")]
    if len({"sinkhorn" in words for words in balancing if words}) == 2:
        before, now = map(list, balancing)
        others = [f"{name}: checkpoint {before}, this run {now}"]
    else:
        others = []
    return others + [
        f"{name}: checkpoint {before!r}, this run {now!r}"
        for name in compared
        if _decides(name, saved) and _decides(name, here)
        if (before := _plain(name, saved)) != (now := _plain(name, here))
    ]


def other_model(found: Found, here: Mapping[str, Any]) -> str:
    """`weight_differences` of a checkpoint in one text, empty where there are none. Raises CheckpointError."""
    saved = config_of(found, check_config) if "config" in found.manifest.common else {}
    return "; ".join(weight_differences(saved, here))


def _decides(name: str, config: Mapping[str, Any]) -> bool:
    """Whether a setting decides what weights mean, beside the others of its configuration."""
    mark = _MARKS[name].weights
    if isinstance(mark, bool):
        return mark
    other, value = mark
    return config.get(other) == value and _decides(other, config)


def _plain(name: str, config: Mapping[str, Any]) -> Any:
    """A value as JSON has it; what is unset in older checkpoints is the default."""
    value = FIELDS[name][1].default if config[name] is None else config[name]
    return list(value) if isinstance(value, tuple) else value


def saved_padded_vocabulary(settings: Mapping[str, Any]) -> int | None:
    """Of the checkpoint that `--load` and `--ckpt-step` of these settings name; None where there is none.

    A checkpoint that cannot be read is told of when it is loaded, with what to do about it.
    """
    if settings.get("load") is None:
        return None
    try:
        saved = saved_config(settings["load"], settings.get("ckpt_step"), settings)
    except CheckpointError:
        return None
    size = None if saved is None else saved.get("padded_vocab_size")
    return size if isinstance(size, int) and IDS.hold(size) else None


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
