"""Safetensors files written block by block, so that a killed conversion goes on where it was.

A file appears under its name once it is whole and durable; what a killed process leaves is `.NAME.part`, which is
written again. So finished files are never written twice, and the folder they are in becomes the result by one rename.
"""

from __future__ import annotations

import errno
import math
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from megatron.core.dist_checkpointing.files import (
    BLOCK_BYTES,
    DIRECTORY_MODE,
    CheckpointError,
    open_regular,
    read_exactly,
    sha256_of,
    write_file,
)
from megatron.core.dist_checkpointing.manifest import FileEntry
from megatron.core.dist_checkpointing.planning import TORCH_DTYPES
from megatron.core.dist_checkpointing.safetensors_format import ITEM_BYTES, StoredTensor, build_header
from megatron.core.dist_checkpointing.source import SourceTensor
from megatron.core.dist_checkpointing.storage import memory_of
from megatron.core.rectangles import Rectangle
from megatron.core.safe_files import sync_directory
from megatron.core.words import size_text
from tools.conversion.progress import Say, WriteProgress
from tools.conversion.source_reader import SourceReader

Item = TypeVar("Item")


class PlannedFile(NamedTuple):
    """A file before it is written. begins: of each tensor, in bytes."""

    name: str
    header: bytes
    tensors: tuple[StoredTensor, ...]
    begins: tuple[int, ...]
    num_bytes: int


def bands(tensor: StoredTensor) -> Iterator[Rectangle]:
    """Rows that make a block at most, or one: so small that their memory is used again, and is still in the cache when
    it is hashed and written."""
    rows, *columns = tensor.shape or (1,)
    step = max(1, BLOCK_BYTES // max(1, math.prod(columns) * ITEM_BYTES[tensor.dtype]))
    for first in range(0, rows if math.prod(columns) else 0, step):
        shape = (min(step, rows - first), *columns)
        yield Rectangle((first, *(0 for _ in columns)), shape) if tensor.shape else Rectangle((), ())


def size_of(tensor: StoredTensor) -> int:
    """Bytes of its values."""
    return math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]


def planned_file(
    name: str, tensors: Sequence[StoredTensor], metadata: dict[str, str] | None = None
) -> PlannedFile:
    """Tensors in the order of the file."""
    header, places = build_header(tensors, metadata)
    return PlannedFile(name, header, tuple(tensors), tuple(places[:-1]), places[-1])


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


def write_missing(
    directory: Path,
    sizes: Mapping[str, int],
    finished: Collection[str],
    write: Callable[[str, WriteProgress], None],
    say: Say,
) -> None:
    """Write the files of a result, by name their sizes, that no earlier call has finished. Raises CheckpointError,
    before anything is made where there is no space for them."""
    missing = [name for name in sizes if name not in finished]
    num_bytes = sum(sizes[name] for name in missing)
    _check_space(directory, num_bytes)
    directory.mkdir(parents=True, exist_ok=True, mode=DIRECTORY_MODE)
    if finished:
        say(f"{len(finished)} of {len(sizes)} files are finished, by an earlier call")
    progress = WriteProgress(num_bytes, len(sizes), say)
    for number, name in enumerate(sizes, 1):
        if name in missing:
            progress.begin_file(name, number)
            write(name, progress)
    progress.end()


def write_files(
    directory: Path,
    files: Sequence[PlannedFile],
    tensors: Mapping[str, SourceTensor],
    reader: SourceReader,
    say: Say,
    *,
    hashed: bool = True,
) -> dict[str, FileEntry]:
    """Write what is not there yet. tensors: what is read, by the keys in the files. hashed: whether SHA-256 of files is
    wanted.

    Raises CheckpointError, before anything is made where there is no space for it.
    """
    planned, entries = {file.name: file for file in files}, dict[str, FileEntry]()
    finished = [name for name, file in planned.items() if _is_finished(directory / name, file)]

    def write(name: str, progress: WriteProgress) -> None:
        file, path = planned[name], directory / name
        digest = _write(path, file, tensors, reader, progress, hashed)
        entries[name] = FileEntry(file.num_bytes, digest)

    for name in planned.keys() - finished:  # what a killed call has left half written
        _part(directory / name).unlink(missing_ok=True)
    write_missing(directory, {file.name: file.num_bytes for file in files}, finished, write, say)
    for name in finished:
        num_bytes = planned[name].num_bytes
        with open_regular(directory / name) as fd:
            digest = sha256_of(fd, directory / name, num_bytes) if hashed else ""
        entries[name] = FileEntry(num_bytes, digest)
    return {name: entries[name] for name in planned}


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


def _is_finished(path: Path, file: PlannedFile) -> bool:
    if not os.path.lexists(path):
        return False
    with open_regular(path) as fd:
        whole = os.fstat(fd).st_size == file.num_bytes
        return whole and bytes(read_exactly(fd, path, 0, len(file.header))) == file.header


def _part(path: Path) -> Path:
    return path.with_name(f".{path.name}.part")


def _write(
    path: Path,
    file: PlannedFile,
    tensors: Mapping[str, SourceTensor],
    reader: SourceReader,
    progress: WriteProgress,
    hashed: bool,
) -> str:
    """SHA-256; "" unless it is wanted."""

    def parts() -> Iterator[bytes | memoryview]:
        yield file.header
        for stored in file.tensors:
            for band in bands(stored):  # read when it is its turn
                values = reader.read(tensors[stored.key], band).to(TORCH_DTYPES[stored.dtype])
                memory = memory_of(values.contiguous().reshape(-1))
                yield memory
                progress.add(len(memory))

    try:
        num_bytes, digest = write_file(_part(path), parts(), hashed=hashed)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        more = f"; {size_text(shutil.disk_usage(path.parent).free)} are free" if full else ""
        raise CheckpointError(f"{path}: {error.strerror}{more}") from error
    assert num_bytes == file.num_bytes, f"{path}: {num_bytes} bytes, planned {file.num_bytes}"
    os.rename(_part(path), path)
    sync_directory(path.parent)
    return digest
