"""DCP's storage interface over safe files: safetensors shards, SHA-256, a JSON manifest, no pickle.

Why not DCP's own storage: it unpickles on load, finds no flipped bit, and loses the checkpoint when killed
while overwriting one (docs/checkpoints.md). Both classes also serve the stock entry points
(`torch.distributed.checkpoint.load(state, storage_reader=SafeStorageReader(directory))`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from megatron.core.dist_checkpointing.files import HashingFile, open_regular, read_into, write_file
from megatron.core.dist_checkpointing.manifest import (
    MANIFEST_NAME,
    ChunkEntry,
    FileEntry,
    Manifest,
    TensorEntry,
    read_manifest,
)
from megatron.core.dist_checkpointing.planning import TORCH_DTYPES, chunk_metadata, dtype_name, tensor_data
from megatron.core.dist_checkpointing.safetensors_format import Entry, build_header, file_order


def shard_name(rank: int) -> str:
    """The file that a rank writes."""
    return f"shard_{rank:05d}.safetensors"


@dataclasses.dataclass(frozen=True)
class ShardLayout:
    """Where everything lies in one rank's file: the plan's items in file order."""

    header: bytes
    items: tuple[WriteItem, ...]
    entries: tuple[Entry, ...]
    begins: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return self.begins[-1] + self.entries[-1].num_bytes if self.entries else 0


def lay_out(items: Sequence[WriteItem]) -> ShardLayout:
    """The same for everyone who knows the plan (pure)."""
    entries = [_entry(item) for item in items]
    order = file_order(entries)
    ordered = [entries[i] for i in order]
    header, begins = build_header(ordered)
    return ShardLayout(header, tuple(items[i] for i in order), tuple(ordered), tuple(begins))


def _entry(item: WriteItem) -> Entry:
    data = tensor_data(item)
    offset, shape = tuple(data.chunk.offsets), tuple(data.chunk.sizes)
    box = ",".join(f"{begin}:{begin + size}" for begin, size in zip(offset, shape, strict=True))
    return Entry(f"{item.index.fqn}[{box}]", dtype_name(data.properties.dtype), shape)


@dataclasses.dataclass(frozen=True)
class WrittenChunk:
    """Where a chunk was written."""

    file: FileEntry
    key: str
    begin: int


def write_results(layout: ShardLayout, file: FileEntry) -> list[WriteResult]:
    """DCP's record of a rank's writes."""
    return [
        WriteResult(item.index, entry.num_bytes, WrittenChunk(file, entry.key, begin))
        for item, entry, begin in zip(layout.items, layout.entries, layout.begins, strict=True)
    ]


def tensor_bytes(tensor: Tensor) -> memoryview:
    """A tensor's elements, row-major, in host memory."""
    flat = tensor.detach().contiguous().cpu().reshape(-1)  # sync: the bytes must be here to be written
    return _memory(flat) if flat.numel() else memoryview(b"")


def _memory(flat: Tensor) -> memoryview:
    """The bytes of a 1-D host tensor, shared with it."""
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array)


def write_shard(path: Path, layout: ShardLayout, resolve: Callable[[WriteItem], Tensor]) -> FileEntry | None:
    """Write one rank's file, durably, one tensor in host memory at a time. No tensors, no file: None."""
    if not layout.entries:
        return None
    with contextlib.closing(HashingFile(path)) as file:
        file.write(layout.header)
        for item in layout.items:
            file.write(tensor_bytes(resolve(item)))
        digest = file.sync()
    assert file.num_bytes == layout.num_bytes, (
        f"{path}: wrote {file.num_bytes} bytes, planned {layout.num_bytes}"
    )
    return FileEntry(path.name, file.num_bytes, digest)


@dataclasses.dataclass(frozen=True)
class ManifestFacts:
    """What a manifest says beside tensors and files."""

    iteration: int = 0
    consumed_train_samples: int = 0
    world_size: int = 1
    topology: dict[str, Any] = dataclasses.field(default_factory=dict)
    config_hash: str = ""
    code_version: str = ""
    torch_version: str = torch.__version__
    common: dict[str, Any] = dataclasses.field(default_factory=dict)
    per_rank: tuple[Any, ...] = ({},)


