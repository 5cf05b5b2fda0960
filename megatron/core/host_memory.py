"""Flat tensors in memory that all ranks of one host see: what lies there is read by others without being sent.

[Note: whose turn it is] Nothing tells a reader that its neighbour is writing. So a tensor here is written in one part
of a step and read by others in another, and a `collectives.fence` stands between them, in both directions.
"""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron.core import collectives
from megatron.core.device import count_mapped

if TYPE_CHECKING:
    from megatron.core.parallel_state import Group


@dataclass(frozen=True)
class SharedTensor:
    """own: this rank's, 1-D. of_ranks: that of each rank of the group, in its order, here too; only read."""

    own: Tensor
    of_ranks: tuple[Tensor, ...]


def shared_zeros(numel: int, dtype: torch.dtype, group: Group) -> SharedTensor | None:
    """Zeros [numel] of each rank, in memory that all ranks of the group can read; numel and dtype alike on all.

    None, on all ranks alike, where there is nobody to share with, where they are on several hosts or devices, or where
    the system lets one of them not share memory (no Linux, no permission, no room). The memory has no name and goes
    with the last process that uses it, however that ends. Communicates over the group. Raises PeerLostError.
    """
    if group.size == 1 or group.backend != "gloo" or group.device.kind != "cpu" or numel == 0:
        return None
    num_bytes = numel * dtype.itemsize
    own = _new_file(num_bytes)
    try:
        told = torch.empty(group.size, 4, dtype=torch.int64)
        inode = os.fstat(own).st_ino if own >= 0 else 0
        collectives.all_gather(told, torch.tensor([_host(), os.getpid(), own, inode]), group)
        maps = _map_all(told.tolist(), numel, dtype)
        shared = torch.tensor(maps is not None, dtype=torch.int32)
        collectives.all_reduce(shared, group, "min")  # and nobody closes his file before all have mapped it
    finally:
        if own >= 0:
            os.close(own)
    if maps is None or not shared:  # sync: at construction
        return None
    mine = maps[group.rank]
    count_mapped(num_bytes)
    weakref.finalize(mine, count_mapped, -num_bytes)
    return SharedTensor(mine, tuple(maps))


def _new_file(num_bytes: int) -> int:
    """A file without a name, in memory, with room for all of it; -1 where there is none."""
    make = getattr(os, "memfd_create", None)  # Linux
    if make is None:
        return -1
    file = -1
    try:
        file = make("megatron-weights")
        os.posix_fallocate(
            file, 0, num_bytes
        )  # now, not at the first write, which would be the process's end
    except OSError:
        if file >= 0:
            os.close(file)
        return -1
    return int(file)


@functools.cache
def _host() -> int:
    """A number that two processes have in common where they can open each other's files by process id."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return zlib.crc32(f"{boot} {os.readlink('/proc/self/ns/pid')}".encode())
    return -1


def _map_all(told: list[list[int]], numel: int, dtype: torch.dtype) -> list[Tensor] | None:
    """Every rank's tensor; None where one cannot be had. told: (host, process, file, inode) of each rank."""
    if any(host != told[0][0] or host < 0 or file < 0 for host, _, file, _ in told):
        return None
    maps = []
    for _, process, file, inode in told:
        path = f"/proc/{process}/fd/{file}"
        try:
            if os.stat(path).st_ino != inode:
                return None
            maps.append(torch.from_file(path, shared=True, size=numel, dtype=dtype))
        except (OSError, RuntimeError):  # torch's error for a file that cannot be opened is a RuntimeError
            return None
    return maps
