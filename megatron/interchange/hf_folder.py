"""A Hugging Face folder as a source of weights: config.json, safetensors files, their index (floor 0).

Nothing in it is trusted: names are plain, in the folder, and lead to regular files; sizes are bounded; headers have to
describe their files to the byte. Code and pickles that lie beside are neither read nor run.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing import safetensors_format as safetensors
from megatron.core.dist_checkpointing.files import (
    BLOCK_BYTES,
    CheckpointError,
    named_errors,
    open_regular,
    read_exactly,
)
from megatron.core.dist_checkpointing.safetensors_format import ITEM_BYTES
from megatron.core.dist_checkpointing.source import ArrayChunk, ArrayTensor
from megatron.core.safe_files import read_json
from megatron.interchange.architecture import HFModel, InterchangeError
from megatron.interchange.known import read_config
from megatron.interchange.moves import Catalogue

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MAX_CONFIG_BYTES = 4 << 20
_MAX_INDEX_BYTES = 64 << 20
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}\.safetensors")
_SHOWN = 8


@dataclasses.dataclass(frozen=True)
class HFFolder:
    """A folder whose headers have been read. arrays: by their names in the files."""

    directory: Path
    model: HFModel
    json: Mapping[str, Any]
    arrays: Mapping[str, ArrayTensor]


def open_folder(directory: Path, given: Mapping[str, Any] | None = None) -> HFFolder:
    """Read config.json, index and headers; no weights. given: our fields that flags give, see `Architecture.read`.

    Raises CheckpointError (InterchangeError for what the model lacks) naming file and field.
    """
    model, json_config = _read_config(directory / CONFIG, given)
    arrays: dict[str, ArrayTensor] = {}
    for file in _files(directory):
        for name, array in _header(directory, file).items():
            if name in arrays:
                before = _array(arrays[name]).file
                raise CheckpointError(f"{directory}: tensor {name!r:.200} is in {before} and in {file}")
            arrays[name] = array
    return HFFolder(directory, model, json_config, arrays)


def read_config_file(path: Path, given: Mapping[str, Any] | None = None) -> HFModel:
    """A config.json, or that of a folder. given: as above. Raises CheckpointError."""
    return _read_config(path / CONFIG if path.is_dir() else path, given)[0]


def _read_config(path: Path, given: Mapping[str, Any] | None) -> tuple[HFModel, dict[str, Any]]:
    json_config = _json_object(path, _MAX_CONFIG_BYTES)
    try:
        return read_config(json_config, given), json_config
    except InterchangeError as error:
        raise InterchangeError(f"{path}: {str(error).removeprefix('config.json: ')}") from None


def _json_object(path: Path, max_bytes: int) -> dict[str, Any]:
    with named_errors(path):
        value = read_json(path, max_bytes=max_bytes, follow=True)
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def _files(directory: Path) -> list[str]:
    """The names of the folder's files of weights, checked. Raises CheckpointError."""
    if not os.path.lexists(directory / INDEX):
        if os.path.lexists(directory / SINGLE):
            return [SINGLE]
        names = sorted(os.listdir(directory))
        if any(re.fullmatch(r"pytorch_model.*\.bin", name) for name in names):
            raise CheckpointError(
                f"{directory}: weights in .bin files alone, which are pickles and are not read: load the model with "
                "transformers where you trust it, and save_pretrained(folder, safe_serialization=True)"
            )
        raise CheckpointError(f"{directory}: neither {SINGLE} nor {INDEX}")
    index = _json_object(directory / INDEX, _MAX_INDEX_BYTES)
    weights = index.get("weight_map")
    if not isinstance(weights, dict) or not weights:
        raise CheckpointError(
            f"{directory / INDEX}: field 'weight_map': expected an object of files by tensor"
        )
    for file in (files := sorted(set(map(str, weights.values())))):
        if not _FILE_NAME.fullmatch(file):
            raise CheckpointError(
                f"{directory / INDEX}: {file!r:.200} is no plain name of a .safetensors file"
            )
    return files


