"""manifest.json: what a checkpoint is made of; a directory without a valid one is no checkpoint (floor 0).

    {"format": "megatron-zero-checkpoint", "format_version": 1, "iteration", "consumed_train_samples",
     "world_size", "topology", "config_hash", "code_version", "torch_version",
     "files":   {file: {"bytes", "sha256"}},
     "tensors": {name: {"dtype", "shape", "chunks": [{"file", "key", "begin", "offset", "shape"}]}},
     "common":  any JSON, "per_rank": [any JSON, one a rank], "digest": SHA-256 of all the rest}

The digest is taken over the canonical text (sorted keys, no blanks), so a changed bit anywhere in the
manifest is found like one in a shard. Everything read from the file is checked before it is used: types,
ranges, file names (`SCHEMA`), that the chunks of each tensor lie in their files and fill it exactly once, and that
what is said twice is said alike. `common` and `per_rank` are checked against the schemas of whoever reads them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from megatron.core import schema
from megatron.core.dist_checkpointing.files import CheckpointError, open_regular, read_exactly
from megatron.core.dist_checkpointing.safetensors_format import ITEM_BYTES, LENGTH_BYTES, MAX_DIMS
from megatron.core.rectangles import Dims, Rectangle, fill_error
from megatron.core.schema import Place, array, integer, mapping, one_of, text
from megatron.core.transport.rank_grid import AXES

MANIFEST_NAME = "manifest.json"
FORMAT = "megatron-zero-checkpoint"
FORMAT_VERSION = 1

MAX_BYTES = 512 << 20
FREE_BYTES = 8 << 20  # a manifest beyond this must be small against the data that it describes
MAX_SHARE = 8  # ... by this factor
MAX_ITERATION = 10**12 - 1  # as a directory's name holds
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}\.safetensors")


def _file_name(name: str, place: Place) -> None:
    if not FILE_NAME.fullmatch(name):
        place.fail(f"a plain file name like {FILE_NAME.pattern}", name)


_SHA256 = "[0-9a-f]{64}"
_DIMS = array(integer(), MAX_DIMS, "dims")
_KEY = text(max_chars=2 * schema.MAX_CHARS)
_CHUNK = {"file": text(), "key": _KEY, "begin": integer(low=LENGTH_BYTES), "offset": _DIMS, "shape": _DIMS}
# Every field of manifest.json. `common` and `per_rank` are checked by whoever reads what is in them.
SCHEMA: dict[str, schema.Schema] = {
    "format": one_of(FORMAT),
    "format_version": one_of(FORMAT_VERSION),
    "iteration": integer(high=MAX_ITERATION),
    "consumed_train_samples": integer(),
    "world_size": integer(low=1),
    "topology": mapping(integer(low=1), one_of(*AXES)),
    "config_hash": text(f"|{_SHA256}"),
    "code_version": text(),
    "torch_version": text(),
    "files": mapping({"bytes": integer(low=LENGTH_BYTES), "sha256": text(_SHA256)}, _file_name),
    "tensors": mapping({"dtype": one_of(*sorted(ITEM_BYTES)), "shape": _DIMS, "chunks": array(_CHUNK)}),
    "common": mapping(schema.anything),
    "per_rank": array(schema.anything),
}


@dataclasses.dataclass(frozen=True)
class FileEntry:
    """A file of the checkpoint: its size and SHA-256."""

    bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class ChunkEntry(Rectangle):
    """A rectangle of a tensor and where its bytes are: in `file`, from byte `begin`, under `key` in its header."""

    file: str
    key: str
    begin: int
    transposed: ClassVar[bool] = False

    @property
    def stored(self) -> Dims:
        """All of the array: a chunk of ours is stored by itself."""
        return self.shape

    @property
    def at(self) -> Dims:
        return (0,) * len(self.shape)


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """A global tensor. dtype: safetensors' name for it (`F32`)."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[ChunkEntry, ...]


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The whole description of a checkpoint. `common` and `per_rank` are the trainer's, any JSON."""

    iteration: int
    consumed_train_samples: int
    world_size: int
    topology: Mapping[str, Any]
    config_hash: str
    code_version: str
    torch_version: str
    files: Mapping[str, FileEntry]
    tensors: Mapping[str, TensorEntry]
    common: Mapping[str, Any]
    per_rank: tuple[Any, ...]

    def to_bytes(self) -> bytes:
        """The text of manifest.json, digest included."""
        return sign({"format": FORMAT, "format_version": FORMAT_VERSION, **dataclasses.asdict(self)})


