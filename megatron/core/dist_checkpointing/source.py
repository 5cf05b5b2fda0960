"""What a checkpoint is to whoever loads it: tensors made of chunks, and where a chunk's values lie (floor 0, pure).

Our own checkpoints are one `TensorSource` (`catalog.Found`); a folder of another format is another, whose chunks are
rectangles of arrays that it stores by its own names, in its own order of dims.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

from megatron.core.dist_checkpointing.manifest import ChunkEntry
from megatron.core.dist_checkpointing.safetensors_format import StoredArray
from megatron.core.rectangles import Dims, Rectangle


@dataclasses.dataclass(frozen=True)
class ArrayChunk(Rectangle):
    """A rectangle of a tensor, and the stored row-major array that has its values.

    offset, shape: in the tensor. file: in which the array lies from byte `begin`; "" for zeros that lie nowhere.
    stored: the array's shape. at: the rectangle's first element in it. transposed: the array is [in, out] where the
    tensor is [out, in].
    """

    file: str
    begin: int
    stored: Dims
    at: Dims
    transposed: bool = False


@dataclasses.dataclass(frozen=True)
class ArrayTensor:
    """A tensor of another format's arrays. dtype: safetensors' name for it (`F32`)."""

    dtype: str
    shape: Dims
    chunks: tuple[ArrayChunk, ...]

    @classmethod
    def whole(cls, array: StoredArray, file: str) -> ArrayTensor:
        """One that an array of this file has all of."""
        zeros = (0,) * len(array.shape)
        chunk = ArrayChunk(zeros, array.shape, file, array.begin, array.shape, zeros)
        return cls(array.dtype, array.shape, (chunk,))


StoredChunk = ChunkEntry | ArrayChunk


class SourceTensor(Protocol):
    """A `TensorEntry` of ours, or an `ArrayTensor`."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> Dims: ...
    @property
    def chunks(self) -> tuple[StoredChunk, ...]: ...


class TensorSource(Protocol):
    """A checkpoint that pieces can be filled from. described_in: the file that lists its tensors, for messages."""

    @property
    def directory(self) -> Path: ...
    @property
    def described_in(self) -> Path: ...
    @property
    def follows_links(self) -> bool:
        """Whether its files may be links."""

    @property
    def tensors(self) -> Mapping[str, SourceTensor]: ...
    @property
    def files(self) -> Collection[str]: ...

    def verify_file(self, name: str) -> None:
        """Check what can be checked of one file. Raises CheckpointError naming it."""


class ChunkPart(NamedTuple):
    """What a chunk has of a rectangle of its tensor. inside: where it is in the chunk; at: in the rectangle."""

    chunk: StoredChunk
    inside: Rectangle
    at: Rectangle


def parts_of(tensor: SourceTensor, box: Rectangle) -> Iterator[ChunkPart]:
    """All that make up a rectangle of a tensor."""
    for chunk in tensor.chunks:
        common = chunk.common(box)
        if common is not None:
            yield ChunkPart(chunk, common.seen_from(chunk.offset), common.seen_from(box.offset))
