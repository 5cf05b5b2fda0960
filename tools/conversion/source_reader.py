"""A checkpoint of any format as it is read for a conversion: rectangles of its tensors, while it stays what it is."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megatron import __version__
from megatron.core.dist_checkpointing.catalog import Found
from megatron.core.dist_checkpointing.chunk_reader import Bits, ChunkReader, no_values
from megatron.core.dist_checkpointing.files import CheckpointError
from megatron.core.dist_checkpointing.manifest import canonical
from megatron.core.dist_checkpointing.source import SourceTensor, TensorSource, parts_of
from megatron.core.rectangles import Rectangle
from megatron.interchange.foreign import Foreign

_MOST_OPEN = 200  # files


class SourceReader(contextlib.ExitStack):
    """Files are opened when they are first needed, and stay open until it is closed, or many others are."""

    def __init__(self, source: TensorSource) -> None:
        super().__init__()
        self.source = source
        self._readers: dict[str, ChunkReader] = {}

    def read(self, tensor: str | SourceTensor, box: Rectangle | None = None) -> Bits:
        """A tensor, or a rectangle of it, as it is stored. tensor: its name, or what else is made of values in the
        source's files. Raises CheckpointError."""
        entry = self.source.tensors[tensor] if isinstance(tensor, str) else tensor
        box = box or Rectangle((0,) * len(entry.shape), entry.shape)
        out: Bits | None = None
        for part in sorted(parts_of(entry, box), key=lambda part: (part.chunk.file, part.chunk.begin)):
            values = self._reader(part.chunk.file).read(part.chunk, entry.dtype, part.inside)
            if values.shape == box.shape:
                return values
            out = no_values(box.shape, entry.dtype) if out is None else out
            out[part.at.slices] = values
        return no_values(box.shape, entry.dtype) if out is None else out

    def _reader(self, file: str) -> ChunkReader:
        if file not in self._readers:
            if len(self._readers) == _MOST_OPEN:
                self._readers.clear()
                self.close()
            path, links = self.source.directory / file, self.source.follows_links
            self._readers[file] = self.enter_context(ChunkReader(path, follow=links))
        return self._readers[file]


def fingerprint(found: Found, *facts: Any) -> str:
    """Of a conversion of a checkpoint as it is now, which other facts decide besides: names the folder that it is
    written in."""
    identity = [__version__, found.manifest_sha256, _state_of(found), *facts]
    return hashlib.sha256(canonical(identity)).hexdigest()[:16]


def _state_of(found: Found) -> list[tuple[int, ...]] | None:
    """What changes where anybody writes its files anew; None where one is gone."""
    try:
        of_files = [
            os.stat(path) for path in (found.described_in, *map(found.directory.joinpath, found.files))
        ]
    except OSError:
        return None
    return [(status.st_ino, status.st_size, status.st_mtime_ns) for status in of_files]


@contextlib.contextmanager
def reading(found: Found, temporary: Path) -> Iterator[SourceReader]:
    """Its tensors, while its files are verified beside. temporary: where the result is made; it goes where what it was
    made of turns out to be wrong, for a later call would take its files for finished.

    Raises CheckpointError, also where the checkpoint is removed or replaced before the end, as by a run that goes on.
    """
    before, failure = _state_of(found), None
    with SourceReader(found) as reader, ThreadPoolExecutor(1) as beside:
        verified = beside.submit(verify, found)
        try:
            yield reader
        except (CheckpointError, OSError) as error:
            failure = error
        wrong = verified.exception()
    if before is None or before != _state_of(found):
        shutil.rmtree(temporary, ignore_errors=True)
        run = ", as a run does that goes on (see --save-retain-interval)"
        again = ": call again, which takes the newest, or name one that stays by --ckpt-step"
        how = ": call again" if isinstance(found, Foreign) else run + again
        raise CheckpointError(f"{found.directory}: removed or replaced while it was read{how}") from failure
    if wrong is not None:
        shutil.rmtree(temporary, ignore_errors=True)
    if (why := failure or wrong) is not None:
        raise why


def verify(found: Found) -> None:
    """All that can be checked of its files. Raises CheckpointError."""
    for file in found.files:
        found.verify_file(file)
