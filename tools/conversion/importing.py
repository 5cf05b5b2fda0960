"""A checkpoint of another format as one of ours, in files of whole tensors."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron import __version__
from megatron.core.dist_checkpointing import commit
from megatron.core.dist_checkpointing.catalog import (
    TRACKER_NAME,
    CheckpointKind,
    config_of,
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
from megatron.core.dist_checkpointing.shard_files import PieceFacts, describe_tensors, lay_out, shard_name
from megatron.core.safe_files import publish_text
from megatron.core.transport.rank_grid import AXES
from megatron.interchange.architecture import InterchangeError
from megatron.interchange.foreign import EMBEDDING, Foreign
from megatron.interchange.tokenizer_files import tokenizer_flags
from megatron.training.config.saved_config import (
    MODEL_PREFIX,
    OPTIMIZER_PREFIX,
    check_config,
    check_expressible,
    model_config,
)
from tools.conversion.progress import Say
from tools.conversion.source_reader import fingerprint, reading, verify
from tools.conversion.stream import OutputFile, in_files, num_bytes_of, safetensors_parts, write_files
from tools.conversion.tokenizer_copy import BESIDE, copy_tokenizer, tokenizer_files
from tools.conversion.values import DTYPES

if TYPE_CHECKING:  # it brings torch
    from megatron.core.dist_checkpointing.state import LocalPiece


def import_folder(found: Foreign, save: Path, *, dtype: str | None, max_shard_bytes: int, say: Say) -> Path:
    """Write a checkpoint of another format into `save`, at its iteration; its directory.

    dtype: of weights, a key of DTYPES; as stored if not given. Raises CheckpointError, before anything is written where
    it does not fit the model that it says it is of. A killed call goes on where it was.
    """
    has_optimizer = any(name.startswith(OPTIMIZER_PREFIX) for name in found.tensors)
    if has_optimizer and dtype is not None:
        raise InterchangeError(f"--dtype {dtype} is for weights alone: add --no-load-optim")
    settings = config_of(found, check_config)
    stored = {name: DTYPES[dtype] if dtype else entry.dtype for name, entry in found.tensors.items()}
    weights = {kind for name, kind in stored.items() if name.startswith(MODEL_PREFIX)}
    as_run = functools.partial(model_config, rows=found.tensors[EMBEDDING].shape[0], dtypes=weights)
    if found.args:
        _check_megatron(found, as_run(settings), has_optimizer)
    there = tokenizer_files(found.directory)
    mark = fingerprint(found, dtype, max_shard_bytes)
    target = save / directory_name(found.iteration)
    if os.path.lexists(target):
        return _finished(target, mark, say, found.iteration)
    pieces = [
        PieceFacts(name, stored[name], entry.shape, (0,) * len(entry.shape), entry.shape)
        for name, entry in found.tensors.items()
    ]
    plans = in_files(pieces, lambda piece: num_bytes_of(piece.shape, piece.dtype), max_shard_bytes)
    temporary = save / directory_name(found.iteration, CheckpointKind.TEMPORARY, mark)
    verify(found)  # such formats have next to nothing to be verified by, and nothing is made of what is wrong
    with reading(found, temporary) as reader:
        files = []
        for number, layout in enumerate(map(lay_out, plans)):
            held = [(found.tensors[piece.name], piece.dtype) for piece in layout.pieces]
            parts = functools.partial(safetensors_parts, layout.header, held, reader)
            files.append(OutputFile(shard_name(number), layout.num_bytes, parts))
        entries = write_files(temporary, files, say)
    if there:
        copy_tokenizer(there, save / BESIDE)
        settings |= tokenizer_flags(save / BESIDE)
    more = {"config": as_run(settings), "imported": mark}
    manifest = _manifest(found, more, describe_tensors(plans), entries)
    write_file(temporary / MANIFEST_NAME, [manifest.to_bytes()])
    for note in commit.commit(temporary, save, found.iteration, may_replace=False):
        say(note)
    return target


def _finished(target: Path, mark: str, say: Say, iteration: int) -> Path:
    """Where the same call was killed behind the rename. Raises CheckpointError for any other checkpoint."""
    with contextlib.suppress(CheckpointError):
        if open_directory(target, iteration).manifest.common.get("imported") == mark:
            say(f"{target}: finished by an earlier call")
            if read_tracker(target.parent) is None:
                publish_text(target.parent / TRACKER_NAME, str(iteration))
            return target
    raise CheckpointError(f"{target}: there already: give --save another folder")


def _manifest(
    found: Foreign,
    more: Mapping[str, Any],
    tensors: Mapping[str, TensorEntry],
    files: Mapping[str, FileEntry],
) -> Manifest:
    counters = found.iteration, found.manifest.consumed_train_samples
    stated = dict(zip(("iteration", "consumed_train_samples"), counters, strict=True))
    common = json.loads(canonical({**found.manifest.common, **stated, **more}))
    return Manifest(
        *counters,
        world_size=1,
        topology=dict.fromkeys(AXES, 1),
        config_hash=config_digest(common),
        code_version=__version__,
        torch_version=version("torch"),
        files=files,
        tensors=tensors,
        common=common,
        per_rank=(None,),  # nobody's random generators
    )


def _check_megatron(found: Foreign, settings: Mapping[str, Any], has_optimizer: bool) -> None:
    """Raises CheckpointError where tensors or counters are not those of the model of its args. It brings torch."""
    from megatron.core.dist_checkpointing.loading import check_pieces
    from megatron.training.run.run_checkpoints import check_state

    check_expressible(found)
    check_pieces(found, list(_expected(found, settings)))
    check_state(found, has_optimizer)


def _expected(found: Foreign, settings: Mapping[str, Any]) -> Iterator[LocalPiece]:
    """What a model of these settings has, and an optimizer of what the checkpoint keeps of any weight; no values."""
    from megatron.core.dist_checkpointing.pieces import TORCH_DTYPES
    from megatron.core.dist_checkpointing.state import pieces_of
    from megatron.core.models.gpt.gpt import GPTModel
    from megatron.training.config.config import Config

    config = Config.from_flat(settings).model
    kinds = {name.split(".")[1] for name in found.tensors if name.startswith(OPTIMIZER_PREFIX)}
    prefixes = [MODEL_PREFIX, *(f"{OPTIMIZER_PREFIX}{kind}." for kind in sorted(kinds))]
    model = GPTModel(config, padded_vocab_size=config.padded_vocab_size or 0, seed=0, device="meta")
    for name, weight in model.named_parameters():
        for prefix in prefixes:
            stored = found.tensors.get(prefix + name)
            like = weight.to(TORCH_DTYPES[stored.dtype]) if stored else weight
            yield from pieces_of(prefix.removesuffix("."), model.param_meta[name], like)
