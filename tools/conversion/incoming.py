"""A checkpoint of ours out of any source of weights, in files of whole tensors."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from megatron import __version__
from megatron.core.dist_checkpointing import commit
from megatron.core.dist_checkpointing.catalog import (
    TRACKER_NAME,
    CheckpointKind,
    directory_name,
    open_directory,
    read_tracker,
)
from megatron.core.dist_checkpointing.files import CheckpointError, write_file
from megatron.core.dist_checkpointing.manifest import (
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    TensorEntry,
    canonical,
    config_digest,
)
from megatron.core.dist_checkpointing.pieces import PieceFacts
from megatron.core.dist_checkpointing.source import TensorSource
from megatron.core.dist_checkpointing.storage import describe_tensors, shard_name
from megatron.core.safe_files import publish_text
from megatron.core.transport.rank_grid import AXES
from megatron.training.config.saved_config import MODEL_PREFIX, model_config
from tools.conversion.progress import Say
from tools.conversion.source_reader import SourceReader
from tools.conversion.stream import in_files, planned_file, size_of, write_files

DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
NO_STATE: Mapping[str, Any] = MappingProxyType({"iteration": 0, "consumed_train_samples": 0})


def write_checkpoint(
    source: TensorSource,
    save: Path,
    settings: Callable[[], Mapping[str, Any]],
    rows: int,
    facts_of_source: Sequence[Any],
    dtype: str | None,
    max_shard_bytes: int,
    say: Say,
    state: Mapping[str, Any] = NO_STATE,
) -> Path:
    """Write a source's tensors into `save`; its directory.

    settings: our fields of the model and its tokenizer, asked for once all tensors are written. rows: of the padded
    vocabulary. facts_of_source: what tells it from another, so that a killed call goes on where it was. dtype: a key of
    DTYPES; as stored if not given. state: sections of `common`, with the counters. Raises CheckpointError.
    """
    target = save / directory_name(state["iteration"])
    files = [(file, *_last_change(source, file)) for file in source.files]
    mark = fingerprint(*facts_of_source, files, dtype, max_shard_bytes)
    if os.path.lexists(target):
        return _finished(target, mark, say, state["iteration"])
    stored = {name: DTYPES[dtype] if dtype else entry.dtype for name, entry in source.tensors.items()}
    pieces = [
        PieceFacts(name, stored[name], entry.shape, (0,) * len(entry.shape), entry.shape)
        for name, entry in source.tensors.items()
    ]
    by_key = {piece.stored.key: source.tensors[piece.name] for piece in pieces}
    plans = in_files(pieces, lambda piece: size_of(piece.stored), max_shard_bytes)
    planned = [
        planned_file(shard_name(number), sorted((piece.stored for piece in plan), key=lambda one: one.rank))
        for number, plan in enumerate(plans)
    ]
    temporary = save / directory_name(state["iteration"], CheckpointKind.TEMPORARY, mark)
    verify_files(source)
    with SourceReader(source) as reader:
        entries = write_files(temporary, planned, by_key, reader, say)
    with removed_if_refused(temporary):
        verify_files(source)
    weights = {kind for name, kind in stored.items() if name.startswith(MODEL_PREFIX)}
    common = {**state, "config": model_config(settings(), rows, weights), "imported": mark}
    manifest = _manifest(common, describe_tensors(plans), entries)
    write_file(temporary / MANIFEST_NAME, [manifest.to_bytes()])
    for note in commit.commit(temporary, save, state["iteration"], may_replace=False):
        say(note)
    return target


def _last_change(source: TensorSource, file: str) -> tuple[int, int]:
    status = os.stat(source.directory / file)
    return status.st_size, status.st_mtime_ns


def verify_files(source: TensorSource) -> None:
    """All that can be checked of them. Raises CheckpointError."""
    for file in source.files:
        source.verify_file(file)


@contextlib.contextmanager
def removed_if_refused(temporary: Path) -> Iterator[None]:
    """Files that a later call would take for finished go where what they were made of turns out to be wrong."""
    try:
        yield
    except CheckpointError:
        shutil.rmtree(temporary)
        raise


def _finished(target: Path, mark: str, say: Say, iteration: int) -> Path:
    """Where the same call was killed behind the rename. Raises CheckpointError for any other checkpoint."""
    with contextlib.suppress(CheckpointError):
        if open_directory(target, iteration).manifest.common.get("imported") == mark:
            say(f"{target}: finished by an earlier call")
            if read_tracker(target.parent) is None:
                publish_text(target.parent / TRACKER_NAME, str(iteration))
            return target
    raise CheckpointError(f"{target}: there already: give --save another folder")


def fingerprint(*facts: Any) -> str:
    """Of what a conversion is of: names the folder that it is written in."""
    return hashlib.sha256(canonical([__version__, *facts])).hexdigest()[:16]


def _manifest(
    common: Mapping[str, Any], tensors: Mapping[str, TensorEntry], files: Mapping[str, FileEntry]
) -> Manifest:
    common = json.loads(canonical(dict(common)))
    return Manifest(
        iteration=common["iteration"],
        consumed_train_samples=common["consumed_train_samples"],
        world_size=1,
        topology=dict.fromkeys(AXES, 1),
        config_hash=config_digest(common),
        code_version=__version__,
        torch_version=torch.__version__,
        files=files,
        tensors=tensors,
        common=common,
        per_rank=(None,),  # nobody's random generators
    )
