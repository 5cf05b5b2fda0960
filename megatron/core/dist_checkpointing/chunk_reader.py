"""Values of chunks as they are stored: bits in numpy arrays, of which nobody has to know what they mean (floor 1)."""

from __future__ import annotations

import contextlib
import math
import operator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron.core.dist_checkpointing.files import open_regular, read_into
from megatron.core.dist_checkpointing.safetensors_format import ITEM_BYTES
from megatron.core.dist_checkpointing.source import StoredChunk
from megatron.core.rectangles import Rectangle

Bits = NDArray[np.unsignedinteger]  # of the width of a dtype


def no_values(shape: tuple[int, ...], dtype: str) -> Bits:
    """Zeros of a dtype, by safetensors' name."""
    return np.zeros(shape, f"u{ITEM_BYTES[dtype]}")


class ChunkReader(contextlib.ExitStack):
    """Reads parts of the arrays of a file, one array in memory at a time. follow: the file may be a link."""

    def __init__(self, path: Path, *, follow: bool = False) -> None:
        super().__init__()
        self._path, self._follow, self._fd = path, follow, -1
        self._array: tuple[int, Bits] | None = None

    def read(self, chunk: StoredChunk, dtype: str, box: Rectangle) -> Bits:
        """A rectangle of a chunk. Only the rows (dim 0 of the array) that it spans are read, but for a chunk of some
        columns: others of the same array follow, so all of it is kept until the next array. Raises CheckpointError."""
        if not chunk.file:
            return no_values(box.shape, dtype)
        turn = -1 if chunk.transposed else 1
        first = tuple(map(operator.add, chunk.at, box.offset[::turn]))
        wanted = Rectangle(first, box.shape[::turn])
        if chunk.transposed or chunk.stored[1:] != chunk.shape[1:]:
            part = self._whole(chunk, dtype)[wanted.slices]
        else:
            rows = self._rows(chunk, dtype, wanted.offset[:1], wanted.shape[:1])
            part = rows[(slice(None), *wanted.slices[1:])] if first else rows
        return part.T if chunk.transposed else part

    def _whole(self, chunk: StoredChunk, dtype: str) -> Bits:
        if self._array is None or self._array[0] != chunk.begin:
            self._array = None
            self._array = chunk.begin, self._rows(chunk, dtype, (0,), chunk.stored[:1])
        return self._array[1]

    def _rows(self, chunk: StoredChunk, dtype: str, first: tuple[int, ...], count: tuple[int, ...]) -> Bits:
        part: Bits = np.empty((*count, *chunk.stored[1:]), f"u{ITEM_BYTES[dtype]}")
        if part.size:
            if self._fd < 0:
                self._fd = self.enter_context(open_regular(self._path, follow=self._follow))
            begin = chunk.begin + sum(first) * math.prod(chunk.stored[1:]) * part.itemsize
            read_into(self._fd, self._path, begin, part.reshape(-1).data.cast("B"))
        return part
