"""manifest.json: what a checkpoint is made of; a directory without a valid one is no checkpoint (floor 0).

    {"format": "megatron-zero-checkpoint", "format_version": 1, "iteration", "consumed_train_samples",
     "world_size", "topology", "config_hash", "code_version", "torch_version",
     "files":   {file: {"bytes", "sha256"}},
     "tensors": {name: {"dtype", "shape", "chunks": [{"file", "key", "begin", "offset", "shape"}]}},
     "common":  any JSON, "per_rank": [any JSON, one a rank], "digest": SHA-256 of all the rest}

The digest is taken over the canonical text (sorted keys, no blanks), so a changed bit anywhere in the
manifest is found like one in a shard. Everything read from the file is checked before it is used: types,
ranges, file names, and that the chunks of each tensor lie in their files and fill it exactly once.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.files import open_regular, read_exactly
from megatron.core.dist_checkpointing.pieces import Rectangle, fill_error
from megatron.core.dist_checkpointing.safetensors_format import ITEM_BYTES, LENGTH_BYTES

MANIFEST_NAME = "manifest.json"
FORMAT = "megatron-zero-checkpoint"
FORMAT_VERSION = 1

MAX_BYTES = 512 << 20
FREE_BYTES = 8 << 20  # a manifest beyond this must be small against the data that it describes
MAX_SHARE = 8  # ... by this factor
MAX_DIMS = 16
MAX_INT = 1 << 56
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}\.safetensors")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclasses.dataclass(frozen=True)
class FileEntry:
    """A file of the checkpoint."""

    name: str
    num_bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class ChunkEntry:
    """A rectangle of a tensor and where its bytes are: in `file`, from byte `begin`, under `key` in its header."""

    file: str
    key: str
    begin: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]


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
        return sign(
            {
                "format": FORMAT,
                "format_version": FORMAT_VERSION,
                "iteration": self.iteration,
                "consumed_train_samples": self.consumed_train_samples,
                "world_size": self.world_size,
                "topology": dict(self.topology),
                "config_hash": self.config_hash,
                "code_version": self.code_version,
                "torch_version": self.torch_version,
                "files": {f.name: {"bytes": f.num_bytes, "sha256": f.sha256} for f in self.files.values()},
                "tensors": {
                    name: {
                        "dtype": entry.dtype,
                        "shape": entry.shape,
                        "chunks": [dataclasses.asdict(chunk) for chunk in entry.chunks],
                    }
                    for name, entry in self.tensors.items()
                },
                "common": self.common,
                "per_rank": self.per_rank,
            }
        )


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
        num_bytes = path.stat(follow_symlinks=False).st_size
        limit = _size_limit(directory)
        if num_bytes > limit:
            raise CheckpointError(f"{path}: {num_bytes} bytes, expected at most {limit} for this directory")
        raw = bytes(read_exactly(fd, path, 0, num_bytes))
    return parse_manifest(raw, path), hashlib.sha256(raw).hexdigest()


def _size_limit(directory: Path) -> int:
    """A manifest that is large beside little data is a bomb, not a checkpoint."""
    data = sum(
        entry.stat(follow_symlinks=False).st_size
        for entry in directory.iterdir()
        if entry.name.endswith(".safetensors")
    )
    return min(MAX_BYTES, FREE_BYTES + data // MAX_SHARE)


def parse_manifest(raw: bytes, path: Path) -> Manifest:
    """The checked manifest in `raw`; `path` is for messages."""
    fields = _decode(raw, path)
    reader = _Reader(path)
    reader.keys(
        fields, "", {field.name for field in dataclasses.fields(Manifest)} | {"format", "format_version"}
    )
    if fields["format"] != FORMAT or fields["format_version"] != FORMAT_VERSION:
        reader.fail(
            "format", f"{FORMAT!r} version {FORMAT_VERSION}", (fields["format"], fields["format_version"])
        )
    files = {
        name: reader.file(name, value) for name, value in reader.mapping(fields["files"], "files").items()
    }
    tensors = {
        name: reader.tensor(name, value, files)
        for name, value in reader.mapping(fields["tensors"], "tensors").items()
    }
    world_size = reader.integer(fields["world_size"], "world_size", low=1)
    per_rank = reader.array(fields["per_rank"], "per_rank")
    if len(per_rank) != world_size:
        reader.fail("per_rank", f"{world_size} entries (world_size)", len(per_rank))
    return Manifest(
        iteration=reader.integer(fields["iteration"], "iteration"),
        consumed_train_samples=reader.integer(fields["consumed_train_samples"], "consumed_train_samples"),
        world_size=world_size,
        topology=reader.mapping(fields["topology"], "topology"),
        config_hash=reader.text(fields["config_hash"], "config_hash"),
        code_version=reader.text(fields["code_version"], "code_version"),
        torch_version=reader.text(fields["torch_version"], "torch_version"),
        files=files,
        tensors=tensors,
        common=reader.mapping(fields["common"], "common"),
        per_rank=tuple(per_rank),
    )


def _decode(raw: bytes, path: Path) -> dict[str, Any]:
    """UTF-8, JSON, an object, and its digest."""
    try:
        fields = json.loads(
            raw.decode("utf-8"), object_pairs_hook=_unique_keys, parse_constant=_refuse_constant
        )
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise CheckpointError(f"{path}: JSON nested too deeply") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(fields).__name__}")
    stated = fields.pop("digest", None)
    try:
        found = hashlib.sha256(canonical(fields)).hexdigest()
    except ValueError as error:
        raise CheckpointError(f"{path}: a number is out of range: {error}") from None
    if stated != found:
        raise CheckpointError(
            f"{path}: field 'digest': expected {found} from the content, found {stated!r:.80}"
        )
    return fields


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a key appears twice in one object")
    return out


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


@dataclasses.dataclass(frozen=True)
class _Reader:
    """Takes untyped JSON apart; every complaint names the file and the field."""

    path: Path

    def fail(self, where: str, expected: str, found: Any) -> NoReturn:
        raise CheckpointError(f"{self.path}: field {where!r:.200}: expected {expected}, found {found!r:.120}")

    def mapping(self, value: Any, where: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            self.fail(where, "an object", value)
        return value

    def array(self, value: Any, where: str) -> list[Any]:
        if not isinstance(value, list):
            self.fail(where, "an array", value)
        return value

    def keys(self, value: dict[str, Any], where: str, names: set[str]) -> None:
        if value.keys() != names:
            missing, unknown = sorted(names - value.keys()), sorted(value.keys() - names)
            self.fail(where, f"the fields {sorted(names)}", f"missing {missing}, unknown {unknown}")

    def integer(self, value: Any, where: str, low: int = 0, high: int = MAX_INT) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            self.fail(where, f"an integer from {low} to {high}", value)
        return value

    def text(self, value: Any, where: str, pattern: re.Pattern[str] | None = None) -> str:
        if not isinstance(value, str) or (pattern is not None and not pattern.fullmatch(value)):
            self.fail(where, f"text like {pattern.pattern}" if pattern else "text", value)
        return value

    def dims(self, value: Any, where: str) -> tuple[int, ...]:
        items = self.array(value, where)
        if len(items) > MAX_DIMS:
            self.fail(where, f"at most {MAX_DIMS} dims", len(items))
        return tuple(self.integer(item, f"{where}[{index}]") for index, item in enumerate(items))

    def file(self, name: str, value: Any) -> FileEntry:
        where = f"files.{name}"
        if not _FILE_NAME.fullmatch(name):
            self.fail("files", f"a plain file name like {_FILE_NAME.pattern}", name)
        fields = self.mapping(value, where)
        self.keys(fields, where, {"bytes", "sha256"})
        return FileEntry(
            name=name,
            num_bytes=self.integer(fields["bytes"], f"{where}.bytes", low=LENGTH_BYTES),
            sha256=self.text(fields["sha256"], f"{where}.sha256", _SHA256),
        )

    def tensor(self, name: str, value: Any, files: Mapping[str, FileEntry]) -> TensorEntry:
        where = f"tensors.{name}"
        fields = self.mapping(value, where)
        self.keys(fields, where, {"dtype", "shape", "chunks"})
        dtype = self.text(fields["dtype"], f"{where}.dtype")
        if dtype not in ITEM_BYTES:
            self.fail(f"{where}.dtype", f"one of {sorted(ITEM_BYTES)}", dtype)
        shape = self.dims(fields["shape"], f"{where}.shape")
        if math.prod(shape) * ITEM_BYTES[dtype] > MAX_INT:
            self.fail(f"{where}.shape", f"at most {MAX_INT} bytes", shape)
        chunks = tuple(
            self.chunk(chunk, f"{where}.chunks[{index}]", dtype, files)
            for index, chunk in enumerate(self.array(fields["chunks"], f"{where}.chunks"))
        )
        if problem := fill_error(shape, [Rectangle(chunk.offset, chunk.shape) for chunk in chunks]):
            self.fail(f"{where}.chunks", f"chunks that fill shape {shape} exactly once", problem)
        return TensorEntry(dtype, shape, chunks)

    def chunk(self, value: Any, where: str, dtype: str, files: Mapping[str, FileEntry]) -> ChunkEntry:
        fields = self.mapping(value, where)
        self.keys(fields, where, {field.name for field in dataclasses.fields(ChunkEntry)})
        file = self.text(fields["file"], f"{where}.file")
        if file not in files:
            self.fail(f"{where}.file", f"one of the {len(files)} files listed", file)
        shape = self.dims(fields["shape"], f"{where}.shape")
        begin = self.integer(fields["begin"], f"{where}.begin", low=LENGTH_BYTES)
        end = begin + math.prod(shape) * ITEM_BYTES[dtype]
        if end > files[file].num_bytes:
            self.fail(
                f"{where}.begin", f"bytes inside {file} ({files[file].num_bytes} bytes)", f"[{begin}, {end})"
            )
        return ChunkEntry(
            file=file,
            key=self.text(fields["key"], f"{where}.key"),
            begin=begin,
            offset=self.dims(fields["offset"], f"{where}.offset"),
            shape=shape,
        )
