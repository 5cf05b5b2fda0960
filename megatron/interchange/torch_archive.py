"""Files of `torch.save`, read without torch's unpickler: where each tensor's values lie in the file (floor 0).

Such a file is a zip archive without compression: `data.pkl`, a pickle whose tensors name storages, and one member a
storage, raw. A torch_dist checkpoint's `.distcp` files are several archives one behind the other.
"""

from __future__ import annotations

import io
import math
import os
import re
import struct
import zipfile
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from megatron.core.dist_checkpointing.files import CheckpointError, read_exactly
from megatron.core.dist_checkpointing.safetensors_format import ITEM_BYTES, MAX_DIMS, StoredArray
from megatron.core.rectangles import Dims
from megatron.interchange.inert_pickle import Inert, read_pickle

# torch's names of storages and dtypes -> safetensors' of dtypes.
STORAGES = {
    "torch.DoubleStorage": "F64", "torch.FloatStorage": "F32", "torch.HalfStorage": "F16",
    "torch.BFloat16Storage": "BF16", "torch.LongStorage": "I64", "torch.IntStorage": "I32",
    "torch.ShortStorage": "I16", "torch.CharStorage": "I8", "torch.ByteStorage": "U8", "torch.BoolStorage": "BOOL",
    "torch.Float8_e4m3fnStorage": "F8_E4M3", "torch.Float8_e5m2Storage": "F8_E5M2",
}  # fmt: skip
_DTYPES = "float64 F64 float32 F32 float16 F16 bfloat16 BF16 int64 I64 int32 I32 int16 I16 int8 I8 uint8 U8 bool BOOL"
_WORDS = _DTYPES.split()
DTYPES = {f"torch.{name}": dtype for name, dtype in zip(_WORDS[::2], _WORDS[1::2], strict=True)}
_NUMBERS = {"F64": "<d", "F32": "<f", "I64": "<q", "I32": "<i"}
_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
_MAX_MEMBERS = 1 << 20
_KEY = re.compile(r"[0-9]{1,12}")


class Storage(NamedTuple):
    """key: the member's name below `data/`."""

    key: str
    dtype: str


class _Part(io.RawIOBase):
    """Bytes [begin, begin + size) of a file, read at their place."""

    def __init__(self, fd: int, begin: int, size: int) -> None:
        self._fd, self._begin, self._size, self._at = fd, begin, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = max(0, start + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, into: Any) -> int:
        left = max(0, self._size - self._at)
        count = os.preadv(self._fd, [memoryview(into)[:left]], self._begin + self._at) if left else 0
        self._at += count
        return count


