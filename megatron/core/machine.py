"""The machine as this process has it: cores, and how much memory it has to give: the least of the machine's and of what
the control groups have left that it is in, its own and all above it; and how much it holds (floor 0).

root: the file system that has `proc` and `sys`; another one in tests. Sources: cgroups(7), kernel's cgroup-v2 and
cgroup-v1/memory documents.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import os
import platform
import resource
import sys
import threading
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

SYSTEM = Path("/")


@dataclasses.dataclass(frozen=True)
class MemoryFigures:
    """Bytes in use by this process on its device, now and at most so far.

    CUDA: torch's caching allocator. CPU: allocated is the heap in use (`mallinfo2`), reserved the resident
    set; the heap's own peak is not recorded by the C library, so both peaks are the resident set's.
    """

    allocated_bytes: int
    max_allocated_bytes: int
    reserved_bytes: int
    max_reserved_bytes: int


class _Files(NamedTuple):
    """Of a version of control groups. droppable: the line of memory.stat that counts caches of it and those below."""

    limits: tuple[str, ...]
    used: str
    droppable: str


# memory.high: above it processes are slowed down until they have given memory back.
_OF_VERSION = {
    "cgroup2": _Files(("memory.max", "memory.high"), "memory.current", "inactive_file"),
    "cgroup": _Files(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
}


def available_bytes(root: Path = SYSTEM) -> int | None:
    """What the machine can give to processes without swapping, within the limits of this one's control groups; None
    where the system does not say."""
    if sys.platform != "linux":
        return None
    left = [
        max(0, limit - _number(folder / files.used) + _droppable(folder, files))
        for folder, files, limit in _limits(root)
    ]
    return min([*_of_machine(root, "MemAvailable"), *left], default=None)


def total_bytes(root: Path = SYSTEM) -> int:
    """Memory of this machine, or what this process's control groups may have of it."""
    if sys.platform != "linux":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([*_of_machine(root, "MemTotal"), *(limit for _, _, limit in _limits(root))])


def _of_machine(root: Path, name: str) -> list[int]:
    """A line of /proc/meminfo, in bytes; old kernels do not have all of them."""
    lines = (root / "proc/meminfo").read_text().splitlines()
    return [int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")]


def _limits(root: Path) -> Iterator[tuple[Path, _Files, int]]:
    """The folder of each control group that limits this process, with its limit in bytes."""
    for folder, files in _groups(root):
        for name in files.limits:
            with contextlib.suppress(OSError, ValueError):  # not there, as in the topmost group, or "max"
                yield folder, files, int((folder / name).read_text())


def _groups(root: Path) -> Iterator[tuple[Path, _Files]]:
    """This process's control groups of memory, its own first, then those above it as far as they are mounted here.

    A container may see its own group as the topmost one, under a path of the host that leads nowhere here: then the
    place where it is mounted is that group.
    """
    own = dict(_own_paths(root))
    for mounted, at, version in _mounts(root):
        path = own.get(version, PurePosixPath("/"))
        below = path.relative_to(mounted) if path.is_relative_to(mounted) else PurePosixPath()
        if ".." in below.parts:
            below = PurePosixPath()
        for group in (below, *below.parents):
            yield root / at / group, _OF_VERSION[version]


def _own_paths(root: Path) -> Iterator[tuple[str, PurePosixPath]]:
    """(version, path of this process's group in that hierarchy), of /proc/self/cgroup: `ID:CONTROLLERS:PATH`."""
    lines = (line.split(":", 2) for line in _lines(root / "proc/self/cgroup") if line)
    for _, controllers, path in lines:
        if not controllers:
            yield "cgroup2", PurePosixPath(path)
        elif "memory" in controllers.split(","):
            yield "cgroup", PurePosixPath(path)


def _mounts(root: Path) -> Iterator[tuple[PurePosixPath, str, str]]:
    """(group that is mounted, where without the first slash, version), of /proc/self/mountinfo: `ID PARENT DEVICE ROOT
    PLACE OPTIONS ... - TYPE SOURCE OPTIONS`."""
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        place, kind = before.split(), after.split()
        if len(place) > 4 and len(kind) > 2 and kind[0] in _OF_VERSION:
            if kind[0] == "cgroup2" or "memory" in kind[2].split(","):
                yield PurePosixPath(place[3]), place[4].lstrip("/"), kind[0]


def _lines(path: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return path.read_text().splitlines()
    return []


def _number(path: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text())
    return 0


def _droppable(folder: Path, files: _Files) -> int:
    """Bytes of caches that can be dropped."""
    stat = dict(line.split() for line in _lines(folder / "memory.stat") if len(line.split()) == 2)
    return int(stat.get(files.droppable, 0))


def heap_bytes() -> int | None:
    """Bytes in use on the C heap, mapped blocks included (glibc's `mallinfo2`); None where there is no such count."""
    mallinfo2 = _mallinfo2()
    info = mallinfo2() if mallinfo2 is not None else None
    return None if info is None else int(info.uordblks + info.hblkhd)


class _Mallinfo2(ctypes.Structure):
    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names.split())


@functools.cache
def _mallinfo2() -> ctypes._NamedFuncPointer | None:
    """The C library's function, where it has one (glibc >= 2.33)."""
    function = getattr(ctypes.CDLL(None), "mallinfo2", None) if sys.platform == "linux" else None
    if function is not None:
        function.restype = _Mallinfo2
    return function


def resident_bytes() -> tuple[int, int]:
    """The resident set now, and its peak."""
    if sys.platform == "linux":
        with open("/proc/self/status") as file:
            fields = dict(line.split(":", 1) for line in file)
        now, most = (int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))  # from kB
        return now, most
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS
    return peak, peak


def available_cores() -> int:
    """Cores this process may run on (its affinity mask, which containers and Slurm narrow)."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor_name() -> str:
    """As Linux has it: libraries choose kernels by more than what torch calls the capability."""
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.machine()


def other_threads_run() -> bool:
    """Whether another thread of this process runs, or would; False where the system does not say."""
    own = str(threading.get_native_id())
    try:
        tasks = [task for task in os.listdir("/proc/self/task") if task != own]
    except OSError:
        return False
    return any(_state_of(task) == "R" for task in tasks)


def _state_of(task: str) -> str:
    """Of a thread of this process; "" of one that has ended."""
    try:
        with open(f"/proc/self/task/{task}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""
