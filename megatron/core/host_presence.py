"""Ranks of one host that wait for each other without a message: a counter each, in memory that all of them see.

A rank that comes to the n-th point of its way counts to n; whoever waits for the others there waits for their counters.
A tenth of the CPU time of gloo's smallest collective, which wakes two more threads a rank.

[Note: what a point is] Ranks have to come to the same points in the same order, as with collectives. A count does not
say what a rank has come to, so it leaves a mark beside it, and whoever has waited compares.

[Note: order of writes] What a rank wrote before it counted is seen by those who have seen the count: so on x86, where
stores are seen in their order. Elsewhere there are no counters, and ranks send messages.
"""

from __future__ import annotations

import os
import platform
import select
import time
import weakref
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from megatron.core.parallel_state import Group

_MARKS = 64  # of the last points
NUM_COUNTERS = 1 + _MARKS
_SPINS = 100  # looks before the first sleep: peers are most often there, or nearly
_SHORTEST_S, _LONGEST_S = 2e-5, 1e-3  # of a sleep
_LOOK_AT_PROCESSES_S = 0.05

_of_process_group: weakref.WeakKeyDictionary[dist.ProcessGroup, HostPresence] = weakref.WeakKeyDictionary()


class HostPresence:
    """counters: of every rank of the group, in order, int64 [NUM_COUNTERS] each. processes: theirs, as `watched` gives
    them."""

    def __init__(self, group: Group, counters: Sequence[Tensor], processes: Sequence[int]) -> None:
        self._timeout_s = group.timeout.total_seconds()
        arrays = [counter.numpy() for counter in counters]
        self._own = arrays[group.rank]
        self._others = {
            rank: array for rank, array in zip(group.ranks, arrays, strict=True) if array is not self._own
        }
        self._poll = select.poll()
        self._rank_of = {}
        for rank, file in zip(group.ranks, processes, strict=True):
            if file >= 0:
                self._poll.register(file, select.POLLIN)
                self._rank_of[file] = rank
        weakref.finalize(self, close_files, tuple(self._rank_of))

    def come(self, what: str) -> Coming:
        """This rank comes to its next point. what: it does there, as all others."""
        number = int(self._own[0]) + 1
        self._own[1 + number % _MARKS] = zlib.crc32(what.encode())
        self._own[0] = number
        return Coming(self, number)

    def are_at(self, number: int) -> bool:
        """Whether all ranks have come to a point."""
        return all(int(other[0]) >= number for other in self._others.values())

    def wait(self, number: int) -> None:
        """Return once all ranks have come there. Raises RuntimeError, as backends do, where one cannot."""
        for _ in range(_SPINS):
            if self.are_at(number):
                break
        else:
            self._wait_long(number)
        self._compare(number)

    def _compare(self, number: int) -> None:
        """See [Note: what a point is]."""
        mark = int(self._own[1 + number % _MARKS])
        for rank, other in self._others.items():
            if int(other[1 + number % _MARKS]) != mark and int(other[0]) < number + _MARKS // 2:
                raise AssertionError(
                    f"point {number}: rank {rank} has come there for something else than this rank"
                )

    def _wait_long(self, number: int) -> None:
        started = looked = time.monotonic()
        while not self.are_at(number):
            now = time.monotonic()
            if now - looked > _LOOK_AT_PROCESSES_S:
                looked = now
                gone = [self._rank_of[file] for file, _ in self._poll.poll(0)]
                if gone and not self.are_at(number):  # they may have come, and ended since
                    raise RuntimeError(f"connection closed by peer: the process of rank {gone[0]} has ended")
                if now - started > self._timeout_s:
                    late = [rank for rank, other in self._others.items() if int(other[0]) < number]
                    raise RuntimeError(f"timed out after {now - started:.1f} s waiting for ranks {late}")
            time.sleep(min(_LONGEST_S, max(_SHORTEST_S, (now - started) / 4)))


class Coming:
    """A point that this rank has come to: done when all have. A work, as backends have them."""

    def __init__(self, presence: HostPresence, number: int) -> None:
        self._presence, self._number = presence, number

    def is_completed(self) -> bool:
        return self._presence.are_at(self._number)

    def wait(self) -> None:
        self._presence.wait(self._number)


def watched(processes: Sequence[int]) -> list[int] | None:
    """A file for each process that tells of its end; -1 for this one. None where the system has no such files, or
    writes may be seen in another order."""
    opener = getattr(os, "pidfd_open", None)  # Linux
    if opener is None or platform.machine() not in ("x86_64", "AMD64"):
        return None
    files: list[int] = []
    try:
        for process in processes:
            files.append(-1 if process == os.getpid() else opener(process))
    except OSError:
        close_files(files)
        return None
    return files


def presence_of(group: Group) -> HostPresence | None:
    """None where ranks of the group meet by messages."""
    return None if group.process_group is None else _of_process_group.get(group.process_group)


def set_presence(group: Group, presence: HostPresence) -> None:
    """From here on ranks of the group meet through it."""
    assert group.process_group is not None, f"{group.purpose!r} is a group of one"
    _of_process_group[group.process_group] = presence


def close_files(files: Sequence[int]) -> None:
    """Of `watched`."""
    for file in files:
        if file >= 0:
            os.close(file)
