"""Reader of a tokenized corpus in Megatron's `.bin`/`.idx` layout.

`.idx`, little-endian: 9 bytes magic, u64 version = 1, u8 dtype code, u64 sequences S, u64 document boundaries B;
from byte 34 on: S x int32 sequence lengths in tokens, S x int64 byte offsets into `.bin`, B x int64 document
boundaries as sequence indices (first 0, last S). Size 34 + 12*S + 8*B bytes. `.bin`: the tokens back to back.

[Note: no mmap] Both files are read with `os.pread`. A mapped file that shrinks ends the process with SIGBUS
and no message; a short read is an ordinary error that can be reported. Every field is checked once, at open,
so that later reads need no checks but for their length.

Source: facts on Megatron's data layout, docs/data.md.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import struct
import weakref
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets.errors import DataError, bad_field, require_memory
from megatron.core.safe_files import open_regular

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, document boundaries: 34 bytes
VERSION_OFFSET, DTYPE_OFFSET, SEQUENCES_OFFSET, BOUNDARIES_OFFSET = 9, 17, 18, 26
DTYPES: dict[int, np.dtype[Any]] = {
    code: np.dtype(name)
    for code, name in enumerate(("u1", "i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2"), start=1)
}
LARGEST_UINT16_VOCABULARY = 65500
READ_BLOCK_BYTES = 1 << 26
DIGEST_BLOCK_BYTES = 1 << 16
Ints = NDArray[Any]


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """What preprocessing stores tokens in: uint16 for vocabularies below 65500, else int32."""
    return DTYPES[8] if vocab_size < LARGEST_UINT16_VOCABULARY else DTYPES[4]


def index_path(prefix: str) -> str:
    return prefix + ".idx"


def data_path(prefix: str) -> str:
    return prefix + ".bin"


def _paths(prefix: str) -> tuple[str, str]:
    return index_path(prefix), data_path(prefix)


@dataclasses.dataclass(frozen=True)
class CorpusIndex:
    """A validated `.idx`.

    dtype: of the tokens.  lengths: int32 [S].  starts: int64 [S + 1], first token of each sequence, and the end.
    boundaries: int64 [B], sequence index of each document's start, and the end.  sha256: of the whole file.
    """

    dtype: np.dtype[Any]
    lengths: NDArray[np.int32]
    starts: NDArray[np.int64]
    boundaries: NDArray[np.int64]
    sha256: str


class IndexedDataset:
    """One corpus: sequences of tokens, grouped into documents.

    prefix: path without `.bin`/`.idx`. Raises DataError, naming file, field, byte, expected and found, for a
    corpus that is missing or damaged, and later for a `.bin` that shrinks while it is open.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        for path in _paths(prefix):
            if not os.path.exists(path):
                raise DataError(_missing(prefix, path))
        self.index = read_index(index_path(prefix))
        path, dtype = data_path(prefix), self.index.dtype
        self._fd = _open(path)
        self._close = weakref.finalize(self, os.close, self._fd)
        self.num_tokens = int(self.index.starts[-1])
        num_bytes, found = self.num_tokens * dtype.itemsize, os.fstat(self._fd).st_size
        if found != num_bytes:
            self.close()
            expected = f"{num_bytes} bytes ({self.num_tokens} x {dtype.name})"
            raise bad_field(path, "size", None, expected, found)

    def __len__(self) -> int:
        return len(self.index.lengths)

    @property
    def num_documents(self) -> int:
        return len(self.index.boundaries) - 1

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Tokens in each sequence."""
        return self.index.lengths

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """Tokens [offset, offset + length) of a sequence, in the corpus's own dtype; to its end by default."""
        available = int(self.index.lengths[sequence]) - offset
        count = available if length is None else length
        assert offset >= 0 <= count <= available, (
            f"sequence {sequence}: [{offset}, {offset}+{count}) of {self.index.lengths[sequence]} tokens"
        )
        return self.read_tokens(int(self.index.starts[sequence]) + offset, count)

    def read_tokens(self, start: int, count: int) -> NDArray[Any]:
        """`count` tokens from token `start` of the corpus on."""
        itemsize = self.index.dtype.itemsize
        data = _pread(self._fd, count * itemsize, start * itemsize)
        if len(data) != count * itemsize:
            raise DataError(
                f"{data_path(self.prefix)}: read at byte {start * itemsize}: expected {count * itemsize} bytes, "
                f"found {len(data)}; the file shrank while in use to {os.fstat(self._fd).st_size} bytes "
                f"(it had {self.num_tokens * itemsize} when opened)"
            )
        return np.frombuffer(data, dtype=self.index.dtype)

    def fingerprint(self) -> dict[str, int | str]:
        """What identifies the content: a resumed run compares it with the one that its checkpoint carries.

        The index is hashed whole; of `.bin` the size and the first and last 64 KiB (hashing terabytes at each
        start is not affordable).
        """
        size = os.fstat(self._fd).st_size
        sample = hashlib.sha256(_pread(self._fd, min(size, DIGEST_BLOCK_BYTES), 0))
        sample.update(_pread(self._fd, DIGEST_BLOCK_BYTES, max(0, size - DIGEST_BLOCK_BYTES)))
        return {"idx_sha256": self.index.sha256, "bin_bytes": size, "bin_sample_sha256": sample.hexdigest()}

    def close(self) -> None:
        """Close the file; reading afterwards is an error. Called by the garbage collector otherwise."""
        self._close()

    def __enter__(self) -> IndexedDataset:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def read_index(path: str) -> CorpusIndex:
    """Read and check a `.idx` file; raises DataError."""
    fd = _open(path)
    try:
        size = os.fstat(fd).st_size
        header = _pread(fd, HEADER.size, 0)
        dtype, num_sequences, num_boundaries = _check_header(path, header, size)
        require_memory(3 * size, f"{path} of {size} bytes")  # the file, and what is made of it
        body = _pread(fd, size - HEADER.size, HEADER.size)
    finally:
        os.close(fd)
    if len(body) != size - HEADER.size:
        raise bad_field(path, "size", None, f"{size} bytes, as when opened", len(body) + HEADER.size)
    digest = hashlib.sha256(header)
    digest.update(body)
    lengths = np.frombuffer(body, dtype="<i4", count=num_sequences)
    pointers = np.frombuffer(body, dtype="<i8", count=num_sequences, offset=4 * num_sequences)
    boundaries = np.frombuffer(body, dtype="<i8", count=num_boundaries, offset=12 * num_sequences)
    # int64 cannot overflow: at most 2^31 tokens x 8 bytes a sequence, and 12 bytes of this very file each.
    starts = np.zeros(num_sequences + 1, dtype=np.int64)
    np.cumsum(lengths, dtype=np.int64, out=starts[1:])
    _check_body(path, lengths, pointers, starts[:-1] * dtype.itemsize, boundaries)
    # Copies, so that the pointers (two thirds of the file) are not kept alive.
    return CorpusIndex(dtype, lengths.copy(), starts, boundaries.copy(), digest.hexdigest())


