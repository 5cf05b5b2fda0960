"""A checkpoint of ours as a Hugging Face folder."""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import math
import operator
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.catalog import Found
from megatron.core.dist_checkpointing.files import CheckpointError
from megatron.core.dist_checkpointing.safetensors_format import StoredTensor, build_header
from megatron.core.dist_checkpointing.source import ArrayChunk, ArrayTensor, ChunkPart, parts_of
from megatron.core.models.gpt.vocabulary_size import padded_vocabulary
from megatron.core.safe_files import publish_text
from megatron.interchange.architecture import MEANINGLESS, InterchangeError
from megatron.interchange.hf_folder import CONFIG, INDEX, SINGLE, read_object
from megatron.interchange.known import architecture, expressing
from megatron.interchange.moves import Catalogue, Move
from megatron.training.config.config import Config
from megatron.training.config.saved_config import MODEL_PREFIX
from tools.conversion.contents import config_in
from tools.conversion.exporting import exported, refuse_existing, stored_name
from tools.conversion.progress import Say
from tools.conversion.source_reader import SourceReader
from tools.conversion.stream import OutputFile, in_files, num_bytes_of, safetensors_parts, write_files
from tools.conversion.tokenizer_copy import BESIDE, copy_tokenizer, tokenizer_files
from tools.conversion.values import DTYPES

GENERATION = "generation_config.json"


