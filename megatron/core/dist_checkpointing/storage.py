"""Shards of a checkpoint: how they are laid out, written, and read in parts."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.files import read_into, write_file
from megatron.core.dist_checkpointing.manifest import ChunkEntry, FileEntry, TensorEntry
from megatron.core.dist_checkpointing.pieces import PieceFacts
from megatron.core.dist_checkpointing.safetensors_format import build_header
from megatron.core.dist_checkpointing.source import StoredChunk
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
