"""Arrays that are held once on a machine, whatever the number of its processes: in a file, read in pieces.

[Note: one array, many processes] The file is one of the index cache, or, where none can be written, one in memory
without a name (`memfd_create`), that the first process of the machine has filled. The others open the same file by
its place in /proc, and read as the first does, with `os.pread`, so nothing is mapped ([Note: no mmap] in
indexed_dataset_reader.py): a file that somebody truncates is an error, which says so. What the pieces take is the
system's cache of files, once. Who was given a place trusts what is there, since the first process has checked it or
made it. A place that cannot be opened (processes that do not see each other's) costs a second copy, no error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.core import safe_files
from megatron.core.datasets.errors import DataError, require_memory

SMALL_BYTES = 1 << 22  # of all arrays of an index
MOST_SMALL = 64  # indices that are offered though they are small
MAX_LIST_BYTES = 1 << 26
Layout = tuple[np.dtype[Any], tuple[int, ...]]
Place = list[Any]
"""Of an array: a path that other processes of this machine can open, and the byte there at which it begins."""


def layout_bytes(layout: Layout) -> int:
    """Memory that an array of this dtype and shape takes."""
    dtype, shape = layout
    return dtype.itemsize * math.prod(shape)


class HeldArray:
    """An array [n, ...] in an open file, of which slices of rows are read.

    fd: becomes the array's own. name: for errors. begin: the byte where it begins.
    """

    def __init__(self, fd: int, name: str, layout: Layout, begin: int = 0) -> None:
        self.name, self._fd, self._begin = name, fd, begin
        self.dtype, self.shape = layout
        self._row_bytes = self.dtype.itemsize * math.prod(self.shape[1:])
        weakref.finalize(self, os.close, fd)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        """Rows [start, stop), as of NumPy's arrays. Raises DataError for a file that has become shorter."""
        first, stop, step = rows.indices(len(self))
        assert step == 1, f"rows with a step of {step}"
        stop = max(first, stop)
        out = np.empty((stop - first, *self.shape[1:]), self.dtype)
        view = out.reshape(-1).view(np.uint8).data
        at, done = self._begin + first * self._row_bytes, 0
        while done < len(view):
            read = os.preadv(self._fd, [view[done : done + (1 << 30)]], at + done)
            if not read:
                size = os.fstat(self._fd).st_size
                raise DataError(
                    f"{self.name}: expected {at + len(view)} bytes, found {size}: cut while in use"
                )
            done += read
        return out

    @property
    def place(self) -> Place:
        return [f"/proc/{os.getpid()}/fd/{self._fd}", self._begin]

    @classmethod
    def at(cls, place: Place, name: str, layout: Layout) -> HeldArray:
        """The array that another process of this machine has. Raises OSError."""
        path, begin = place
        with safe_files.open_regular(path, follow=True) as fd:
            return cls(os.dup(fd), name, layout, begin)


Array = NDArray[Any] | HeldArray
Arrays = Mapping[str, Array]


def held_in_memory(name: str, layout: Layout, blocks: Iterable[NDArray[Any]]) -> HeldArray:
    """An array whose rows these blocks are, in a file in memory. Raises DataError where there is no room for it."""
    require_memory(layout_bytes(layout), name)
    array = HeldArray(os.memfd_create("index", os.MFD_CLOEXEC), name, layout)
    for block in blocks:
        left = np.ascontiguousarray(block, dtype=layout[0]).reshape(-1).view(np.uint8).data
        while left:
            left = left[os.write(array._fd, left) :]
    return array


@dataclasses.dataclass
class Sharing:
    """What processes of one machine share. offered: places of arrays, by what they are of, that another one holds.
    held: those of this one, kept until all that want them have opened them."""

    offered: Mapping[str, Mapping[str, Place]] = dataclasses.field(default_factory=dict)
    held: dict[str, dict[str, HeldArray]] = dataclasses.field(default_factory=dict)
    _list: HeldArray | None = None

    def publish(self) -> str | None:
        """A path for `adopt` of other processes on this machine; None where nothing is held."""
        places = {key: {name: one.place for name, one in arrays.items()} for key, arrays in self.held.items()}
        if not places:
            return None
        text = np.frombuffer(json.dumps(places).encode(), np.uint8)
        self._list = held_in_memory("the list of shared arrays", (text.dtype, text.shape), [text])
        return str(self._list.place[0])

    def adopt(self, path: str) -> None:
        """Take what another process offers; nothing where it cannot be seen from here."""
        with contextlib.suppress(OSError, ValueError):
            self.offered = safe_files.read_json(path, max_bytes=MAX_LIST_BYTES, follow=True)


_sharing: ContextVar[Sharing | None] = ContextVar("what processes of this machine share", default=None)


@contextlib.contextmanager
def shared() -> Iterator[Sharing]:
    """Within it, `offered` arrays are opened instead of made, and those that are made can be offered."""
    sharing = Sharing()
    before = _sharing.set(sharing)
    try:
        yield sharing
    finally:
        _sharing.reset(before)


def offered(key: str, layouts: Mapping[str, Layout]) -> Arrays | None:
    """The arrays of this key that another process of this machine offers, None where it cannot."""
    sharing = _sharing.get()
    places = {} if sharing is None else sharing.offered.get(key, {})
    if places.keys() != layouts.keys():
        return None
    with contextlib.suppress(OSError):
        return _read_small(
            {name: HeldArray.at(places[name], f"{key} {name}", layout) for name, layout in layouts.items()}
        )
    return None


def offer(key: str, arrays: dict[str, HeldArray], *, is_on_disk: bool) -> Arrays:
    """Let other processes of this machine open them; returns them.

    is_on_disk: others find small ones there by themselves, so that no files of very many corpora are open at once.
    """
    sharing, read = _sharing.get(), _read_small(arrays)
    if sharing is not None and (read is arrays or not (is_on_disk or len(sharing.held) >= MOST_SMALL)):
        sharing.held[key] = arrays
    return read


def _read_small(arrays: dict[str, HeldArray]) -> Arrays:
    """Of a small index each process has its own copy, and no file open."""
    small = sum(layout_bytes((one.dtype, one.shape)) for one in arrays.values()) <= SMALL_BYTES
    return {name: one[:] for name, one in arrays.items()} if small else arrays
