"""A Hugging Face folder as a source of weights: config.json, safetensors files, their index (floor 0).

Nothing in it is trusted: names are plain, in the folder, and lead to regular files; sizes are bounded; headers have to
describe their files to the byte. Code and pickles that lie beside are neither read nor run.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar

from megatron.core.dist_checkpointing.files import CheckpointError, named_errors, open_regular, sha256_of
from megatron.core.dist_checkpointing.manifest import FILE_NAME
from megatron.core.dist_checkpointing.safetensors_format import ITEM_BYTES
from megatron.core.dist_checkpointing.source import ArrayChunk, ArrayTensor
from megatron.core.dist_checkpointing.verification import read_header
from megatron.core.safe_files import read_json
from megatron.core.words import first_of
from megatron.interchange.architecture import HFModel, InterchangeError
from megatron.interchange.known import read_config
from megatron.interchange.moves import Catalogue, Move

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MAX_CONFIG_BYTES = 4 << 20
_MAX_INDEX_BYTES = 64 << 20


def open_folder(directory: Path, given: Mapping[str, Any] | None = None, rows: int = 0) -> HFSource:
    """Read config.json, index and headers; no weights. given: our fields that flags give, see `Architecture.read`.
    rows: of our vocabulary, where it may have more than theirs.

    Raises CheckpointError (InterchangeError for what the model lacks) naming file and field.
    """
    model, json_config = read_config_file(directory, given)
    arrays: dict[str, ArrayTensor] = {}
    for file in _files(directory):
        for name, array in _header(directory, file).items():
            if name in arrays:
                before = _chunk(arrays[name]).file
                raise CheckpointError(f"{directory}: tensor {name!r:.200} is in {before} and in {file}")
            arrays[name] = array
    return HFSource(directory, model, json_config, arrays, max(model.vocab_size, rows))


def read_config_file(path: Path, given: Mapping[str, Any] | None = None) -> tuple[HFModel, dict[str, Any]]:
    """A config.json, or that of a folder, and its content. given: as above. Raises CheckpointError."""
    path = path / CONFIG if path.is_dir() else path
    json_config = read_object(path, _MAX_CONFIG_BYTES)
    try:
        return read_config(json_config, given), json_config
    except InterchangeError as error:
        raise InterchangeError(f"{path}: {str(error).removeprefix('config.json: ')}") from None


def read_object(path: Path, max_bytes: int) -> dict[str, Any]:
    """A JSON object in a file. Raises CheckpointError."""
    with named_errors(path):
        value = read_json(path, max_bytes=max_bytes, follow=True)
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def _files(directory: Path) -> list[str]:
    """The names of the folder's files of weights, checked. Raises CheckpointError."""
    path = directory / INDEX
    if not os.path.lexists(path):
        if os.path.lexists(directory / SINGLE):
            return [SINGLE]
        if any(re.fullmatch(r"pytorch_model.*\.bin", name) for name in os.listdir(directory)):
            raise CheckpointError(
                f"{directory}: weights in .bin files alone, which are pickles and are not read: load the model with "
                "transformers where you trust it, and save_pretrained(folder, safe_serialization=True)"
            )
        raise CheckpointError(f"{directory}: neither {SINGLE} nor {INDEX}")
    weights = read_object(path, _MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weights, dict) or not weights:
        raise CheckpointError(f"{path}: field 'weight_map': expected an object of files by tensor")
    files = sorted(set(map(str, weights.values())))
    for file in files:
        if not FILE_NAME.fullmatch(file):
            raise CheckpointError(f"{path}: {file!r:.200} is no plain name of a .safetensors file")
    return files


def _header(directory: Path, file: str) -> dict[str, ArrayTensor]:
    arrays = read_header(directory / file, follow=True)
    return {name: ArrayTensor.whole(array, file) for name, array in arrays.items()}


def _chunk(tensor: ArrayTensor) -> ArrayChunk:
    """Of a tensor that is whole."""
    return tensor.chunks[0]