class Archive:
    """One archive in an open file. value: what was saved, with `StoredArray`s for tensors.

    begin, size: of the archive; the whole file if not given. Raises CheckpointError for what is no such archive, is
    compressed, or has members that lie outside of it or upon each other.
    """

    def __init__(self, fd: int, path: Path, begin: int = 0, size: int | None = None) -> None:
        self._fd, self._path, self._begin = fd, path, begin
        file_bytes = os.fstat(fd).st_size
        self._size = file_bytes - begin if size is None else size
        if not 0 <= begin <= begin + self._size <= file_bytes:
            raise CheckpointError(f"{path}: bytes {begin} to {begin + self._size} of {file_bytes}")
        self._members = self._listed()
        self._root = self._root_name()
        if self._member_bytes("byteorder", b"little") != b"little":
            raise CheckpointError(f"{path}: written on a big-endian machine, which is not read")
        data = self._member_bytes("data.pkl")
        self.value = read_pickle(data, path, self._storage)

    def tensor(self, value: Any) -> StoredArray | None:
        """Where a tensor of the value lies; None for what is none. Raises CheckpointError for one that is not whole and
        row-major, or lies outside of its storage."""
        match value:
            case Inert(
                path="torch._tensor._rebuild_from_type_v2", args=(Inert(path=path), _, tuple() as args, _)
            ):
                value = Inert(path, args)  # of one with attributes
        match value:
            case Inert(
                path="torch._utils._rebuild_parameter" | "torch._utils._rebuild_parameter_with_state",
                args=(value, *_),
            ):
                pass
        if not isinstance(value, Inert) or value.path != "torch._utils._rebuild_tensor_v2":
            return None
        storage, offset, shape, strides = (*(value.args or ()), None, None, None, None)[:4]
        right = isinstance(storage, Storage) and type(offset) is int and offset >= 0
        if not right or not is_dims(shape) or not is_dims(strides) or len(shape) != len(strides):
            raise CheckpointError(f"{self._path}: a tensor whose storage, offset, shape or strides are none")
        expected = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
        numel = math.prod(shape)
        if any(size > 1 and a != b for size, a, b in zip(shape, strides, expected, strict=True)):
            raise CheckpointError(f"{self._path}: a tensor that is not row-major: {shape}, strides {strides}")
        first, size = self._place(f"data/{storage.key}")
        item = ITEM_BYTES[storage.dtype]
        if (offset + numel) * item > size:
            raise CheckpointError(
                f"{self._path}: a tensor of {shape} at {offset} in a storage of {size} bytes"
            )
        return StoredArray(storage.dtype, tuple(shape), self._begin + first + offset * item)

    def number(self, value: Any) -> float | None:
        """A number of the value, or the element of a tensor that has one; None for what is neither."""
        if type(value) in (int, float):
            return value  # type: ignore[no-any-return]
        tensor = self.tensor(value)
        if tensor is None or math.prod(tensor.shape) != 1 or tensor.dtype not in _NUMBERS:
            return None
        data = read_exactly(self._fd, self._path, tensor.begin, ITEM_BYTES[tensor.dtype])
        return float(struct.unpack(_NUMBERS[tensor.dtype], data)[0])

    def _listed(self) -> dict[str, zipfile.ZipInfo]:
        part = io.BufferedReader(_Part(self._fd, self._begin, self._size))
        try:
            with zipfile.ZipFile(part) as listed:
                infos = listed.infolist()
        except (zipfile.BadZipFile, NotImplementedError, OSError, ValueError, struct.error) as error:
            raise CheckpointError(f"{self._path}: no archive of torch.save: {error}") from None
        members = {info.filename: info for info in infos}
        if len(members) != len(infos) or len(infos) > _MAX_MEMBERS:
            raise CheckpointError(f"{self._path}: {len(infos)} members, {len(members)} names")
        for info in infos:
            if (
                info.compress_type != zipfile.ZIP_STORED
                or info.compress_size != info.file_size
                or info.flag_bits & 1
            ):
                raise CheckpointError(
                    f"{self._path}: member {info.filename!r:.100} is compressed or encrypted"
                )
        places = sorted((info.header_offset, info.header_offset + info.file_size) for info in infos)
        for (_, end), (begin, _) in zip(places, [*places[1:], (self._size, 0)], strict=True):
            if end > begin:
                raise CheckpointError(f"{self._path}: members lie upon each other, or beyond its end")
        return members

    def _root_name(self) -> str:
        roots = {name.partition("/")[0] for name in self._members}
        if len(roots) != 1:
            raise CheckpointError(f"{self._path}: no archive of torch.save: folders {sorted(roots)[:4]}")
        return roots.pop()

    def _place(self, name: str) -> tuple[int, int]:
        """First byte of a member's data within the archive, and its size."""
        info = self._members.get(f"{self._root}/{name}")
        if info is None:
            raise CheckpointError(f"{self._path}: no member {name!r:.100}")
        header = bytes(
            read_exactly(self._fd, self._path, self._begin + info.header_offset, _LOCAL_HEADER.size)
        )
        fields = _LOCAL_HEADER.unpack(header)
        first = info.header_offset + _LOCAL_HEADER.size + fields[9] + fields[10]
        if fields[0] != b"PK\x03\x04" or first + info.file_size > self._size:
            raise CheckpointError(f"{self._path}: member {name!r:.100} is not where the archive says")
        return first, info.file_size

    def _member_bytes(self, name: str, default: bytes | None = None) -> bytes:
        if default is not None and f"{self._root}/{name}" not in self._members:
            return default
        first, size = self._place(name)
        return bytes(read_exactly(self._fd, self._path, self._begin + first, size))

    def _storage(self, pid: Any) -> Storage:
        right = isinstance(pid, tuple) and len(pid) >= 5 and pid[0] == "storage"
        kind = getattr(pid[1], "path", "") if right else ""
        if kind not in STORAGES or not isinstance(pid[2], str) or not _KEY.fullmatch(pid[2]):
            raise CheckpointError(f"{self._path}: a storage of {kind or 'no type'!r:.80}, which is not read")
        return Storage(pid[2], STORAGES[kind])


def is_dims(value: Any) -> TypeGuard[Dims]:
    """Whether a value of a pickle is a shape, or an offset."""
    return (
        isinstance(value, tuple) and len(value) <= MAX_DIMS and all(type(n) is int and n >= 0 for n in value)
    )
