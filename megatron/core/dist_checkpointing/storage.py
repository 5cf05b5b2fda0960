"""Shards and manifest of a checkpoint, and DCP's storage interface over them: no pickle, SHA-256 of every file.

Why not DCP's own storage: it unpickles on load, finds no flipped bit, and loses the checkpoint when killed
while overwriting one (docs/checkpoints.md). The reader also serves the stock entry point
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
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, WriteItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from megatron.core.dist_checkpointing import manifest as stated
from megatron.core.dist_checkpointing.files import HashingFile, open_regular, read_into
from megatron.core.dist_checkpointing.manifest import ChunkEntry, FileEntry, Manifest
from megatron.core.dist_checkpointing.planning import TORCH_DTYPES, chunk_metadata, dtype_name, tensor_data
from megatron.core.dist_checkpointing.safetensors_format import StoredTensor, build_header, file_order


def shard_name(rank: int) -> str:
    """The file that a rank writes."""
    return f"shard_{rank:05d}.safetensors"


@dataclasses.dataclass(frozen=True)
class ShardFile:
    """Where everything lies in one rank's file: the plan's items in file order."""

    header: bytes
    items: tuple[WriteItem, ...]
    tensors: tuple[StoredTensor, ...]
    begins: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return self.begins[-1] + self.tensors[-1].num_bytes if self.tensors else 0


def lay_out(items: Sequence[WriteItem]) -> ShardFile:
    """The same for everyone who knows the plan (pure)."""
    tensors = [_stored(item) for item in items]
    order = file_order(tensors)
    ordered = tuple(tensors[i] for i in order)
    header, begins = build_header(ordered)
    return ShardFile(header, tuple(items[i] for i in order), ordered, tuple(begins))


def _stored(item: WriteItem) -> StoredTensor:
    data = tensor_data(item)
    offset, shape = tuple(data.chunk.offsets), tuple(data.chunk.sizes)
    box = ",".join(f"{begin}:{begin + size}" for begin, size in zip(offset, shape, strict=True))
    return StoredTensor(f"{item.index.fqn}[{box}]", dtype_name(data.properties.dtype), shape)


def _memory(flat: Tensor) -> memoryview:
    """The bytes of a 1-D host tensor, shared with it."""
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array)


def write_shard(path: Path, layout: ShardFile, resolve: Callable[[WriteItem], Tensor]) -> FileEntry | None:
    """Write one rank's file, durably, one tensor in host memory at a time. No tensors, no file: None."""
    if not layout.items:
        return None
    with contextlib.closing(HashingFile(path)) as file:
        file.write(layout.header)
        for item in layout.items:
            flat = resolve(item).detach().contiguous().cpu().reshape(-1)  # sync: to be written
            file.write(_memory(flat) if flat.numel() else b"")
        digest = file.sync()
    assert file.num_bytes == layout.num_bytes, f"{path}: {file.num_bytes} bytes, planned {layout.num_bytes}"
    return FileEntry(path.name, file.num_bytes, digest)


def build_manifest(plans: Sequence[SavePlan], files: Sequence[FileEntry | None], facts: Manifest) -> Manifest:
    """The manifest of all that was written. files: of each rank. facts: what it says beside tensors and files."""
    chunks: dict[str, list[ChunkEntry]] = {}
    tensors: dict[str, stated.TensorEntry] = {}
    for plan, file in zip(plans, files, strict=True):
        layout = lay_out(plan.items)
        for item, stored, begin in zip(layout.items, layout.tensors, layout.begins, strict=True):
            assert file is not None, f"{item.index}: planned, and no file was written"
            data, name = tensor_data(item), item.index.fqn
            place = ChunkEntry(tuple(data.chunk.offsets), stored.shape, file.name, stored.key, begin)
            chunks.setdefault(name, []).append(place)
            tensors.setdefault(name, stated.TensorEntry(stored.dtype, tuple(data.size), ()))
    for name, tensor in tensors.items():
        in_order = tuple(sorted(chunks[name], key=lambda chunk: chunk.offset))
        tensors[name] = dataclasses.replace(tensor, chunks=in_order)
    return dataclasses.replace(facts, files={file.name: file for file in files if file}, tensors=tensors)


class SafeStorageReader(StorageReader):
    """Reads the parts that a plan asks for. Digests were checked before, by `load.verify`."""

    def __init__(self, directory: str | os.PathLike[str], manifest: Manifest | None = None) -> None:
        self.directory = Path(directory)
        self._manifest = manifest

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.directory, self._manifest = Path(checkpoint_id), None

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        """DCP's metadata, from JSON instead of its pickle."""
        manifest = self._manifest = self._manifest or stated.read_manifest(self.directory)[0]
        state: dict[str, Any] = {}
        where: dict[dcp.MetadataIndex, tuple[ChunkEntry, torch.dtype]] = {}
        for name, entry in manifest.tensors.items():
            dtype = TORCH_DTYPES[entry.dtype]
            chunks = list(map(chunk_metadata, entry.chunks))
            properties = dcp.TensorProperties(dtype=dtype)
            state[name] = dcp.TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
            for chunk in entry.chunks:
                where[dcp.MetadataIndex(name, torch.Size(chunk.offset))] = (chunk, dtype)
        return dcp.Metadata(state_dict_metadata=state, storage_data=where)

    def set_up_storage_reader(
        self, metadata: dcp.Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        self._where: dict[dcp.MetadataIndex, tuple[ChunkEntry, torch.dtype]] = metadata.storage_data

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
                    source = _read_part(fd, path, *self._where[item.storage_index], item)
                    target = planner.resolve_tensor(item).detach()
                    assert target.shape == source.shape, (
                        f"{item.dest_index}: {target.shape} != {source.shape}"
                    )
                    target.copy_(source)
                    planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return (Path(checkpoint_id) / stated.MANIFEST_NAME).is_file()


def _read_part(fd: int, path: Path, chunk: ChunkEntry, dtype: torch.dtype, item: ReadItem) -> Tensor:
    """The rectangle of a chunk that an item asks for. Only the rows it spans (dim 0) are read."""
    offsets, lengths = tuple(item.storage_offsets), tuple(item.lengths)
    part = torch.empty((*lengths[:1], *chunk.shape[1:]), dtype=dtype)
    if part.numel():
        row_bytes = math.prod(chunk.shape[1:]) * dtype.itemsize
        begin = chunk.begin + (offsets[0] * row_bytes if offsets else 0)
        read_into(fd, path, begin, _memory(part.view(-1)))
    for dim in range(1, part.dim()):
        part = part.narrow(dim, offsets[dim], lengths[dim])
    return part
