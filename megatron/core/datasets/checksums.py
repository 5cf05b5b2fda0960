"""SHA-256 of a corpus's two files, block by block: `<prefix>.sha256.json`, with which every changed byte is found.

    {"version": 1, "block_bytes": 16777216,
     "bin": {"bytes": 40000000, "sha256": ["<of the first block>", "...", "..."]},
     "idx": {"bytes": 5000, "sha256": ["..."]},
     "sha256": "<of all the above>"}

Blocks, so that threads and ranks can share the reading, and damage is found where it is. The writer of a corpus hashes
what it writes; a corpus without the file loads like one with it. The text is exactly what `encoded` makes, so that a
changed byte of it is seen too. All of this is against damage: who may write the corpus may write its checksums.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from megatron.core import safe_files
from megatron.core.datasets.errors import DataError, bad_field, data_errors

VERSION = 1
BLOCK_BYTES = 1 << 24
LARGEST_BLOCK_BYTES = 1 << 30
MAX_FILE_BYTES = 1 << 29  # of the checksums: 100 TB of corpus
FILES = ("bin", "idx")
RANGES_TOLD = 8
TOKENS_PER_BLOCK = 1 << 22


class FileSums(NamedTuple):
    """One file: its size, and the digest of each block in hexadecimal."""

    num_bytes: int
    digests: tuple[str, ...]


class Checksums(NamedTuple):
    """Both files of a corpus."""

    block_bytes: int
    bin: FileSums
    idx: FileSums


class BlockHasher:
    """Digests of a file that is written from front to back."""

    def __init__(self) -> None:
        self._num_bytes = 0
        self._digests: list[str] = []
        self._block = hashlib.sha256()

    def update(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data)
        assert view.itemsize == 1, f"bytes are hashed, got items of {view.itemsize}"
        while len(view):
            part = view[: BLOCK_BYTES - self._num_bytes % BLOCK_BYTES]
            self._block.update(part)
            self._num_bytes += len(part)
            if self._num_bytes % BLOCK_BYTES == 0:
                self._digests.append(self._block.hexdigest())
                self._block = hashlib.sha256()
            view = view[len(part) :]

    def sums(self) -> FileSums:
        """Of all that was written."""
        begun = [self._block.hexdigest()] if self._num_bytes % BLOCK_BYTES else []
        return FileSums(self._num_bytes, (*self._digests, *begun))


def checksums_path(prefix: str) -> str:
    return prefix + ".sha256.json"


def encoded(checksums: Checksums) -> str:
    """The text of the file."""
    content: dict[str, Any] = {"version": VERSION, "block_bytes": checksums.block_bytes}
    for ending, (num_bytes, digests) in zip(FILES, checksums[1:], strict=True):
        content[ending] = {"bytes": num_bytes, "sha256": digests}
    content["sha256"] = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return json.dumps(content, indent=1) + "\n"


def write_checksums(prefix: str, threads: int = 1) -> str:
    """Read a corpus whole, write its checksums and return their path. Raises DataError where there are some already."""
    path = checksums_path(prefix)
    if os.path.lexists(path):
        raise DataError(f"{path} is there already: remove it if the corpus was changed on purpose")
    with data_errors(path):
        sums = []
        for ending in FILES:
            with safe_files.open_regular(f"{prefix}.{ending}", follow=True) as fd:
                size = os.fstat(fd).st_size
                blocks = range(-(-size // BLOCK_BYTES))
                sums.append(FileSums(size, tuple(_digests(fd, blocks, BLOCK_BYTES, size, threads))))
        text = encoded(Checksums(BLOCK_BYTES, *sums))
        safe_files.publish_text(path, text, mode=safe_files.SHARED_MODE)
    return path


def read_checksums(prefix: str) -> Checksums | None:
    """The checksums of a corpus, None where it has none. Raises DataError for a file that is none or was changed."""
    path = checksums_path(prefix)
    anew = f"tools/inspect_data.py --write-checksums {prefix}"
    remedy = f"remove it, check the corpus, and write it anew: {anew}"
    with data_errors(path):
        try:
            text = safe_files.read_text(path, max_bytes=MAX_FILE_BYTES, follow=True)
            found = _parsed(json.loads(text))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise DataError(f"{path}: no checksums of this version: {error}; {remedy}") from None
    if encoded(found) != text:
        raise DataError(f"{path} itself is damaged: its own SHA-256 does not fit; {remedy}")
    return found


def _parsed(content: Any) -> Checksums:
    """Raises ValueError, TypeError or KeyError for what is not of this version; `read_checksums` compares the text."""
    if content["version"] != VERSION:
        raise ValueError(f"version {content['version']!r:.40}, this program reads {VERSION}")
    block_bytes, sums = content["block_bytes"], []
    if type(block_bytes) is not int or not 0 < block_bytes <= LARGEST_BLOCK_BYTES:
        raise ValueError(f"blocks of {block_bytes!r:.40} bytes")
    for ending in FILES:
        num_bytes, digests = content[ending]["bytes"], content[ending]["sha256"]
        if type(num_bytes) is not int or len(digests) != -(-num_bytes // block_bytes):
            raise ValueError(f"{len(digests)} blocks for {num_bytes!r:.40} bytes")
        sums.append(FileSums(num_bytes, tuple(map(str, digests))))
    return Checksums(block_bytes, *sums)


def check_corpus(prefix: str, sums: Checksums, *, part: int = 0, parts: int = 1, threads: int = 1) -> None:
    """Compare both files with their checksums; of several readers each takes one block in `parts`.

    Raises DataError naming the file and the bytes that are not what was written.
    """
    assert 0 <= part < parts, f"part {part} of {parts}"
    for ending, (num_bytes, digests) in zip(FILES, sums[1:], strict=True):
        path = f"{prefix}.{ending}"
        with data_errors(path), safe_files.open_regular(path, follow=True) as fd:
            size = os.fstat(fd).st_size
            if size != num_bytes:
                raise bad_field(path, "size", None, f"{num_bytes} bytes, as in its checksums", size)
            blocks = range(part, len(digests), parts)
            found = _digests(fd, blocks, sums.block_bytes, size, threads)
        damaged = [block for block, digest in zip(blocks, found, strict=True) if digest != digests[block]]
        if damaged:
            raise DataError(
                f"{path}: not what was written (SHA-256): {_ranges(damaged, sums.block_bytes, size)}; "
                f"restore it or make it anew, or, if it was changed on purpose, remove {checksums_path(prefix)}"
            )


def require_checksums(prefix: str) -> Checksums:
    """Raises DataError that says how to write them where there are none."""
    if (checksums := read_checksums(prefix)) is None:
        raise DataError(
            f"--verify-data: {checksums_path(prefix)}: no such file: while the corpus is known to be good, write it "
            f"with tools/inspect_data.py --write-checksums {prefix}"
        )
    return checksums


def _digests(fd: int, blocks: Sequence[int], block_bytes: int, size: int, threads: int) -> list[str]:
    """Hashing and reading leave the interpreter's lock alone, so threads are enough."""

    def digest(block: int) -> str:
        sha256, begin, end = hashlib.sha256(), block * block_bytes, min(size, (block + 1) * block_bytes)
        while begin < end and (data := os.pread(fd, min(end - begin, BLOCK_BYTES), begin)):
            sha256.update(data)
            begin += len(data)
        return sha256.hexdigest()

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(digest, blocks))


def _ranges(blocks: Sequence[int], block_bytes: int, size: int) -> str:
    """`bytes A to B` of each stretch of neighbouring blocks."""
    known = set(blocks)
    starts = [block for block in blocks if block - 1 not in known]
    ends = [block + 1 for block in blocks if block + 1 not in known]
    told = [
        f"bytes {a * block_bytes} to {min(size, b * block_bytes) - 1}"
        for a, b in zip(starts[:RANGES_TOLD], ends, strict=False)
    ]
    more = len(starts) - len(told)
    return ", ".join([*told, f"and {more} more ranges"] if more else told)
