"""A checkpoint of ours out of any source of weights, in files of whole tensors."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron import __version__
from megatron.core.dist_checkpointing import commit
from megatron.core.dist_checkpointing.catalog import CheckpointKind, directory_name
from megatron.core.dist_checkpointing.files import CheckpointError, write_file
from megatron.core.dist_checkpointing.manifest import (
    MANIFEST_NAME,
    ChunkEntry,
    FileEntry,
    Manifest,
    TensorEntry,
    canonical,
    config_digest,
)
from megatron.core.dist_checkpointing.planning import TORCH_DTYPES, PieceFacts
from megatron.core.dist_checkpointing.safetensors_format import StoredTensor
from megatron.core.dist_checkpointing.source import TensorSource
from megatron.core.rectangles import Dims
from megatron.core.transport.rank_grid import AXES
from megatron.training.config.saved_config import model_config
from tools.conversion.source_reader import SourceReader
from tools.conversion.stream import PlannedFile, Say, in_files, planned_file, write_files

DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def write_checkpoint(
    source: TensorSource,
    save: Path,
    settings: Callable[[], Mapping[str, Any]],
    rows: int,
    facts_of_source: Sequence[Any],
    dtype: str | None,
    max_shard_bytes: int,
    say: Say,
) -> Path:
    """Write iteration 0 of a source's tensors into `save`; its directory.

    settings: our fields of the model and its tokenizer, asked for once all tensors are written. rows: of the padded
    vocabulary. facts_of_source: what tells it from another, so that a killed call goes on where it was. dtype: a key of
    DTYPES; as stored if not given. Raises CheckpointError.
    """
    target = save / directory_name(0)
    if os.path.lexists(target):
        raise CheckpointError(f"{target}: there already: give --save another folder")
    stored = {name: DTYPES[dtype] if dtype else entry.dtype for name, entry in source.tensors.items()}
    facts = {
        f"{name}[{_box_text(entry.shape)}]": PieceFacts(
            name, stored[name], entry.shape, (0,) * len(entry.shape), entry.shape
        )
        for name, entry in source.tensors.items()
    }
    by_file = in_files([one.stored for one in facts.values()], max_shard_bytes)
    files = [
        planned_file(f"shard_{number:05d}.safetensors", sorted(tensors, key=lambda one: one.rank))
        for number, tensors in enumerate(by_file)
    ]
    temporary = save / directory_name(0, CheckpointKind.TEMPORARY, fingerprint(*facts_of_source, dtype))
    with SourceReader(source) as reader:

        def value(one: StoredTensor) -> Tensor:
            return reader.read(facts[one.key].name).to(TORCH_DTYPES[one.dtype])

        entries = write_files(temporary, files, value, say)
    for file in source.files:
        source.verify_file(file)
    manifest = _manifest(model_config(settings(), rows, set(stored.values())), facts, files, entries)
    write_file(temporary / MANIFEST_NAME, [manifest.to_bytes()])
    for note in commit.commit(temporary, save, 0, may_replace=False):
        say(note)
    return target


def _box_text(shape: Dims) -> str:
    return ",".join(f"0:{size}" for size in shape)


def fingerprint(*facts: Any) -> str:
    """Of what a conversion is of: names the folder that it is written in."""
    return hashlib.sha256(canonical([__version__, *facts])).hexdigest()[:16]


def _manifest(
    config: Mapping[str, Any],
    facts: Mapping[str, PieceFacts],
    files: Sequence[PlannedFile],
    entries: Mapping[str, FileEntry],
) -> Manifest:
    tensors = {
        fact.name: TensorEntry(
            fact.dtype,
            fact.global_shape,
            (ChunkEntry(fact.offset, fact.shape, file.name, one.key, begin),),
        )
        for file in files
        for one, begin in zip(file.tensors, file.begins, strict=True)
        for fact in (facts[one.key],)
    }
    common = json.loads(canonical({"config": config, "iteration": 0, "consumed_train_samples": 0}))
    return Manifest(
        iteration=0,
        consumed_train_samples=0,
        world_size=1,
        topology=dict.fromkeys(AXES, 1),
        config_hash=config_digest(common),
        code_version=__version__,
        torch_version=torch.__version__,
        files=dict(entries),
        tensors=tensors,
        common=common,
        per_rank=({},),
    )
