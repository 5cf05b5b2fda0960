"""A Hugging Face folder as a checkpoint of ours, and the other way."""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.catalog import Found
from megatron.core.dist_checkpointing.files import CheckpointError, named_errors
from megatron.core.dist_checkpointing.pieces import TORCH_DTYPES
from megatron.core.dist_checkpointing.safetensors_format import StoredTensor
from megatron.core.models.gpt.parameter_count import padded_vocabulary
from megatron.core.rectangles import Rectangle
from megatron.core.safe_files import publish_text, published, read_bytes, read_json, sync_directory
from megatron.core.words import size_text
from megatron.interchange.architecture import MEANINGLESS, InterchangeError
from megatron.interchange.hf_folder import CONFIG, INDEX, SINGLE, open_folder
from megatron.interchange.known import architecture, expressing
from megatron.interchange.moves import Catalogue, Move
from megatron.interchange.tokenizer_files import COPIED, tokenizer_flags
from megatron.training.config.config import Config
from megatron.training.config.saved_config import MODEL_PREFIX
from tools.conversion.contents import config_in
from tools.conversion.incoming import DTYPES, fingerprint, write_checkpoint
from tools.conversion.outgoing import reading, refuse_existing, stored_name
from tools.conversion.progress import Say
from tools.conversion.source_reader import SourceReader, relative, view
from tools.conversion.stream import PlannedFile, bands, in_files, planned_file, size_of, write_files

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
    exported = architecture(model_type) if model_type else expressing(config.model, rows)
    if not model_type:
        say(
            f"model_type {exported.model_type}: the first that can express this model; --model-type says another"
        )
    json_config = exported.write(config.model, rows)
    out = _Outgoing(found, exported.catalogue(config.model, rows, padded), dtype)
    files = out.files(max_shard_bytes)
    tag = fingerprint(found.manifest_sha256, exported.model_type, dtype, max_shard_bytes, rows)
    temporary = folder.with_name(f".{folder.name}.{tag}.tmp")
    with reading(found, temporary) as reader:
        write_files(temporary, files, functools.partial(out.values, reader), say, hashed=False)
    if like is not None:
        _copy_tokenizer(like, temporary)
    kept = {key: value for key, value in stated.items() if key in MEANINGLESS}
    _publish_json(temporary / CONFIG, {**kept, **json_config, "dtype": out.dtype, "torch_dtype": out.dtype})
    if not (temporary / GENERATION).exists():
        ids: dict[str, Any] = {
            key: kept[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in kept
        }
        _publish_json(temporary / GENERATION, {"_from_model_config": True, **ids})
    if len(files) > 1:
        _publish_json(temporary / INDEX, _index(files))
    sync_directory(temporary)
    os.rename(temporary, folder)
    sync_directory(folder.parent)
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


class _Outgoing:
    """Their tensors, made of a checkpoint's. dtype: the name of most of them in config.json."""

    def __init__(self, found: Found, catalogue: Catalogue, dtype: str | None) -> None:
        names = (name for name in found.tensors if name.startswith(MODEL_PREFIX))
        weights = {name.removeprefix(MODEL_PREFIX): tuple(found.tensors[name].shape) for name in names}
        if problems := catalogue.problems(ours=weights):
            raise InterchangeError(f"{found.described_in}: {'; '.join(problems[:8])}")
        self._source_of = {name: stored_name(found, name, dtype) for name in weights}
        self._moves: dict[str, list[Move]] = {}
        for move in catalogue.moves:
            self._moves.setdefault(move.theirs.name, []).append(move)
        self._shapes = catalogue.theirs
        self._types = {
            theirs: DTYPES[dtype] if dtype else found.tensors[self._source_of[moves[0].ours.name]].dtype
            for theirs, moves in self._moves.items()
        }
        most = collections.Counter(self._types.values()).most_common(1)[0][0]
        self.dtype = next(key for key, value in DTYPES.items() if value == most)

    def files(self, max_shard_bytes: int) -> list[PlannedFile]:
        """In the order of the table, as transformers names and cuts them."""
        tensors = [StoredTensor(name, self._types[name], shape) for name, shape in self._shapes.items()]
        by_file = in_files(tensors, size_of, max_shard_bytes)
        names = [
            f"model-{number:05d}-of-{len(by_file):05d}.safetensors" for number in range(1, len(by_file) + 1)
        ]
        if len(by_file) == 1:
            names = [SINGLE]
        return [planned_file(name, held, {"format": "pt"}) for name, held in zip(names, by_file, strict=True)]

    def values(self, reader: SourceReader, stored: StoredTensor) -> Iterator[Tensor]:
        """One of their tensors, read now: in bands, but for transposed ones, whose rows are our columns."""
        moves = self._moves[stored.key]
        all_of_it = Rectangle((0,) * len(stored.shape), stored.shape)
        for band in [all_of_it] if moves[0].transposed else bands(stored):
            out = torch.empty(band.shape, dtype=TORCH_DTYPES[stored.dtype])
            for move in moves:
                common, box = move.theirs.box.common(band), move.ours.box
                if common is None:
                    continue
                if not move.transposed:
                    inside = relative(common, move.theirs.box.offset).offset
                    offset = tuple(a + b for a, b in zip(box.offset, inside, strict=True))
                    box = Rectangle(offset, common.shape)
                part = reader.read(self._source_of[move.ours.name], box)
                view(out, relative(common, band.offset)).copy_(part.t() if move.transposed else part)
            yield out


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
