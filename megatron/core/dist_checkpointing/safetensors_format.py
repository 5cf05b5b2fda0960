"""The safetensors file format, as far as we write and check it (floor 0, pure).

u64 length of the header, little-endian · header: JSON object, padded with blanks · the tensors' bytes,
row-major, little-endian, without gaps. Header: name -> {"dtype", "shape", "data_offsets": [begin, end]},
offsets counted from the end of the header. We write the file ourselves, one tensor after the other, because
the library wants all of it in memory at once and offers no digest; any safetensors reader opens it.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the library's own limit


class StoredTensor(NamedTuple):
    """One tensor of a file."""

    key: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def rank(self) -> tuple[int, str]:
        """By what a file is sorted: widest elements first, so that each is aligned."""
        return -ITEM_BYTES[self.dtype], self.key


def build_header(entries: Sequence[StoredTensor]) -> tuple[bytes, list[int]]:
    """The bytes before the data; and where in the file each tensor begins, and the last one ends. Entries in the order
    of the file."""
    table: dict[str, Any] = {}
    places = [0]
    for key, dtype, shape in entries:
        assert key not in table, f"two tensors named {key!r} in one file"
        places.append(places[-1] + math.prod(shape) * ITEM_BYTES[dtype])
        table[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": places[-2:]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    assert len(text) <= MAX_HEADER_BYTES, f"header of {len(text)} bytes for {len(entries)} tensors"
    head = struct.pack("<Q", len(text)) + text
    return head, [len(head) + place for place in places]


def header_length(prefix: bytes, file_bytes: int) -> int:
    """Length of the JSON from the first 8 bytes; ValueError when it cannot be true."""
    (length,) = struct.unpack("<Q", prefix)
    limit = min(MAX_HEADER_BYTES, file_bytes - LENGTH_BYTES)
    if length > limit:
        raise ValueError(f"header length is {length} bytes, expected at most {limit}")
    return int(length)
