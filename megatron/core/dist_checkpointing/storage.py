"""Shards of a checkpoint written out of tensors, and read into them in parts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.chunk_reader import ChunkReader
from megatron.core.dist_checkpointing.files import write_file
from megatron.core.dist_checkpointing.manifest import FileEntry
from megatron.core.dist_checkpointing.pieces import TORCH_DTYPES
from megatron.core.dist_checkpointing.shard_files import PieceFacts, ShardFile
from megatron.core.dist_checkpointing.source import StoredChunk
from megatron.core.rectangles import Rectangle


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


class Read(NamedTuple):
    """A rectangle `box` of a chunk, and the tensor of its shape that it is read into. dtype: as it is stored."""

    chunk: StoredChunk
    dtype: str
    box: Rectangle
    target: Tensor


def fill(directory: Path, reads: Iterable[Read], *, follow: bool = False) -> None:
    """Read them all, one file after the other. follow: files may be links. Raises CheckpointError."""
    ordered = sorted(reads, key=lambda read: (read.chunk.file, read.chunk.begin))
    for file, of_file in itertools.groupby(ordered, lambda read: read.chunk.file):
        with ChunkReader(directory / file, follow=follow) as reader:
            for chunk, dtype, box, target in of_file:
                values = torch.from_numpy(reader.read(chunk, dtype, box)).view(TORCH_DTYPES[dtype])
                assert target.shape == values.shape, f"{chunk}: {target.shape}, {values.shape}"
                target.copy_(values)
