"""A Hugging Face folder as a checkpoint of ours, and the other way."""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import operator
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.catalog import Found
from megatron.core.dist_checkpointing.files import CheckpointError, named_errors
from megatron.core.dist_checkpointing.safetensors_format import StoredTensor
from megatron.core.dist_checkpointing.source import ArrayChunk, ArrayTensor, StoredChunk
from megatron.core.models.gpt.parameter_count import padded_vocabulary
from megatron.core.rectangles import Rectangle
from megatron.core.safe_files import publish_text, published, read_bytes, read_json
from megatron.core.words import size_text
from megatron.interchange.architecture import MEANINGLESS, InterchangeError
from megatron.interchange.hf_folder import CONFIG, INDEX, SINGLE, open_folder
from megatron.interchange.known import architecture, expressing
from megatron.interchange.moves import Catalogue, Move
from megatron.interchange.tokenizer_files import COPIED, tokenizer_flags
from megatron.training.config.config import Config
from megatron.training.config.saved_config import MODEL_PREFIX
from tools.conversion.contents import config_in
from tools.conversion.incoming import DTYPES, write_checkpoint
from tools.conversion.outgoing import exported, refuse_existing, stored_name
from tools.conversion.progress import Say
from tools.conversion.source_reader import relative
from tools.conversion.stream import PlannedFile, in_files, planned_file, size_of, write_files

BESIDE = "hugging_face"  # tokenizer, config.json and settings of generation, beside the checkpoints
GENERATION = "generation_config.json"
_MAX_COPIED_BYTES = 256 << 20


def import_folder(
    folder: Path, save: Path, *, given: Mapping[str, Any], dtype: str | None, max_shard_bytes: int, say: Say
) -> Path:
    """Write iteration 0 of the folder's model into `save`; its directory. given: our fields that flags give.

    dtype: a key of DTYPES; as stored if not given. Raises CheckpointError; a killed call goes on where it was.
    """
    source = open_folder(folder, given)
    rows = source.model.vocab_size
    beside = save / BESIDE
    _tokenizer_files(folder)

    def settings() -> dict[str, Any]:
        there = beside if _copy_tokenizer(folder, beside) else folder
        return {**source.model.flags, **tokenizer_flags(there)}

    facts = [source.json, {key: dataclasses.astuple(array) for key, array in source.arrays.items()}]
    return write_checkpoint(source, save, settings, rows, facts, dtype, max_shard_bytes, say)


def _tokenizer_files(folder: Path) -> list[str]:
    """Raises CheckpointError for one that is too large to be copied."""
    there = [name for name in COPIED if (folder / name).is_file()]
    for name in there:
        if (size := (folder / name).stat().st_size) > _MAX_COPIED_BYTES:
            most = size_text(_MAX_COPIED_BYTES)
            raise CheckpointError(
                f"{folder / name}: {size_text(size)}; at most {most} are read of a tokenizer's file"
            )
    return there


def _copy_tokenizer(folder: Path, into: Path) -> bool:
    """Whether there are files of a tokenizer; they are copied, with what says how the model is used."""
    there = _tokenizer_files(folder)
    for name in there:
        into.mkdir(parents=True, exist_ok=True)
        with named_errors(folder / name), published(into / name) as file:
            file.write(read_bytes(folder / name, max_bytes=_MAX_COPIED_BYTES, follow=True))
    return bool(there)


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
    files = _files(tensors, dtype, max_shard_bytes)
    kinds = collections.Counter(tensor.dtype for file in files for tensor in file.tensors)
    most = kinds.most_common(1)[0][0]
    name = next(key for key, value in DTYPES.items() if value == most)
    with exported(found, folder, target.model_type, dtype, max_shard_bytes, rows) as (temporary, reader):
        write_files(temporary, files, tensors, reader, say, hashed=False)
        if like is not None:
            _copy_tokenizer(like, temporary)
        kept = {key: value for key, value in stated.items() if key in MEANINGLESS}
        _publish_json(temporary / CONFIG, {**kept, **json_config, "dtype": name, "torch_dtype": name})
        if not (temporary / GENERATION).exists():
            ids: dict[str, Any] = {
                key: kept[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in kept
            }
            _publish_json(temporary / GENERATION, {"_from_model_config": True, **ids})
        if len(files) > 1:
            _publish_json(temporary / INDEX, _index(files))
    return folder


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


def _index(files: Sequence[PlannedFile]) -> dict[str, Any]:
    tensors = [(tensor, file.name) for file in files for tensor in file.tensors]
    sizes = {
        "total_parameters": sum(math.prod(tensor.shape) for tensor, _ in tensors),
        "total_size": sum(file.num_bytes - len(file.header) for file in files),
    }
    return {"metadata": sizes, "weight_map": {tensor.key: name for tensor, name in tensors}}


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
        chunks = (*theirs.chunks, *filter(None, (_moved(chunk, move) for chunk in stored.chunks)))
        tensors[move.theirs.name] = dataclasses.replace(theirs, chunks=chunks)
    return tensors


def _moved(chunk: StoredChunk, move: Move) -> ArrayChunk | None:
    """What a stored chunk has of a move, as a rectangle of their tensor; None where it has nothing of it."""
    ours, theirs = move.ours.box, move.theirs.box
    common = Rectangle(chunk.offset, chunk.shape).common(ours)
    if common is None:
        return None
    at, inside = relative(common, chunk.offset).offset, relative(common, ours.offset)
    turn = -1 if move.transposed else 1
    offset = tuple(map(operator.add, theirs.offset, inside.offset[::turn]))
    return ArrayChunk(
        offset, inside.shape[::turn], chunk.file, chunk.begin, chunk.stored, at, move.transposed
    )


def _files(tensors: Mapping[str, ArrayTensor], dtype: str | None, max_shard_bytes: int) -> list[PlannedFile]:
    """As transformers names and cuts them."""
    stored = [
        StoredTensor(name, DTYPES[dtype] if dtype else one.dtype, one.shape) for name, one in tensors.items()
    ]
    by_file = in_files(stored, size_of, max_shard_bytes)
    count = len(by_file)
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    return [
        planned_file(name, held, {"format": "pt"})
        for name, held in zip(names if count > 1 else [SINGLE], by_file, strict=True)
    ]


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
    value = read_json(like / CONFIG, max_bytes=4 << 20, follow=True)
    return value if isinstance(value, dict) else {}
