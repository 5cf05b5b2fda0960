"""Safetensors files written one tensor after the other, so that a killed conversion goes on where it was.

A file appears under its name once it is whole and durable; what a killed process leaves is `.NAME.part`, which is
written again. So finished files are never written twice, and the folder they are in becomes the result by one rename.
"""

from __future__ import annotations

import errno
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from megatron.core.dist_checkpointing.files import (
    DIRECTORY_MODE,
    CheckpointError,
    open_regular,
    read_exactly,
    sha256_of,
    write_file,
)
from megatron.core.dist_checkpointing.manifest import FileEntry
from megatron.core.dist_checkpointing.safetensors_format import ITEM_BYTES, StoredTensor, build_header
from megatron.core.dist_checkpointing.storage import memory_of
from megatron.core.safe_files import sync_directory
from megatron.core.words import size_text

Say = Callable[[str], None]


class PlannedFile(NamedTuple):
    """A file before it is written. begins: of each tensor, in bytes."""

    name: str
    header: bytes
    tensors: tuple[StoredTensor, ...]
    begins: tuple[int, ...]
    num_bytes: int


def planned_file(
    name: str, tensors: Sequence[StoredTensor], metadata: dict[str, str] | None = None
) -> PlannedFile:
    """Tensors in the order of the file."""
    header, places = build_header(tensors, metadata)
    return PlannedFile(name, header, tuple(tensors), tuple(places[:-1]), places[-1])


def in_files(tensors: Sequence[StoredTensor], max_bytes: int) -> list[list[StoredTensor]]:
    """Tensors in their order, in files of at most `max_bytes` of data unless one tensor is larger. Never empty."""
    files: list[list[StoredTensor]] = [[]]
    held = 0
    for one in tensors:
        size = math.prod(one.shape) * ITEM_BYTES[one.dtype]
        if files[-1] and held + size > max_bytes:
            files.append([])
            held = 0
        files[-1].append(one)
        held += size
    return files


def write_files(
    directory: Path, files: Sequence[PlannedFile], value: Callable[[StoredTensor], Tensor], say: Say
) -> dict[str, FileEntry]:
    """Write what is not there yet. value: a tensor of the stated dtype and shape, made when it is its turn.

    Raises CheckpointError, before anything is written where there is no space for it.
    """
    directory.mkdir(parents=True, exist_ok=True, mode=DIRECTORY_MODE)
    missing = [file for file in files if not _is_finished(directory / file.name, file)]
    needed, free = sum(file.num_bytes for file in missing), shutil.disk_usage(directory).free
    if needed > free:
        raise CheckpointError(f"{directory}: no space: {size_text(needed)} needed, {size_text(free)} free")
    if len(missing) < len(files):
        say(f"{len(files) - len(missing)} of {len(files)} files are finished, by an earlier call")
    entries = {}
    for number, file in enumerate(files, 1):
        path, started = directory / file.name, time.monotonic()
        if file in missing:
            entries[file.name] = _write(path, file, value)
            rate = size_text(file.num_bytes / max(time.monotonic() - started, 1e-9))
            say(f"{file.name} ({number} of {len(files)}): {size_text(file.num_bytes)}, {rate}/s")
        else:
            with open_regular(path) as fd:
                entries[file.name] = FileEntry(file.num_bytes, sha256_of(fd, path, file.num_bytes))
    return entries


def _is_finished(path: Path, file: PlannedFile) -> bool:
    if not os.path.lexists(path):
        return False
    with open_regular(path) as fd:
        whole = os.fstat(fd).st_size == file.num_bytes
        return whole and bytes(read_exactly(fd, path, 0, len(file.header))) == file.header


def _write(path: Path, file: PlannedFile, value: Callable[[StoredTensor], Tensor]) -> FileEntry:
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)

    def parts() -> Iterator[bytes | memoryview]:
        yield file.header
        for one in file.tensors:
            tensor = value(one)
            assert tuple(tensor.shape) == one.shape, f"{one.key}: {tuple(tensor.shape)}, planned {one.shape}"
            yield memory_of(tensor.contiguous().reshape(-1)) if tensor.numel() else b""

    try:
        num_bytes, digest = write_file(part, parts())
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        more = f"; {size_text(shutil.disk_usage(path.parent).free)} are free" if full else ""
        raise CheckpointError(f"{path}: {error.strerror}{more}") from error
    assert num_bytes == file.num_bytes, f"{path}: {num_bytes} bytes, planned {file.num_bytes}"
    os.rename(part, path)
    sync_directory(path.parent)
    return FileEntry(num_bytes, digest)
