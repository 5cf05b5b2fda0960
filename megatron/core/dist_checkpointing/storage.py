"""Shards and manifest of a checkpoint, and DCP's storage interface over them: no pickle, SHA-256 of every file.

Why not DCP's own storage: it unpickles on load, finds no flipped bit, and loses the checkpoint when killed
while overwriting one (docs/checkpoints.md). The reader also serves the stock entry point
(`torch.distributed.checkpoint.load(state, storage_reader=SafeStorageReader(directory))`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from megatron.core.dist_checkpointing import manifest as stated
from megatron.core.dist_checkpointing.files import open_regular, read_into, write_file
from megatron.core.dist_checkpointing.manifest import ChunkEntry, FileEntry, TensorEntry
from megatron.core.dist_checkpointing.planning import TORCH_DTYPES, PieceFacts, chunk_metadata
from megatron.core.dist_checkpointing.safetensors_format import build_header
from megatron.core.dist_checkpointing.source import SourceTensor, StoredChunk
from megatron.core.rectangles import Dims, Rectangle


def shard_name(rank: int) -> str:
    """The file that a rank writes."""
    return f"shard_{rank:05d}.safetensors"


@dataclasses.dataclass(frozen=True)
class ShardFile:
    """Where everything lies in one rank's file: its pieces in file order, and where each begins."""

    header: bytes
    pieces: tuple[PieceFacts, ...]
    begins: tuple[int, ...]
    num_bytes: int


def lay_out(pieces: Iterable[PieceFacts]) -> ShardFile:
    """The same for everyone who knows the plan (pure)."""
    ordered = sorted(pieces, key=lambda one: one.stored.rank)
    header, places = build_header([one.stored for one in ordered])
    return ShardFile(header, tuple(ordered), tuple(places[:-1]), places[-1] if ordered else 0)


def memory_of(flat: Tensor) -> memoryview:
    """The bytes of a 1-D host tensor, shared with it."""
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array)


def write_shard(path: Path, layout: ShardFile, resolve: Callable[[PieceFacts], Tensor]) -> FileEntry | None:
    """Write one rank's file, durably, one tensor in host memory at a time. No tensors, no file: None."""
    if not layout.pieces:
        return None

    def parts() -> Iterator[bytes | memoryview]:
        yield layout.header
        for piece in layout.pieces:
            flat = resolve(piece).detach().contiguous().cpu().reshape(-1)  # sync: to be written
            yield memory_of(flat) if flat.numel() else b""

    num_bytes, digest = write_file(path, parts())
    assert num_bytes == layout.num_bytes, f"{path}: {num_bytes} bytes, planned {layout.num_bytes}"
    return FileEntry(num_bytes, digest)


def describe_tensors(plans: Sequence[Sequence[PieceFacts]]) -> dict[str, TensorEntry]:
    """What the manifest says of tensors that are written by these plans, one a rank."""
    found: list[tuple[PieceFacts, ChunkEntry]] = []
    for rank, plan in enumerate(plans):
        layout, file = lay_out(plan), shard_name(rank)
        for one, begin in zip(layout.pieces, layout.begins, strict=True):
            found.append((one, ChunkEntry(one.offset, one.shape, file, one.stored.key, begin)))
    found.sort(key=lambda pair: pair[0])  # by name, then by place
    return {
        name: TensorEntry(dtype, shape, tuple(chunk for _, chunk in pairs))
        for (name, dtype, shape), pairs in itertools.groupby(found, lambda pair: pair[0][:3])
    }