def canonical(value: Any) -> bytes:
    """JSON with one spelling for each value; NaN and infinities have none (ValueError)."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def sign(fields: Mapping[str, Any]) -> bytes:
    """The text of a manifest with these fields and their digest."""
    return canonical({**fields, "digest": hashlib.sha256(canonical(fields)).hexdigest()})


def read_manifest(directory: Path) -> tuple[Manifest, str]:
    """The checked manifest of a directory and its SHA-256; CheckpointError names file and field."""
    path = directory / MANIFEST_NAME
    with open_regular(path) as fd:
        num_bytes, limit = os.fstat(fd).st_size, _size_limit(directory)
        if num_bytes > limit:
            raise CheckpointError(f"{path}: {num_bytes} bytes, expected at most {limit} for this directory")
        raw = bytes(read_exactly(fd, path, 0, num_bytes))
    return parse_manifest(raw, path), hashlib.sha256(raw).hexdigest()


def _size_limit(directory: Path) -> int:
    """A manifest that is large beside little data is a bomb, not a checkpoint."""
    data = sum(one.lstat().st_size for one in directory.iterdir() if one.suffix == ".safetensors")
    return min(MAX_BYTES, FREE_BYTES + data // MAX_SHARE)


def parse_manifest(raw: bytes, path: Path) -> Manifest:
    """The checked manifest in `raw`; `path` is for messages."""
    fields, place = _decode(raw, path), Place(path, error=CheckpointError)
    if fields.get("format") == FORMAT and fields.get("format_version") != FORMAT_VERSION:
        place.at("format_version").fail(f"version {FORMAT_VERSION}", fields.get("format_version"))
    schema.check(SCHEMA, fields, place)
    files = {name: FileEntry(**one) for name, one in fields["files"].items()}
    tensors = {
        name: _tensor(value, files, place.at(f"tensors.{name}")) for name, value in fields["tensors"].items()
    }
    stated = {name: value for name, value in fields.items() if not name.startswith("format")}
    stated |= {"files": files, "tensors": tensors, "per_rank": tuple(fields["per_rank"])}
    manifest = Manifest(**stated)
    _check_agreement(manifest, place)
    return manifest


def _check_agreement(manifest: Manifest, place: Place) -> None:
    """What is said twice is said alike."""
    if len(manifest.per_rank) != manifest.world_size:
        place.at("per_rank").fail(f"{manifest.world_size} entries (world_size)", len(manifest.per_rank))
    ranks = math.prod(manifest.topology.values())
    if manifest.topology and ranks != manifest.world_size:
        place.at("topology").fail(f"sizes that multiply to {manifest.world_size} (world_size)", ranks)
    for name in ("iteration", "consumed_train_samples"):
        stated, again = getattr(manifest, name), manifest.common.get(name, getattr(manifest, name))
        if type(again) is not int or again != stated:
            place.at(f"common.{name}").fail(f"{stated} as in field {name!r}", again)
    digest = config_digest(manifest.common)
    if manifest.config_hash not in ("", digest):
        place.at("config_hash").fail(f"{digest} from common.config", manifest.config_hash)


def config_digest(common: Mapping[str, Any]) -> str:
    """SHA-256 of the configuration in `common`, or of none."""
    return hashlib.sha256(canonical(common.get("config", {}))).hexdigest()


def _decode(raw: bytes, path: Path) -> dict[str, Any]:
    """UTF-8, JSON, an object, and its digest."""
    try:
        fields = json.loads(raw.decode(), object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
        stated = fields.pop("digest", None) if isinstance(fields, dict) else None
        found = hashlib.sha256(canonical(fields)).hexdigest()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise CheckpointError(f"{path}: JSON nested too deeply") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON, or a number is out of range: {error}") from None
    if not isinstance(fields, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(fields).__name__}")
    if stated != found:
        Place(path, "digest", CheckpointError).fail(f"{found} from the content", stated)
    return fields


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a key appears twice in one object")
    return out


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _tensor(value: Mapping[str, Any], files: Mapping[str, FileEntry], place: Place) -> TensorEntry:
    """A tensor whose chunks lie in their files and fill it exactly once."""
    dtype, shape = value["dtype"], tuple(value["shape"])
    if math.prod(shape) * ITEM_BYTES[dtype] > schema.MAX_INT:
        place.at("shape").fail(f"at most {schema.MAX_INT} bytes", shape)
    chunks = []
    for index, fields in enumerate(value["chunks"]):
        chunk = ChunkEntry(**{**fields, "offset": tuple(fields["offset"]), "shape": tuple(fields["shape"])})
        chunks.append(chunk)
        at, end = place.at("chunks")[index], chunk.begin + chunk.numel * ITEM_BYTES[dtype]
        if chunk.file not in files:
            at.at("file").fail(f"one of the {len(files)} files listed", chunk.file)
        if end > (num_bytes := files[chunk.file].bytes):
            at.at("begin").fail(f"bytes inside {chunk.file} ({num_bytes} bytes)", [chunk.begin, end])
    if problem := fill_error(shape, chunks):
        place.at("chunks").fail(f"chunks that fill shape {shape} exactly once", found_words=problem)
    return TensorEntry(dtype, shape, tuple(chunks))
