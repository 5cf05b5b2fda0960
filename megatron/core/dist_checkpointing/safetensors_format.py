"""The safetensors file format, as far as we write and check it (floor 0, pure).

u64 length of the header, little-endian · header: JSON object, padded with blanks · the tensors' bytes,
row-major, little-endian, without gaps. Header: name -> {"dtype", "shape", "data_offsets": [begin, end]},
offsets counted from the end of the header. We write the file ourselves, one tensor after the other, because
the library wants all of it in memory at once and offers no digest; any safetensors reader opens it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from collections.abc import Sequence
from typing import Any

ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the library's own limit


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file."""

    key: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def file_order(entries: Sequence[StoredTensor]) -> list[int]:
    """Indices of the entries in the order of the file: widest elements first, so that each is aligned."""
    return sorted(range(len(entries)), key=lambda i: _rank(entries[i]))


def _rank(entry: StoredTensor) -> tuple[int, str]:
    return -ITEM_BYTES[entry.dtype], entry.key


def sort_by_place(placed: Sequence[tuple[int, StoredTensor]]) -> list[tuple[int, StoredTensor]]:
    """(begin, entry) pairs back in file order; entries without elements share a beginning with the next."""
    return sorted(placed, key=lambda pair: (pair[0], _rank(pair[1])))


def build_header(entries: Sequence[StoredTensor]) -> tuple[bytes, list[int]]:
    """The bytes before the data, and where in the file each tensor begins. Entries in file order."""
    table: dict[str, Any] = {}
    begins, position = [], 0
    for entry in entries:
        assert entry.key not in table, f"two tensors named {entry.key!r} in one file"
        end = position + entry.num_bytes
        table[entry.key] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [position, end]}
        begins.append(position)
        position = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    assert len(text) <= MAX_HEADER_BYTES, f"header of {len(text)} bytes for {len(entries)} tensors"
    head = struct.pack("<Q", len(text)) + text
    return head, [len(head) + begin for begin in begins]


def header_length(prefix: bytes, file_bytes: int) -> int:
    """Length of the JSON from the first 8 bytes; ValueError when it cannot be true."""
    (length,) = struct.unpack("<Q", prefix)
    limit = min(MAX_HEADER_BYTES, file_bytes - LENGTH_BYTES)
    if length > limit:
        raise ValueError(f"header length is {length} bytes, expected at most {limit}")
    return int(length)