def export_folder(
    found: Found,
    folder: Path,
    *,
    model_type: str | None,
    like: Path | None,
    dtype: str | None,
    max_shard_bytes: int,
    say: Say,
) -> Path:
    """Write a checkpoint's model as a Hugging Face folder, which must not be there yet.

    model_type: the architecture; that of `like`, else the first that can express the model. like: a folder whose
    tokenizer files and settings of generation are taken over; the checkpoint's tokenizer's if not given. dtype: a key
    of DTYPES, float32 from main weights where there are any; the weights' own if not given. A killed call goes on where
    it was. Raises CheckpointError, also where the checkpoint is removed or replaced meanwhile.
    """
    refuse_existing(folder)
    config = config_in(found)
    like = like or _origin(found, config)
    stated = _stated(like)
    padded = config.model.padded_vocab_size
    if padded is None:
        raise CheckpointError(f"{found.described_in}: field 'common.config.padded_vocab_size': missing")
    rows = true_rows(config, padded, stated, like)
    model_type = model_type or stated.get("model_type")
    target = architecture(model_type) if model_type else expressing(config.model, rows)
    if not model_type:
        say(
            f"model_type {target.model_type}: the first that can express this model; --model-type says another"
        )
    json_config = target.write(config.model, rows)
    tensors = _their_tensors(found, target.catalogue(config.model, rows, padded), dtype)
    dtypes = {name: DTYPES[dtype] if dtype else one.dtype for name, one in tensors.items()}
    most = collections.Counter(dtypes.values()).most_common(1)[0][0]
    name = next(key for key, value in DTYPES.items() if value == most)
    with exported(found, folder, target.model_type, dtype, max_shard_bytes, rows) as (temporary, reader):
        names = _write_weights(temporary, tensors, dtypes, max_shard_bytes, reader, say)
        if like is not None:
            copy_tokenizer(tokenizer_files(like), temporary)
        kept = {key: value for key, value in stated.items() if key in MEANINGLESS}
        _publish_json(temporary / CONFIG, {**kept, **json_config, "dtype": name, "torch_dtype": name})
        if not (temporary / GENERATION).exists():
            ids: dict[str, Any] = {
                key: kept[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in kept
            }
            _publish_json(temporary / GENERATION, {"_from_model_config": True, **ids})
        if names.keys() != {SINGLE}:
            _publish_json(temporary / INDEX, _index(tensors, dtypes, names))
    return folder


def _write_weights(
    directory: Path,
    tensors: Mapping[str, ArrayTensor],
    dtypes: Mapping[str, str],
    max_shard_bytes: int,
    reader: SourceReader,
    say: Say,
) -> dict[str, list[str]]:
    """In files as transformers names and cuts them; the names of the tensors of each."""
    stored = [StoredTensor(name, dtypes[name], one.shape) for name, one in tensors.items()]
    by_file = in_files(stored, lambda one: num_bytes_of(one.shape, one.dtype), max_shard_bytes)
    names = [f"model-{number:05d}-of-{len(by_file):05d}.safetensors" for number in range(1, len(by_file) + 1)]
    files = []
    for name, held in zip(names if len(names) > 1 else [SINGLE], by_file, strict=True):
        header, places = build_header(held, {"format": "pt"})
        written = [(tensors[one.key], one.dtype) for one in held]
        files.append(
            OutputFile(name, places[-1], functools.partial(safetensors_parts, header, written, reader))
        )
    write_files(directory, files, say, hashed=False)
    return {file.name: [one.key for one in held] for file, held in zip(files, by_file, strict=True)}


def true_rows(config: Config, padded: int, stated: Mapping[str, Any], like: Path | None) -> int:
    """Rows of the vocabulary without those that the rule of padding has added behind config.json's, all of them where
    it says of no fewer. Raises InterchangeError where it would take others away."""
    rows = stated.get("vocab_size", padded)
    multiple, tp = config.model.make_vocab_size_divisible_by, config.parallel.tensor_model_parallel_size
    if type(rows) is int and (rows >= padded or padded_vocabulary(rows, multiple, tp) == padded):
        return min(rows, padded)
    raise InterchangeError(
        f"{like}: its config.json has vocab_size {rows!r:.80}, this model {padded} rows, which are not that padded "
        f"(--make-vocab-size-divisible-by {multiple} x --tensor-model-parallel-size {tp}): export --like a folder of "
        "the same vocabulary"
    )


def _index(
    tensors: Mapping[str, ArrayTensor], dtypes: Mapping[str, str], names: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    sizes = {
        "total_parameters": sum(math.prod(tensor.shape) for tensor in tensors.values()),
        "total_size": sum(num_bytes_of(tensor.shape, dtypes[name]) for name, tensor in tensors.items()),
    }
    return {"metadata": sizes, "weight_map": {key: file for file, keys in names.items() for key in keys}}


def _publish_json(path: Path, value: Mapping[str, Any]) -> None:
    publish_text(path, json.dumps(value, indent=2, sort_keys=True) + "\n")


def _their_tensors(found: Found, catalogue: Catalogue, dtype: str | None) -> dict[str, ArrayTensor]:
    """Their tensors, in the order of the table, made of what the checkpoint stores; with a dtype of main weights where
    there are any. Raises InterchangeError."""
    names = (name for name in found.tensors if name.startswith(MODEL_PREFIX))
    weights = {name.removeprefix(MODEL_PREFIX): tuple(found.tensors[name].shape) for name in names}
    if problems := catalogue.problems(ours=weights):
        raise InterchangeError(f"{found.described_in}: {'; '.join(problems[:8])}")
    tensors: dict[str, ArrayTensor] = {}
    for move in catalogue.moves:
        stored = found.tensors[stored_name(found, move.ours.name, dtype)]
        theirs = tensors.setdefault(move.theirs.name, ArrayTensor(stored.dtype, move.theirs.shape, ()))
        assert theirs.dtype == stored.dtype, f"{move.theirs.name}: of {theirs.dtype} and {stored.dtype}"
        chunks = (*theirs.chunks, *(_moved(part, move) for part in parts_of(stored, move.ours.box)))
        tensors[move.theirs.name] = dataclasses.replace(theirs, chunks=chunks)
    return tensors


def _moved(part: ChunkPart, move: Move) -> ArrayChunk:
    """What a stored chunk has of a move, as a rectangle of their tensor."""
    turn, chunk, stored, first = (
        -1 if move.transposed else 1,
        part.chunk,
        part.chunk.stored,
        part.inside.offset,
    )
    more = len(first) - len(move.theirs.shape)
    if more:  # experts, of which theirs is one: their rows lie one below the other
        stored, first = (stored[0] * stored[1], *stored[2:]), (first[0] * stored[1] + first[1], *first[2:])
    offset = tuple(map(operator.add, move.theirs.box.offset, part.at.offset[more:][::turn]))
    shape = part.at.shape[more:][::turn]
    return ArrayChunk(offset, shape, chunk.file, chunk.begin, stored, first, move.transposed)


def _origin(found: Found, config: Config) -> Path | None:
    """Where the model's tokenizer and its own config.json are: beside the checkpoints, or where the flags say."""
    if (beside := found.directory.parent / BESIDE).is_dir():
        return beside
    for path in (config.training.hf_config, config.tokenizer.tokenizer_model):
        if path is not None and os.path.exists(path):
            return Path(path) if os.path.isdir(path) else Path(path).parent
    return None


def _stated(like: Path | None) -> dict[str, Any]:
    if like is None or not (like / CONFIG).is_file():
        return {}
    return read_object(like / CONFIG)
