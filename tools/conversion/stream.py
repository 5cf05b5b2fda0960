"""Files of a result written block by block, so that a killed conversion goes on where it was.

A file appears under its name once it is whole and durable; what a killed process leaves is `.NAME.part`, which is
written again. So finished files are never written twice, and the folder they are in becomes the result by one rename.
"""

from __future__ import annotations

import errno
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from megatron.core.dist_checkpointing.files import (
    BLOCK_BYTES,
    DIRECTORY_MODE,
    CheckpointError,
    open_regular,
    sha256_of,
    write_file,
)
from megatron.core.dist_checkpointing.manifest import FileEntry
from megatron.core.dist_checkpointing.safetensors_format import ITEM_BYTES
from megatron.core.dist_checkpointing.source import SourceTensor
from megatron.core.rectangles import Dims, Rectangle
from megatron.core.safe_files import sync_directory
from megatron.core.words import size_text
from tools.conversion.progress import Say, WriteProgress
from tools.conversion.source_reader import SourceReader
from tools.conversion.values import converted

Item = TypeVar("Item")
Bytes = bytes | memoryview


class OutputFile(NamedTuple):
    """A file before it is written. parts: makes its bytes, from front to back."""

    name: str
    num_bytes: int
    parts: Callable[[], Iterable[Bytes]]


def num_bytes_of(shape: Dims, dtype: str) -> int:
    """Of a tensor's values."""
    return math.prod(shape) * ITEM_BYTES[dtype]


def bands(shape: Dims, dtype: str, most: int = BLOCK_BYTES) -> Iterator[Rectangle]:
    """Rows that make so many bytes at most, or one: by default so few that their memory is used again, and is still in
    the cache when it is hashed and written."""
    rows, *columns = shape or (1,)
    step = max(1, most // max(1, num_bytes_of(tuple(columns), dtype)))
    for first in range(0, rows if math.prod(columns) else 0, step):
        box = Rectangle((first, *(0 for _ in columns)), (min(step, rows - first), *columns))
        yield box if shape else Rectangle((), ())


def safetensors_parts(
    header: bytes, tensors: Sequence[tuple[SourceTensor, str]], reader: SourceReader
) -> Iterator[Bytes]:
    """The bytes of a file. tensors: each with the dtype that it has there."""
    yield header
    for tensor, dtype in tensors:
        for band in bands(tensor.shape, dtype):  # read when it is its turn
            values = converted(reader.read(tensor, band), tensor.dtype, dtype)
            yield np.ascontiguousarray(values).reshape(-1).data


def in_files(items: Iterable[Item], size: Callable[[Item], int], max_bytes: int) -> list[list[Item]]:
    """In their order, in files of at most `max_bytes` of data unless one of them is larger. Never empty."""
    files: list[list[Item]] = [[]]
    held = 0
    for item in items:
        if files[-1] and held + size(item) > max_bytes:
            files.append([])
            held = 0
        files[-1].append(item)
        held += size(item)
    return files


def write_files(
    directory: Path, files: Sequence[OutputFile], say: Say, *, hashed: bool = True
) -> dict[str, FileEntry]:
    """Write what no earlier call has finished. hashed: whether SHA-256 of files is wanted.

    Raises CheckpointError, before anything is made where there is no space for it.
    """
    missing = [file for file in files if not os.path.lexists(directory / file.name)]
    num_bytes = sum(file.num_bytes for file in missing)
    _check_space(directory, num_bytes)
    directory.mkdir(parents=True, exist_ok=True, mode=DIRECTORY_MODE)
    if len(missing) < len(files):
        say(f"{len(files) - len(missing)} of {len(files)} files are finished, by an earlier call")
    progress = WriteProgress(num_bytes, len(files), say)
    digests: dict[str, str] = {}
    for number, file in enumerate(files, 1):
        if file in missing:
            progress.begin_file(file.name, number)
            digests[file.name] = _write(directory / file.name, file, progress, hashed)
    progress.end()
    for file in files if hashed else ():
        path = directory / file.name
        if file not in missing:
            with open_regular(path) as fd:
                digests[file.name] = sha256_of(fd, path, file.num_bytes)
    return {file.name: FileEntry(file.num_bytes, digests.get(file.name, "")) for file in files}


def _check_space(directory: Path, needed: int) -> None:
    """Raises CheckpointError where a folder that may not be there yet has no space for so many bytes."""
    there = directory
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    if needed > free:
        raise CheckpointError(
            f"{directory}: no space: {size_text(needed)} needed, {size_text(free)} free on that file system; "
            "make space, and call again"
        )


def _write(path: Path, file: OutputFile, progress: WriteProgress, hashed: bool) -> str:
    """SHA-256; "" unless it is wanted."""

    def parts() -> Iterator[Bytes]:
        for part in file.parts():
            yield part
            progress.add(memoryview(part).nbytes)

    half = path.with_name(f".{path.name}.part")
    half.unlink(missing_ok=True)  # what a killed call has left
    try:
        num_bytes, digest = write_file(half, parts(), hashed=hashed)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        more = f"; {size_text(shutil.disk_usage(path.parent).free)} are free" if full else ""
        raise CheckpointError(f"{path}: {error.strerror}{more}") from error
    assert num_bytes == file.num_bytes, f"{path}: {num_bytes} bytes, planned {file.num_bytes}"
    os.rename(half, path)
    sync_directory(path.parent)
    return digest