def _header(directory: Path, file: str) -> dict[str, ArrayTensor]:
    path = directory / file
    with open_regular(path, follow=True) as fd:
        file_bytes = os.fstat(fd).st_size
        try:
            prefix = bytes(read_exactly(fd, path, 0, safetensors.LENGTH_BYTES))
            length = safetensors.header_length(prefix, file_bytes)
            text = bytes(read_exactly(fd, path, safetensors.LENGTH_BYTES, length))
            arrays = safetensors.parse_header(text, file_bytes)
        except (ValueError, RecursionError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{path}: {error}") from None
    return {
        name: ArrayTensor.whole(array.dtype, array.shape, file, array.begin) for name, array in arrays.items()
    }


def _array(tensor: ArrayTensor) -> ArrayChunk:
    """Of a tensor that is whole."""
    return tensor.chunks[0]


@dataclasses.dataclass(frozen=True)
class HFSource:
    """The folder's weights under our names: a `Source`. prefix: before our names. padded_vocab_size: rows of ours."""

    folder: HFFolder
    padded_vocab_size: int
    prefix: str = "model."

    def __post_init__(self) -> None:
        object.__setattr__(self, "_tensors", _mapped(self.folder, self.catalogue, self.prefix))

    @property
    def catalogue(self) -> Catalogue:
        model = self.folder.model
        return model.architecture.catalogue(model.config(), model.vocab_size, self.padded_vocab_size)

    @property
    def directory(self) -> Path:
        return self.folder.directory

    @property
    def follows_links(self) -> bool:
        """A downloaded model is a folder of links into a store."""
        return True

    @property
    def described_in(self) -> Path:
        return self.folder.directory / CONFIG

    @property
    def tensors(self) -> Mapping[str, ArrayTensor]:
        tensors: Mapping[str, ArrayTensor] = self._tensors  # type: ignore[attr-defined]
        return tensors

    @property
    def files(self) -> Collection[str]:
        return sorted({_array(one).file for one in self.folder.arrays.values()})

    def verify_file(self, name: str) -> None:
        """The format has no digests: that the header is still the one that was read, and that a tied output layer in
        this file is the word embeddings."""
        here = {key: one for key, one in self.folder.arrays.items() if _array(one).file == name}
        if _header(self.directory, name) != here:
            raise CheckpointError(f"{self.directory / name}: changed while it was read")
        architecture = self.folder.model.architecture
        if architecture.head in here and architecture.head not in self.catalogue.theirs:
            word = _named(self.folder)[architecture.word]
            if not _same_bytes(self.directory, here[architecture.head], word):
                raise InterchangeError(
                    f"{self.directory}: {architecture.head} differs from {architecture.word}, which config.json "
                    'says it is ("tie_word_embeddings"): say false there'
                )


def _named(folder: HFFolder) -> dict[str, ArrayTensor]:
    """The arrays by the names of the architecture's table: files of a bare model leave out its prefix."""
    architecture, base = folder.model.architecture, folder.model.architecture.base
    bare = not any(name.startswith(base) for name in folder.arrays)
    return {
        base + name if bare and name != architecture.head else name: array
        for name, array in folder.arrays.items()
    }


def _mapped(folder: HFFolder, catalogue: Catalogue, prefix: str) -> dict[str, ArrayTensor]:
    """Our tensors out of theirs. Raises InterchangeError listing all tensors that have no place, on either side."""
    architecture, arrays = folder.model.architecture, _named(folder)
    counted = {
        name: array.shape
        for name, array in arrays.items()
        if not architecture.is_ignored(name)
        and not (name == architecture.head and name not in catalogue.theirs)  # a tied copy: see verify_file
    }
    problems = catalogue.problems(theirs=counted)
    chunks: dict[str, list[ArrayChunk]] = {}
    dtypes: dict[str, set[str]] = {}
    shapes = catalogue.ours
    for move in catalogue.moves if not problems else ():
        array = arrays[move.theirs.name]
        box, first = move.ours.box, move.theirs.box.offset
        part = dataclasses.replace(
            _array(array), offset=box.offset, shape=box.shape, at=first, transposed=move.transposed
        )
        chunks.setdefault(move.ours.name, []).append(part)
        dtypes.setdefault(move.ours.name, set()).add(array.dtype)
    for name, _, box in catalogue.padding if not problems else ():
        zeros = ArrayTensor.whole("", box.shape, "", 0)
        chunks[name].append(dataclasses.replace(_array(zeros), offset=box.offset))
    problems += [
        f"ours {name}: made of tensors of {', '.join(sorted(found))}: one dtype is wanted"
        for name, found in dtypes.items()
        if len(found) > 1
    ]
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise InterchangeError(f"{folder.directory}: {'; '.join(problems[:_SHOWN])}{more}")
    return {
        prefix + name: ArrayTensor(next(iter(dtypes[name])), shapes[name], tuple(parts))
        for name, parts in chunks.items()
    }


def _same_bytes(directory: Path, one: ArrayTensor, other: ArrayTensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    arrays, num_bytes = (_array(one), _array(other)), ITEM_BYTES[one.dtype] * math.prod(one.shape)
    paths = [directory / array.file for array in arrays]
    with open_regular(paths[0], follow=True) as first, open_regular(paths[1], follow=True) as second:
        for done in range(0, num_bytes, BLOCK_BYTES):
            count = min(BLOCK_BYTES, num_bytes - done)
            blocks = (
                read_exactly(fd, path, array.begin + done, count)
                for fd, path, array in zip((first, second), paths, arrays, strict=True)
            )
            if next(blocks) != next(blocks):
                return False
    return True
