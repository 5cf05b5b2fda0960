"""A checkpoint of Megatron-LM as one of ours."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.files import CheckpointError
from megatron.core.safe_files import read_bytes
from megatron.core.transformer.model_config import TransformerConfig
from megatron.interchange.megatron_folder import METADATA, MegatronSource, open_torch_dist
from megatron.interchange.megatron_ranks import open_torch
from megatron.training.config.config import FIELDS
from tools.conversion.incoming import write_checkpoint
from tools.conversion.progress import Say

TRACKER = "latest_checkpointed_iteration.txt"
WORDS = "model.embedding.word_embeddings.weight"
_TOKENIZER = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file", "vocab_size")
_NEEDED = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")


def open_checkpoint(folder: Path) -> MegatronSource:
    """The newest checkpoint of a folder of Megatron-LM's, or the one that the folder is. Raises CheckpointError."""
    directory = folder
    if (folder / TRACKER).is_file():
        named = read_bytes(folder / TRACKER, max_bytes=64).decode("ascii", "replace").strip()
        if not re.fullmatch(r"release|[0-9]{1,12}", named):
            raise CheckpointError(
                f"{folder / TRACKER}: expected an iteration or 'release', found {named!r:.80}"
            )
        directory = folder / (named if named == "release" else f"iter_{int(named):07d}")
    return open_torch_dist(directory) if (directory / METADATA).exists() else open_torch(directory)


def import_folder(folder: Path, save: Path, *, dtype: str | None, max_shard_bytes: int, say: Say) -> Path:
    """Write iteration 0 of the model into `save`; its directory. The optimizer is left. Raises CheckpointError."""
    source = open_checkpoint(folder)
    names = {field.name for field in dataclasses.fields(TransformerConfig)} | set(_TOKENIZER)
    flags: dict[str, Any] = {
        name: value
        for name, value in source.args.items()
        if name in names & FIELDS.keys() and value is not None
    }
    if missing := [name for name in _NEEDED if name not in flags]:
        raise CheckpointError(f"{source.described_in}: its args say nothing of {', '.join(missing)}")
    if WORDS not in source.tensors:
        raise CheckpointError(f"{source.described_in}: no {WORDS.removeprefix('model.')}")
    rows = source.tensors[WORDS].shape[0]
    tensors = {name: [entry.dtype, *entry.shape] for name, entry in source.tensors.items()}
    facts = [str(source.directory), source.iteration, tensors]
    return write_checkpoint(source, save, lambda: flags, rows, facts, dtype, max_shard_bytes, say)