class SafeStorageWriter(StorageWriter):
    """Writes one rank's shard into `directory` (which is there); `finish` adds the manifest, on rank 0.

    Committing the directory is the business of `commit`.
    """

    def __init__(self, directory: str | os.PathLike[str], rank: int = 0) -> None:
        self.directory = Path(directory)
        self.rank = rank
        self.facts = ManifestFacts()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.directory = Path(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        layout = lay_out(plan.items)

        def resolve(item: WriteItem) -> Tensor:
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, Tensor), f"{item.index}: only tensors enter DCP"
            return tensor

        future: Future[list[WriteResult]] = Future()
        file = write_shard(self.directory / shard_name(self.rank), layout, resolve)
        future.set_result([] if file is None else write_results(layout, file))
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        write_file(self.directory / MANIFEST_NAME, build_manifest(metadata, results, self.facts).to_bytes())

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return "://" not in str(checkpoint_id)


def build_manifest(
    metadata: Metadata, results: Sequence[Sequence[WriteResult]], facts: ManifestFacts
) -> Manifest:
    """The manifest of everything that was written."""
    written: dict[MetadataIndex, WrittenChunk] = {r.index: r.storage_data for one in results for r in one}
    tensors = {}
    for name, saved in metadata.state_dict_metadata.items():
        assert isinstance(saved, TensorStorageMetadata), f"{name}: only tensors enter DCP, found {saved}"
        chunks = []
        for chunk in saved.chunks:
            place = written[MetadataIndex(name, chunk.offsets)]
            offset, shape = tuple(chunk.offsets), tuple(chunk.sizes)
            chunks.append(ChunkEntry(place.file.name, place.key, place.begin, offset, shape))
        chunks.sort(key=lambda chunk: chunk.offset)
        tensors[name] = TensorEntry(dtype_name(saved.properties.dtype), tuple(saved.size), tuple(chunks))
    return Manifest(
        files={place.file.name: place.file for place in written.values()},
        tensors=tensors,
        **{field.name: getattr(facts, field.name) for field in dataclasses.fields(ManifestFacts)},
    )


def dcp_metadata(manifest: Manifest) -> Metadata:
    """DCP's metadata, from JSON instead of its pickle."""
    state: dict[str, Any] = {}
    where: dict[MetadataIndex, tuple[ChunkEntry, torch.dtype]] = {}
    for name, entry in manifest.tensors.items():
        dtype = TORCH_DTYPES[entry.dtype]
        chunks = [chunk_metadata(chunk.offset, chunk.shape) for chunk in entry.chunks]
        state[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(entry.shape), chunks)
        for chunk in entry.chunks:
            where[MetadataIndex(name, torch.Size(chunk.offset))] = (chunk, dtype)
    return Metadata(state_dict_metadata=state, storage_data=where)


class SafeStorageReader(StorageReader):
    """Reads the parts that a plan asks for. Digests were checked before, by `load.verify`."""

    def __init__(self, directory: str | os.PathLike[str], manifest: Manifest | None = None) -> None:
        self.directory = Path(directory)
        self._manifest = manifest

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.directory, self._manifest = Path(checkpoint_id), None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._manifest is None:
            self._manifest = read_manifest(self.directory)[0]
        return dcp_metadata(self._manifest)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        self._where: dict[MetadataIndex, tuple[ChunkEntry, torch.dtype]] = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self._where[item.storage_index][0].file, []).append(item)
        for name, items in sorted(by_file.items()):
            path = self.directory / name
            with open_regular(path) as fd:
                for item in sorted(items, key=lambda item: self._where[item.storage_index][0].begin):
                    self._read_item(fd, path, item, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_item(self, fd: int, path: Path, item: ReadItem, planner: LoadPlanner) -> None:
        chunk, dtype = self._where[item.storage_index]
        source = _read_part(fd, path, chunk, dtype, tuple(item.storage_offsets), tuple(item.lengths))
        target = planner.resolve_tensor(item).detach()
        assert target.shape == source.shape, f"{item.dest_index}: {target.shape} != {source.shape}"
        target.copy_(source)
        planner.commit_tensor(item, target)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return (Path(checkpoint_id) / MANIFEST_NAME).is_file()


def _read_part(
    fd: int,
    path: Path,
    chunk: ChunkEntry,
    dtype: torch.dtype,
    offsets: tuple[int, ...],
    lengths: tuple[int, ...],
) -> Tensor:
    """The rectangle at `offsets` of a chunk. Only the rows it spans (dim 0) are read."""
    shape = (*lengths[:1], *chunk.shape[1:])
    row_bytes = math.prod(chunk.shape[1:]) * dtype.itemsize
    part = torch.empty(shape, dtype=dtype)
    if part.numel():
        begin = chunk.begin + (offsets[0] * row_bytes if offsets else 0)
        read_into(fd, path, begin, _memory(part.view(-1)))
    for dim in range(1, len(shape)):
        part = part.narrow(dim, offsets[dim], lengths[dim])
    return part
