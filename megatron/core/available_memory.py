"""How much memory this machine has to give (floor 0)."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path


def available_bytes() -> int | None:
    """What the machine can give to processes without swapping, within the limit of this one's container."""
    if sys.platform != "linux":
        return None
    with open("/proc/meminfo") as file:
        sizes = {name: int(rest.split()[0]) * 1024 for name, rest in (line.split(":") for line in file)}
    found = [sizes.get("MemAvailable"), left_in_container(Path("/sys/fs/cgroup"))]
    return min((size for size in found if size is not None), default=None)


def total_bytes() -> int:
    """Memory of this machine, or what its container may have of it."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # control groups, version 2 and 1
        with contextlib.suppress(OSError, ValueError):
            return min(machine, int(Path("/sys/fs/cgroup", name).read_text()))
    return machine


def left_in_container(root: Path) -> int | None:
    """Bytes below the memory limit of the control group that is mounted there (version 2, else 1), caches that can be
    dropped included; None without a limit."""
    for folder, limit, used in (
        (root, "memory.max", "memory.current"),
        (root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        try:
            allowed, in_use = (folder / limit).read_text().strip(), int((folder / used).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except OSError:
            continue
        if allowed == "max":
            return None
        droppable = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
        return max(0, int(allowed) - in_use + droppable)
    return None
