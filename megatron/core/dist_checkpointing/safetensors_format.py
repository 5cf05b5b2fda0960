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
MAX_DIMS = 16
MAX_BYTES = 1 << 56


class StoredTensor(NamedTuple):
    """One tensor of a file."""

    key: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def rank(self) -> tuple[int, str]:
        """By what a file is sorted: widest elements first, so that each is aligned."""
        return -ITEM_BYTES[self.dtype], self.key


def build_header(
    entries: Sequence[StoredTensor], metadata: dict[str, str] | None = None
) -> tuple[bytes, list[int]]:
    """The bytes before the data; and where in the file each tensor begins, and the last one ends. Entries in the order
    of the file. metadata: texts of others' readers."""
    table: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
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


def header_length(prefix: bytes | bytearray, file_bytes: int) -> int:
    """Length of the JSON from the first 8 bytes; ValueError when it cannot be true."""
    (length,) = struct.unpack("<Q", prefix)
    limit = min(MAX_HEADER_BYTES, file_bytes - LENGTH_BYTES)
    if length > limit:
        raise ValueError(f"header length is {length} bytes, expected at most {limit}")
    return int(length)


class StoredArray(NamedTuple):
    """A row-major tensor in a file. begin: its first byte there."""

    dtype: str
    shape: tuple[int, ...]
    begin: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def parse_header(text: bytes | bytearray, file_bytes: int) -> dict[str, StoredArray]:
    """What a header of any writer lists. text: behind the first 8 bytes. Raises ValueError where it cannot be true: the
    format has no gaps, no overlaps and no bytes behind the last tensor."""
    table = json.loads(text)
    if not isinstance(table, dict):
        raise ValueError(f"header is a {type(table).__name__}, expected an object")
    place = LENGTH_BYTES + len(text)
    arrays = {
        name: _stored_array(name, entry, place) for name, entry in table.items() if name != "__metadata__"
    }
    for name, array in sorted(arrays.items(), key=lambda item: (item[1].begin, item[1].num_bytes)):
        if array.begin != place:
            raise ValueError(f"{name!r:.200} begins at byte {array.begin}, expected {place}")
        place += array.num_bytes
    if place != file_bytes:
        raise ValueError(f"tensors end at byte {place}, the file at {file_bytes}")
    return arrays


def _stored_array(name: str, entry: Any, first: int) -> StoredArray:
    fields: dict[str, Any] = entry if isinstance(entry, dict) else {}
    dtype: Any = fields.get("dtype")
    shape: Any = fields.get("shape")
    offsets: Any = fields.get("data_offsets")
    if dtype not in ITEM_BYTES:
        raise ValueError(f"{name!r:.200}: dtype {dtype!r:.40}, expected one of {', '.join(ITEM_BYTES)}")
    for key, value in (("shape", shape), ("data_offsets", offsets)):
        right = isinstance(value, list) and len(value) <= MAX_DIMS
        if not right or any(type(one) is not int or not 0 <= one <= MAX_BYTES for one in value):
            raise ValueError(f"{name!r:.200}: {key} {value!r:.80}, expected a list of sizes")
    array = StoredArray(dtype, tuple(shape), first + offsets[0] if offsets else 0)
    if len(offsets) != 2 or offsets[1] - offsets[0] != array.num_bytes:
        raise ValueError(f"{name!r:.200}: data_offsets {offsets!r:.80}, expected {array.num_bytes} bytes")
    return array
