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
from megatron.core.host_presence import (
    NUM_COUNTERS,
    HostPresence,
    close_files,
    presence_of,
    set_presence,
    watched,
)

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
        told = _tell_all([_host(), os.getpid(), own, os.fstat(own).st_ino if own >= 0 else 0], group)
        maps = _map_all(told, numel, dtype)
        shared = _all_can(maps is not None, group)  # and nobody closes his file before all have mapped it
    finally:
        if own >= 0:
            os.close(own)
    if maps is None or not shared:
        return None
    mine = maps[group.rank]
    count_mapped(num_bytes)
    weakref.finalize(mine, count_mapped, -num_bytes)
    return SharedTensor(mine, tuple(maps))


def meet_on_host(group: Group) -> None:
    """From here on, ranks of the group wait for each other (`collectives.fence`) through memory, where they can all
    share some. Communicates over the group. Raises PeerLostError."""
    if presence_of(group) is not None:
        return
    counters = shared_zeros(NUM_COUNTERS, torch.int64, group)
    if counters is None:
        return
    files = watched([process for (process,) in _tell_all([os.getpid()], group)])
    if _all_can(files is not None, group):
        assert files is not None, "this rank has said that it can"
        set_presence(group, HostPresence(group, counters.of_ranks, files))
    else:
        close_files(files or ())


def _tell_all(own: list[int], group: Group) -> list[list[int]]:
    """Everybody's numbers, in rank order."""
    told = torch.empty(group.size, len(own), dtype=torch.int64)
    collectives.all_gather(told, torch.tensor(own), group)
    return told.tolist()


def _all_can(can: bool, group: Group) -> bool:
    flag = torch.tensor(can, dtype=torch.int32)
    collectives.all_reduce(flag, group, "min")
    return bool(flag)  # sync: at construction


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
    """Every rank's tensor; None where one cannot be had. told: (host, process, file, inode) of each rank.

    Processes differ, or hosts do that seem to be one (started from one image).
    """
    if len({process for _, process, _, _ in told}) < len(told):
        return None
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
