"""A folder of Hugging Face or Megatron-LM as a checkpoint that a run's --load and the tools take (floor 0)."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core.config_base import arg_info
from megatron.core.dist_checkpointing.catalog import (
    TRACKER_NAME,
    OpenOther,
    candidates,
    directory_name,
    list_entries,
)
from megatron.core.dist_checkpointing.files import CheckpointError
from megatron.core.dist_checkpointing.foreign import MEGATRON, recognise
from megatron.core.safe_files import read_bytes
from megatron.core.tokenizers.tokenizer_config import TokenizerConfig
from megatron.core.transformer.model_config import TransformerConfig
from megatron.interchange.foreign import EMBEDDING, Foreign
from megatron.interchange.hf_folder import open_folder
from megatron.interchange.megatron_args import as_ours
from megatron.interchange.megatron_folder import METADATA, MegatronSource, open_torch_dist
from megatron.interchange.megatron_ranks import open_torch

# Settings of a run that decide how a config.json is read.
HEEDED = ("max_position_embeddings", "hidden_dropout")
_MODEL = {field.name for field in dataclasses.fields(TransformerConfig)}
_TAKEN = {
    field.name
    for group in (TransformerConfig, TokenizerConfig)
    for field in dataclasses.fields(group)
    if (info := arg_info(field)) is not None and (info.weights or info.from_checkpoint)
}
_NEEDED = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")


def opener(settings: Mapping[str, Any], *, rows: int | None = None) -> OpenOther:
    """For `catalog.choose`: what reads these formats. settings: a run's, which need not be complete.

    rows: of the run's vocabulary, where it may have more than the folder's.
    """
    return functools.partial(_open, settings, rows)


def _open(settings: Mapping[str, Any], rows: int | None, root: Path, ckpt_step: int | None) -> Foreign | None:
    """None for a folder of a format that is not read. Raises CheckpointError."""
    what = recognise(root) if root.is_dir() else None
    if what is None or not what.form.read_as:
        return None
    if what.form.read_as == MEGATRON:
        weights_alone = bool(settings.get("finetune") or settings.get("no_load_optim"))
        return open_megatron(root, ckpt_step, optimizer=not weights_alone)
    if what.directory:
        raise CheckpointError(f"{root}: {what} is below it: give --load {root / what.directory}")
    if ckpt_step is not None:
        raise CheckpointError(f"{root}: {what} has no iterations: leave --ckpt-step {ckpt_step} out")
    return open_folder(root, heeded(settings), rows or 0)


def heeded(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Of a run's settings, those that a config.json is read with."""
    return {name: settings[name] for name in HEEDED if settings.get(name) is not None}


def open_megatron(root: Path, ckpt_step: int | None = None, *, optimizer: bool = False) -> Foreign:
    """The checkpoint that the tracker of a folder of Megatron-LM's names, without one the newest; or the one that the
    folder is. optimizer: its states too, where there are any. Raises CheckpointError."""
    there = candidates(list_entries(root))
    newest = there.get(max(there, default=0), root / "release" if (root / "release").is_dir() else root)
    directory = newest if ckpt_step is None else root / directory_name(ckpt_step)
    if ckpt_step is None and (root / TRACKER_NAME).is_file():
        named = read_bytes(root / TRACKER_NAME, max_bytes=64).decode("ascii", "replace").strip()
        if not re.fullmatch(r"release|[0-9]{1,12}", named):
            raise CheckpointError(
                f"{root / TRACKER_NAME}: expected an iteration or 'release', found {named!r:.80}"
            )
        directory = root / (named if named == "release" else directory_name(int(named)))
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: missing, of the checkpoints in {root}")
    open_format = open_torch_dist if (directory / METADATA).exists() else open_torch
    return _as_checkpoint(open_format(directory, optimizer=optimizer))


def _megatron_settings(source: MegatronSource) -> dict[str, Any]:
    """Our fields of model and tokenizer in the args of a checkpoint. Raises CheckpointError."""
    stated = {
        name: as_ours(name, one) for name, one in source.args.items() if name in _TAKEN and one is not None
    }
    if missing := [name for name in _NEEDED if name not in stated]:
        raise CheckpointError(f"{source.described_in}: its args say nothing of {', '.join(missing)}")
    if EMBEDDING not in source.tensors:
        raise CheckpointError(f"{source.described_in}: no {EMBEDDING.removeprefix('model.')}")
    model = {name: one for name, one in stated.items() if name in _MODEL}
    sizes = {name: _count(source, name) for name in (*_NEEDED, "num_query_groups") if name in stated}
    resolved = vars(TransformerConfig(**{**model, **sizes}).resolved())
    derived = {name: resolved[name] for name in ("ffn_hidden_size", "kv_channels", "num_query_groups")}
    return {**stated, **derived, "padded_vocab_size": source.tensors[EMBEDDING].shape[0]}


def _count(source: MegatronSource, name: str, default: int = 0) -> int:
    """A number that args have. Raises CheckpointError."""
    value = source.args.get(name, default)
    if type(value) is not int or not 0 <= value < 1 << 40:
        raise CheckpointError(f"{source.described_in}: its args say {name} {value!r:.80}")
    return value


def _as_checkpoint(source: MegatronSource) -> Foreign:
    samples = source.iteration * _count(source, "global_batch_size")
    counters = {
        "iteration": source.iteration,
        "consumed_train_samples": _count(source, "consumed_train_samples", samples),
    }
    state = {
        **counters,
        "consumed_valid_samples": _count(source, "consumed_valid_samples"),
        "skipped_train_samples": _count(source, "skipped_train_samples"),
        "num_floating_point_operations_so_far": 0.0,
    }
    run = {"train_state": state, "nan_policy": {"consecutive_skips": 0}, "config": _megatron_settings(source)}
    common = {**counters, **source.state, **run}
    return Foreign.of(
        source.described_in, source.tensors, common, directory=source.directory, args=source.args
    )
