"""Tensors of any `TensorSource`, whole or a rectangle of them, read in the order of files."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.files import open_regular
from megatron.core.dist_checkpointing.pieces import TORCH_DTYPES
from megatron.core.dist_checkpointing.source import SourceTensor, TensorSource
from megatron.core.dist_checkpointing.storage import ChunkReader
from megatron.core.rectangles import Rectangle


class SourceReader(contextlib.ExitStack):
    """Files are opened when they are first needed, and stay open until it is closed.

    Until then torch has a thread: values are only copied, and threads that wait for each other take the disk's time.
    """

    def __init__(self, source: TensorSource) -> None:
        super().__init__()
        self.source = source
        self._readers: dict[str, ChunkReader] = {}
        self.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)

    def read(self, tensor: str | SourceTensor, box: Rectangle | None = None) -> Tensor:
        """A tensor, or a rectangle of it, in the dtype in which it is stored. tensor: its name, or what else is made of
        values in the source's files. Raises CheckpointError."""
        entry = self.source.tensors[tensor] if isinstance(tensor, str) else tensor
        box = box or Rectangle((0,) * len(entry.shape), entry.shape)
        dtype = TORCH_DTYPES[entry.dtype]
        out: Tensor | None = None
        for chunk in sorted(entry.chunks, key=lambda one: (one.file, one.begin)):
            common = Rectangle(chunk.offset, chunk.shape).common(box)
            if common is not None and chunk.file:
                inside = relative(common, chunk.offset)
                values = self._reader(chunk.file).read(chunk, dtype, inside)
                if common == box:
                    return values
                out = torch.zeros(box.shape, dtype=dtype) if out is None else out
                view(out, relative(common, box.offset)).copy_(values)
        return torch.zeros(box.shape, dtype=dtype) if out is None else out

    def _reader(self, file: str) -> ChunkReader:
        if file not in self._readers:
            path = self.source.directory / file
            fd = self.enter_context(open_regular(path, follow=self.source.follows_links))
            self._readers[file] = ChunkReader(fd, path)
        return self._readers[file]


def relative(box: Rectangle, origin: tuple[int, ...]) -> Rectangle:
    """The same rectangle, its place counted from `origin`."""
    return Rectangle(tuple(a - b for a, b in zip(box.offset, origin, strict=True)), box.shape)


def view(tensor: Tensor, box: Rectangle) -> Tensor:
    """A rectangle of a tensor."""
    for dim, (start, count) in enumerate(zip(box.offset, box.shape, strict=True)):
        tensor = tensor.narrow(dim, start, count)
    return tensor
