"""Files of a checkpoint: written durably and hashed on the way, read without following anything (floor 0).

Every system call goes through `os`, so that the tests can stop the process, or fill the disk, at each one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megatron.core import safe_files
from megatron.core.safe_files import FILE_MODE, FileContentError, UnsafeFileError
from megatron.core.words import printable


class CheckpointError(ValueError):
    """A checkpoint cannot be written, found, trusted or applied (status 3); the message is one printable line and names
    the file."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


DIRECTORY_MODE = 0o750
BLOCK_BYTES = 8 << 20  # one write or read: large enough to stream, small enough to hash while in the cache


def write_file(path: Path, parts: Iterable[bytes | memoryview], *, hashed: bool = True) -> tuple[int, str]:
    """Write a new file from front to back, durably; returns its size and SHA-256, "" unless `hashed`.

    Its directory entry is not durable yet: `safe_files.sync_directory`.
    """
    sha256, num_bytes = hashlib.sha256(), 0
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, fd)
        hasher = stack.enter_context(
            ThreadPoolExecutor(1)
        )  # beside the write of the block; no work, no thread
        for part in parts:
            view = memoryview(part).cast("B")
            for begin in range(0, len(view), BLOCK_BYTES):
                block = view[begin : begin + BLOCK_BYTES]
                hashing = hasher.submit(sha256.update, block) if hashed else None
                while len(block):
                    written = os.write(fd, block)
                    num_bytes, block = num_bytes + written, block[written:]
                if hashing is not None:
                    hashing.result()
        os.fsync(fd)
    return num_bytes, sha256.hexdigest() if hashed else ""


@contextlib.contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """What the system refuses inside, and content that is not read, as a CheckpointError that names the file."""
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError(f"{error.filename or path}: missing") from None
    except (UnsafeFileError, FileContentError) as error:
        raise CheckpointError(str(error)) from None
    except OSError as error:
        raise CheckpointError(f"{error.filename or path}: cannot be read: {error.strerror}") from error


@contextlib.contextmanager
def open_regular(path: Path, *, follow: bool = False) -> Iterator[int]:
    """`safe_files.open_regular` (no links unless `follow`), with `named_errors`."""
    with named_errors(path), safe_files.open_regular(path, follow=follow) as fd:
        yield fd


def read_exactly(fd: int, path: Path, begin: int, num_bytes: int) -> bytearray:
    """`num_bytes` bytes at `begin`; a shorter file is a CheckpointError (no mapping, so never a SIGBUS)."""
    out = bytearray(num_bytes)
    read_into(fd, path, begin, memoryview(out))
    return out


def read_into(fd: int, path: Path, begin: int, out: memoryview) -> None:
    """Fill `out` from the bytes at `begin`."""
    done = 0
    while done < len(out):
        count = os.preadv(fd, [out[done : done + BLOCK_BYTES]], begin + done)
        if count == 0:
            raise CheckpointError(f"{path}: ends at byte {begin + done}, expected {begin + len(out)}")
        done += count


def sha256_of(fd: int, path: Path, num_bytes: int, begin: int = 0) -> str:
    """SHA-256 of the `num_bytes` bytes from `begin` on, which must be there."""
    digest = hashlib.sha256()
    block = memoryview(bytearray(min(BLOCK_BYTES, num_bytes)))
    for done in range(0, num_bytes, BLOCK_BYTES):
        part = block[: min(BLOCK_BYTES, num_bytes - done)]
        read_into(fd, path, begin + done, part)
        digest.update(part)
    return digest.hexdigest()