class SafeStorageReader(StorageReader):
    """Reads the parts that a plan asks for. Digests were checked before, by `load.verify`."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        tensors: Mapping[str, SourceTensor] | None = None,
        *,
        follow: bool = False,
    ) -> None:
        self.directory, self._tensors, self._follow = Path(directory), tensors, follow

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.directory, self._tensors = Path(checkpoint_id), None

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        """DCP's metadata, from JSON instead of its pickle."""
        if self._tensors is None:
            self._tensors = stated.read_manifest(self.directory)[0].tensors
        state: dict[str, Any] = {}
        where: dict[dcp.MetadataIndex, tuple[StoredChunk, torch.dtype]] = {}
        for name, entry in self._tensors.items():
            dtype = TORCH_DTYPES[entry.dtype]
            chunks = [chunk_metadata(chunk.offset, chunk.shape) for chunk in entry.chunks]
            properties = dcp.TensorProperties(dtype=dtype)
            state[name] = dcp.TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
            for chunk, place in zip(entry.chunks, chunks, strict=True):
                where[dcp.MetadataIndex(name, place.offsets)] = (chunk, dtype)
        return dcp.Metadata(state_dict_metadata=state, storage_data=where)

    def set_up_storage_reader(self, metadata: dcp.Metadata, *args: Any, **kwargs: Any) -> None:
        self._where: dict[dcp.MetadataIndex, tuple[StoredChunk, torch.dtype]] = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        placed = [(*self._where[item.storage_index], item) for item in plan.items]
        placed.sort(key=lambda one: (one[0].file, one[0].begin))
        for name, parts in itertools.groupby(placed, lambda one: one[0].file):
            path = self.directory / name
            with open_regular(path, follow=self._follow) if name else contextlib.nullcontext() as fd:
                reader = None if fd is None else ChunkReader(fd, path)
                for chunk, dtype, item in parts:
                    target = planner.resolve_tensor(item).detach()
                    if reader is None:
                        target.zero_()
                    else:
                        box = Rectangle(tuple(item.storage_offsets), tuple(item.lengths))
                        source = reader.read(chunk, dtype, box)
                        assert target.shape == source.shape, f"{item}: {target.shape}, {source.shape}"
                        target.copy_(source)
                    planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return (Path(checkpoint_id) / stated.MANIFEST_NAME).is_file()


class ChunkReader:
    """Reads parts of the arrays of an open file, one array in memory at a time."""

    def __init__(self, fd: int, path: Path) -> None:
        self._fd, self._path = fd, path
        self._array: tuple[int, Tensor] | None = None

    def read(self, chunk: StoredChunk, dtype: torch.dtype, box: Rectangle | None = None) -> Tensor:
        """The values of a chunk, or of a rectangle of it. Only the rows (dim 0 of the array) that it spans are read,
        but for a chunk of some columns: others of the same array follow, so all of it is kept until the next array."""
        offset, shape = (box.offset, box.shape) if box is not None else ((0,) * len(chunk.shape), chunk.shape)
        if chunk.transposed:
            offset, shape = offset[::-1], shape[::-1]
        offset = tuple(first + a for first, a in zip(chunk.at, offset, strict=True))
        if chunk.transposed or chunk.stored[1:] != chunk.shape[1:]:
            part, rows = self._whole(chunk, dtype), 0
        else:
            part, rows = self._rows(chunk, dtype, offset[:1], shape[:1]), 1
        for dim in range(rows, part.dim()):
            part = part.narrow(dim, offset[dim], shape[dim])
        return part.t() if chunk.transposed else part

    def _whole(self, chunk: StoredChunk, dtype: torch.dtype) -> Tensor:
        if self._array is None or self._array[0] != chunk.begin:
            self._array = None
            self._array = chunk.begin, self._rows(chunk, dtype, (0,), chunk.stored[:1])
        return self._array[1]

    def _rows(self, chunk: StoredChunk, dtype: torch.dtype, first: Dims, count: Dims) -> Tensor:
        part = torch.empty((*count, *chunk.stored[1:]), dtype=dtype)
        if part.numel():
            row_bytes = math.prod(chunk.stored[1:]) * dtype.itemsize
            begin = chunk.begin + (first[0] * row_bytes if first else 0)
            read_into(self._fd, self._path, begin, memory_of(part.view(-1)))
        return part