def _check_header(path: str, data: bytes, size: int) -> tuple[np.dtype[Any], int, int]:
    """Dtype, number of sequences and of document boundaries, which make up a file of `size` bytes."""
    bad = functools.partial(bad_field, path)
    if len(data) < HEADER.size:
        raise bad("header", 0, f"{HEADER.size} bytes", len(data))
    magic, version, code, num_sequences, num_boundaries = HEADER.unpack(data)
    if magic != MAGIC:
        raise bad("magic", 0, MAGIC, f"{magic!r} (is this an .idx file?)")
    if version != VERSION:
        raise bad("version", VERSION_OFFSET, VERSION, version)
    if code not in DTYPES:
        raise bad("dtype code", DTYPE_OFFSET, f"one of {sorted(DTYPES)}", code)
    # Python integers: nothing here overflows, whatever the file says.
    room = size - HEADER.size - 12 * num_sequences  # of the boundaries
    if room < 0:
        most = f"at most {(size - HEADER.size) // 12} in {size} bytes"
        raise bad("number of sequences", SEQUENCES_OFFSET, most, num_sequences)
    count = ("number of document boundaries", BOUNDARIES_OFFSET)
    if num_boundaries < 1:
        raise bad(*count, "at least 1", num_boundaries)
    expected = size - room + 8 * num_boundaries
    if size == expected + num_sequences and num_sequences > 0:
        found = f"{size}: a multimodal corpus, which is not supported"
        raise bad("size", None, f"{expected} bytes", found)
    if size < expected:
        raise bad(
            *count, f"at most {room // 8} after {num_sequences} sequences in {size} bytes", num_boundaries
        )
    if size > expected:
        counted = f"{num_sequences} sequences and {num_boundaries} document boundaries"
        raise bad("size", None, f"{expected} bytes for {counted}", size)
    return DTYPES[code], num_sequences, num_boundaries


def _check_body(path: str, lengths: Ints, pointers: Ints, places: Ints, boundaries: Ints) -> None:
    """Lengths are not negative; pointers are `places`, those of back-to-back storage; document boundaries run from 0
    to the number of sequences and never fall."""
    count, last, first_boundary = len(lengths), len(boundaries) - 1, HEADER.size + 12 * len(lengths)

    def refuse(what: str, i: int, begin: int, values: NDArray[Any], expected: object) -> NoReturn:
        raise bad_field(path, f"{what} {i}", begin + values.itemsize * i, expected, int(values[i]))

    if count and int(lengths.min()) < 0:
        refuse("length of sequence", int(np.argmax(lengths < 0)), HEADER.size, lengths, "at least 0")
    if (wrong := pointers != places).any():
        i = int(np.argmax(wrong))
        back_to_back = f"{places[i]} (sequences lie back to back)"
        refuse("byte offset of sequence", i, HEADER.size + 4 * count, pointers, back_to_back)
    if boundaries[0] != 0:
        refuse("document boundary", 0, first_boundary, boundaries, 0)
    if (falls := boundaries[1:] < boundaries[:-1]).any():
        i = int(np.argmax(falls)) + 1
        refuse("document boundary", i, first_boundary, boundaries, f"at least {boundaries[i - 1]}")
    if boundaries[last] != count:
        refuse("document boundary", last, first_boundary, boundaries, f"{count}, the number of sequences")


def _missing(prefix: str, path: str) -> str:
    if "://" in prefix:
        told = "object stores are not read directly: copy the .bin and .idx files to a local folder"
        return f"{prefix}: {told}"
    if prefix.endswith((".bin", ".idx")) and all(map(os.path.isfile, _paths(prefix[:-4]))):
        return f"{prefix}: give the path without its ending: {prefix[:-4]}"
    return f"{path}: no such file (a --data-path entry is the path without .bin and .idx)"


def _open(path: str) -> int:
    try:
        with open_regular(path, follow=True) as fd:
            return os.dup(fd)
    except OSError as error:
        raise DataError(f"{path}: cannot be opened: {error.strerror}") from error


def _pread(fd: int, count: int, offset: int) -> bytes:
    """Up to `count` bytes; fewer only at the end of the file (one call returns at most 2 GiB)."""
    parts = []
    while count and (part := os.pread(fd, min(count, READ_BLOCK_BYTES), offset)):
        parts.append(part)
        count, offset = count - len(part), offset + len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
