"""A Hugging Face folder as a source of weights: config.json, safetensors files, their index (floor 0).

Nothing in it is trusted: names are plain, in the folder, and lead to regular files; sizes are bounded; headers have to
describe their files to the byte. Code and pickles that lie beside are neither read nor run.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.files import CheckpointError, named_errors, open_regular, sha256_of
from megatron.core.dist_checkpointing.manifest import FILE_NAME
from megatron.core.dist_checkpointing.safetensors_format import StoredArray
from megatron.core.dist_checkpointing.source import ArrayChunk, ArrayTensor
from megatron.core.dist_checkpointing.verification import read_header
from megatron.core.safe_files import read_json
from megatron.core.words import first_of
from megatron.interchange.architecture import Architecture, HFModel, InterchangeError
from megatron.interchange.foreign import Foreign
from megatron.interchange.known import read_config
from megatron.interchange.moves import Catalogue, Move
from megatron.interchange.tokenizer_files import tokenizer_flags

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
Place = tuple[str, StoredArray]  # a file's name, and an array in it
Arrays = Mapping[str, Place]
_MAX_INDEX_BYTES = 64 << 20


def open_folder(directory: Path, given: Mapping[str, Any] | None = None, rows: int = 0) -> Foreign:
    """Read config.json, index and headers; no weights. given: our fields that flags give, see `Architecture.read`.
    rows: of our vocabulary, where it may have more than theirs.

    Raises CheckpointError naming file and field; InterchangeError for what the model lacks, and listing all tensors
    that have no place, on either side.
    """
    model, _ = read_config_file(directory, given)
    arrays: dict[str, Place] = {}
    for file in _files(directory):
        for name, array in _header(directory, file).items():
            if name in arrays:
                before = arrays[name][0]
                raise CheckpointError(f"{directory}: tensor {name!r:.200} is in {before} and in {file}")
            arrays[name] = file, array
    architecture, rows = model.architecture, max(model.vocab_size, rows)
    catalogue = architecture.catalogue(model.config(), model.vocab_size, rows)
    bare = not any(name.startswith(architecture.base) for name in arrays)  # its files leave the prefix out
    named = {
        architecture.base + name if bare and name != architecture.head else name: array
        for name, array in arrays.items()
    }
    copy = None if architecture.head in catalogue.theirs else named.pop(architecture.head, None)
    wanted = {name: array for name, array in named.items() if not architecture.is_ignored(name)}
    tensors = _mapped(directory, wanted, catalogue)
    copies = (copy, named[architecture.word]) if copy else None
    return Foreign.of(
        directory / CONFIG,
        tensors,
        {"config": {**model.flags, **tokenizer_flags(directory), "padded_vocab_size": rows}},
        files=sorted({file for file, _ in arrays.values()}),
        verify_file=functools.partial(_verify, directory, arrays, copies, architecture),
        follows_links=True,  # a downloaded model is a folder of links into a store
    )


def read_config_file(path: Path, given: Mapping[str, Any] | None = None) -> tuple[HFModel, dict[str, Any]]:
    """A config.json, or that of a folder, and its content. given: as above. Raises CheckpointError."""
    # pathlib's is_dir raises for names that are too long
    path = path / CONFIG if os.path.isdir(path) else path
    json_config = read_object(path)
    try:
        return read_config(json_config, given), json_config
    except InterchangeError as error:
        raise InterchangeError(f"{path}: {str(error).removeprefix('config.json: ')}") from None


def read_object(path: Path, max_bytes: int = 4 << 20) -> dict[str, Any]:
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


def _header(directory: Path, file: str) -> dict[str, StoredArray]:
    return read_header(directory / file, follow=True)


def _verify(
    directory: Path, arrays: Arrays, copies: tuple[Place, Place] | None, architecture: Architecture, file: str
) -> None:
    """The format has no digests: that the header is still the one that was read, and that an output layer in this file
    that is said to be tied is the word embeddings. copies: these two."""
    if _header(directory, file) != {key: array for key, (where, array) in arrays.items() if where == file}:
        raise CheckpointError(f"{directory / file}: changed while it was read")
    if copies and copies[0][0] == file and len({_digest(directory, *place) for place in copies}) > 1:
        raise InterchangeError(
            f"{directory}: {architecture.head} differs from {architecture.word}, which config.json "
            'says it is ("tie_word_embeddings"): say false there'
        )


def _mapped(directory: Path, arrays: Arrays, catalogue: Catalogue) -> dict[str, ArrayTensor]:
    """Our tensors out of theirs. Raises InterchangeError."""
    problems = catalogue.problems(theirs={name: array.shape for name, (_, array) in arrays.items()})
    moves: dict[str, list[Move]] = {}
    for move in catalogue.moves if not problems else ():
        moves.setdefault(move.ours.name, []).append(move)
    tensors: dict[str, ArrayTensor] = {}
    for name, parts in moves.items():
        dtypes = sorted({arrays[move.theirs.name][1].dtype for move in parts})
        if len(dtypes) > 1:
            problems.append(f"ours {name}: made of tensors of {', '.join(dtypes)}: one dtype is wanted")
        chunks = [_placed(*arrays[move.theirs.name], move) for move in parts]
        chunks += [
            ArrayChunk(part.box.offset, part.box.shape, "", 0, part.box.shape, (0,) * len(part.shape))
            for part in catalogue.padding
            if part.name == name
        ]
        tensors["model." + name] = ArrayTensor(dtypes[0], parts[0].ours.shape, tuple(chunks))
    if problems:
        raise InterchangeError(f"{directory}: {first_of(problems, '; ')}")
    return tensors


def _placed(file: str, array: StoredArray, move: Move) -> ArrayChunk:
    box, first = move.ours.box, move.theirs.box.offset
    more = len(box.shape) - len(first)  # a dim of experts, of which theirs is one
    stored, at = (1,) * more + array.shape, (0,) * more + first
    return ArrayChunk(box.offset, box.shape, file, array.begin, stored, at, move.transposed)


def _digest(directory: Path, file: str, array: StoredArray) -> tuple[str, tuple[int, ...], str]:
    """What a tensor is made of; its values by their SHA-256."""
    with open_regular(directory / file, follow=True) as fd:
        digest = sha256_of(fd, directory / file, array.num_bytes, array.begin)
    return array.dtype, array.shape, digest