@dataclasses.dataclass(frozen=True)
class HFSource:
    """A folder whose headers have been read, and its weights under our names: a `Source`.

    arrays: by their names in the files. padded_vocab_size: rows of ours.
    """

    directory: Path
    model: HFModel
    json: Mapping[str, Any]
    arrays: Mapping[str, ArrayTensor]
    padded_vocab_size: int
    follows_links: ClassVar[bool] = True  # a downloaded model is a folder of links into a store

    @functools.cached_property
    def catalogue(self) -> Catalogue:
        model = self.model
        return model.architecture.catalogue(model.config(), model.vocab_size, self.padded_vocab_size)

    @property
    def described_in(self) -> Path:
        return self.directory / CONFIG

    @functools.cached_property
    def tensors(self) -> Mapping[str, ArrayTensor]:
        """Raises InterchangeError listing all tensors that have no place, on either side."""
        return _mapped(self)

    @property
    def files(self) -> Collection[str]:
        return sorted({_chunk(tensor).file for tensor in self.arrays.values()})

    def verify_file(self, name: str) -> None:
        """The format has no digests: that the header is still the one that was read, and that a tied output layer in
        this file is the word embeddings."""
        here = {key: array for key, array in self.arrays.items() if _chunk(array).file == name}
        if _header(self.directory, name) != here:
            raise CheckpointError(f"{self.directory / name}: changed while it was read")
        architecture = self.model.architecture
        if architecture.head in here and architecture.head not in self.catalogue.theirs:
            word = _named(self)[architecture.word]
            if _digest(self.directory, here[architecture.head]) != _digest(self.directory, word):
                raise InterchangeError(
                    f"{self.directory}: {architecture.head} differs from {architecture.word}, which config.json "
                    'says it is ("tie_word_embeddings"): say false there'
                )


def _named(folder: HFSource) -> dict[str, ArrayTensor]:
    """The arrays by the names of the architecture's table: files of a bare model leave out its prefix."""
    architecture, base = folder.model.architecture, folder.model.architecture.base
    bare = not any(name.startswith(base) for name in folder.arrays)
    return {
        base + name if bare and name != architecture.head else name: array
        for name, array in folder.arrays.items()
    }


def _mapped(folder: HFSource) -> dict[str, ArrayTensor]:
    """Our tensors out of theirs. Raises InterchangeError."""
    architecture, arrays, catalogue = folder.model.architecture, _named(folder), folder.catalogue
    tied = {architecture.head} - catalogue.theirs.keys()  # a copy: see verify_file
    counted = {
        name: array.shape
        for name, array in arrays.items()
        if name not in tied and not architecture.is_ignored(name)
    }
    problems, tensors = catalogue.problems(theirs=counted), dict[str, ArrayTensor]()
    moves: dict[str, list[Move]] = {}
    for move in catalogue.moves if not problems else ():
        moves.setdefault(move.ours.name, []).append(move)
    for name, parts in moves.items():
        dtypes = sorted({arrays[move.theirs.name].dtype for move in parts})
        if len(dtypes) > 1:
            problems.append(f"ours {name}: made of tensors of {', '.join(dtypes)}: one dtype is wanted")
        chunks = [_placed(_chunk(arrays[move.theirs.name]), move) for move in parts]
        chunks += [
            ArrayChunk(part.box.offset, part.box.shape, "", 0, part.box.shape, (0,) * len(part.shape))
            for part in catalogue.padding
            if part.name == name
        ]
        tensors["model." + name] = ArrayTensor(dtypes[0], parts[0].ours.shape, tuple(chunks))
    if problems:
        raise InterchangeError(f"{folder.directory}: {first_of(problems, '; ')}")
    return tensors


def _placed(array: ArrayChunk, move: Move) -> ArrayChunk:
    box, first = move.ours.box, move.theirs.box.offset
    return ArrayChunk(
        box.offset, box.shape, array.file, array.begin, array.stored, at=first, transposed=move.transposed
    )


def _digest(directory: Path, tensor: ArrayTensor) -> tuple[str, tuple[int, ...], str]:
    """What a tensor is made of; its values by their SHA-256."""
    array, path = _chunk(tensor), directory / _chunk(tensor).file
    with open_regular(path, follow=True) as fd:
        num_bytes = ITEM_BYTES[tensor.dtype] * math.prod(tensor.shape)
        return tensor.dtype, tensor.shape, sha256_of(fd, path, num_bytes, array.begin)
