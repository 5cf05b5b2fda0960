"""Memory that processes of one host share: files without a name, counters in them, and how a process waits for those of
others.

A file begins with a page of counters, 8 bytes each, of which every one has one writer. The system frees a file when the
last process that maps it ends, however that ends.

[Note: order of writes] A process that reads a counter also sees what was written before the counter. This holds on x86,
which shows stores in their order. On other machines there are no such files, and ranks send messages.

[Note: waking] Who waits sleeps in the kernel (a futex) until the counter is not what it was. Before that it sets a
flag, and who writes a counter wakes those that have set theirs. A flag may become visible too late for that, so no
sleep is long.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, TypeAlias

COUNTER_BYTES = 4096  # of the page of counters
TOKEN = 24  # the counter that identifies a file's owner
_NAME = "megatron"
# After each _PATIENCE_S a waiting process checks that those that it waits for still run.
_PATIENCE_S = 0.05
_FUTEX, _WAIT, _WAKE, _EVERYBODY = 202, 0, 1, 1 << 30  # of Linux on x86-64


Memory: TypeAlias = "ctypes.Array[ctypes.c_char]"  # a file as this process has mapped it


class Late(NamedTuple):
    """A counter that is waited for: whose (a rank of the world), where, and what it is now."""

    rank: int
    address: int
    value: int


class Waiter:
    """The waits of one end. flags, flag: where it says that it sleeps. processes: by rank of the world, of those that
    it may wait for. spin_s: it polls for so long, and lets others run meanwhile. longest_s: of a sleep."""

    def __init__(
        self,
        flags: memoryview,
        flag: int,
        processes: Mapping[int, int],
        timeout_s: float,
        *,
        spin_s: float,
        longest_s: float,
    ) -> None:
        self._flags, self._flag, self._processes = flags, flag, processes
        self._timeout_s, self._spin_s, self._longest = timeout_s, spin_s, _Timespec(0, int(longest_s * 1e9))

    def wait(self, is_done: Callable[[], bool], late: Callable[[], list[Late]]) -> None:
        """Return once `is_done`. late: counters that it waits for, none where there is something to go on with. Raises
        RuntimeError, as backends do, where a peer is lost."""
        started = looked = time.monotonic()
        while not is_done():
            now = time.monotonic()
            waited_s = now - started
            if now - looked > _PATIENCE_S:
                looked = now
                ended = {counter.rank for counter in late() if _has_ended(self._processes[counter.rank])}
                waiting = [counter.rank for counter in late()]
                if gone := ended.intersection(waiting):  # one may have written everything before it ended
                    raise RuntimeError(
                        f"connection closed by peer: the process of rank {min(gone)} has ended"
                    )
                if waited_s > self._timeout_s:
                    raise RuntimeError(f"timed out after {waited_s:.1f} s waiting for ranks {waiting}")
            if waited_s < self._spin_s:
                os.sched_yield()
                continue
            self._flags[self._flag] = 1
            for _, address, value in late()[:1]:
                _syscall(_FUTEX, address, _WAIT, value & 0xFFFFFFFF, self._longest, None, 0)
            self._flags[self._flag] = 0


def wake(address: int) -> None:
    """All processes that sleep until this counter changes."""
    _syscall(_FUTEX, address, _WAKE, _EVERYBODY, None, None, 0)


def new_file(num_bytes: int, token: int) -> int:
    """A file without a name, in memory, empty but for the token; -1 where there can be none."""
    file = -1
    if platform.machine() in ("x86_64", "AMD64"):  # see [Note: order of writes]
        with contextlib.suppress(OSError, AttributeError):  # no Linux
            file = os.memfd_create(_NAME)
            os.ftruncate(file, num_bytes)
            os.pwrite(file, token.to_bytes(8, "little"), 8 * TOKEN)
    return file


def map_file(process: int, file: int, token: int, num_bytes: int) -> Memory | None:
    """A file of a process, which on another host may be anybody's, and may be shorter; None where it cannot be had."""
    path = Path(f"/proc/{process}/fd/{file}")
    with contextlib.suppress(OSError):
        if os.readlink(path).startswith(f"/memfd:{_NAME}"):
            with path.open("r+b") as opened:
                enough = os.fstat(opened.fileno()).st_size >= num_bytes
                memory = _map(opened.fileno(), num_bytes) if enough else None
            return memory if memory is not None and counters(memory)[TOKEN] == token else None
    return None


def _map(file: int, num_bytes: int) -> Memory | None:
    """By hand: Python's own keeps a descriptor of each, and a tensor would count as what the rank holds."""
    readable, shared = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED
    address = _libc.mmap(None, num_bytes, readable, shared, file, 0)
    if address == ctypes.c_void_p(-1).value:
        return None
    memory = (ctypes.c_char * num_bytes).from_address(address)
    # Not at the interpreter's end, where others may still read it.
    weakref.finalize(memory, _libc.munmap, address, num_bytes).atexit = False
    return memory


def new_token() -> int:
    """That no other file has."""
    return int.from_bytes(os.urandom(7))


def counters(memory: Memory) -> memoryview:
    """The counters of a file."""
    return memoryview(memory).cast("B")[:COUNTER_BYTES].cast("q")


def _has_ended(process: int) -> bool:
    """Whoever started the process may not have heard of it yet."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError as error:
        return isinstance(error, FileNotFoundError | ProcessLookupError)
    return state in "ZX"


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_libc = ctypes.CDLL(None)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_syscall = _libc.syscall
_syscall.argtypes = (
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint32,
    ctypes.POINTER(_Timespec),
    ctypes.c_void_p,
    ctypes.c_uint32,
)
