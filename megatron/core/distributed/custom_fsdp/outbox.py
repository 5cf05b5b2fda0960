"""Where a rank puts the slices of a unit's gradients that are others' to sum: memory that these read by themselves.

[Note: two slots are enough] Reductions take the slots in turns, in one order on all ranks, and one begins (`put`) only
when the last one has ended here. A reduction ends when all ranks have told of its beginning. So when number k+1
begins, all ranks have begun k, have therefore ended k-1, and nobody reads its slot any more: no rank needs to say so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.core import collectives
from megatron.core.distributed.bucket_memory import num_bytes
from megatron.core.host_memory import SharedTensor, shared_zeros
from megatron.core.parallel_state import Group

MAX_SLOT_BYTES = 32 << 20  # the slots are there for the whole run
_ALIGNMENT = 64


class Outbox:
    """Two slots, of half of `memory` each."""

    def __init__(self, memory: SharedTensor, group: Group) -> None:
        self._group = group
        half = memory.own.numel() // 2
        self._slots = [[one.narrow(0, start, half) for one in memory.of_ranks] for start in (0, half)]
        self.num_bytes = 2 * half
        self._capacity = half
        self._rows: dict[tuple[int, int], list[list[Tensor]]] = {}
        self._turn = 0
        self._last: collectives.Pending | None = None

    @classmethod
    def of_units(cls, units: Sequence[Sequence[Tensor]], group: Group) -> Outbox | None:
        """For the whole gradients of these units. A slot holds the one in the middle, by size, and MAX_SLOT_BYTES at
        most: larger ones are sent. None where no memory is shared, or none would fit. Communicates over the group."""
        if group.size == 1 or group.backend != "gloo":
            return None
        sizes = sorted(size for fulls in units if (size := _slot_bytes(fulls, group.size)) > 0)
        fitting = [size for size in sizes[: len(sizes) // 2 + 1] if size <= MAX_SLOT_BYTES]
        memory = shared_zeros(2 * fitting[-1], torch.uint8, group) if fitting else None
        return None if memory is None else cls(memory, group)

    def fits(self, fulls: Sequence[Tensor]) -> bool:
        return 0 < _slot_bytes(fulls, self._group.size) <= self._capacity

    def put(self, unit: int, fulls: Sequence[Tensor]) -> list[list[Tensor]]:
        """Copy others' slices of a unit's whole gradients out. Returns of each, in rank order, what every rank has for
        this one: to be summed by a reduction that `taken_by` is told of. Waits for the last one."""
        if self._last is not None:
            self._last.wait()
        self._turn = 1 - self._turn
        rank, size = self._group.rank, self._group.size
        mine = self._rows_of(unit, fulls, rank)
        readable = []
        for number, full in enumerate(fulls):
            rows = full.view(size, full.numel() // size)
            for other in range(size):
                if other != rank:
                    mine[number][_row(other, rank)].copy_(rows[other])
            readable.append(
                [
                    rows[rank]
                    if source == rank
                    else self._rows_of(unit, fulls, source)[number][_row(rank, source)]
                    for source in range(size)
                ]
            )
        return readable

    def taken_by(self, pending: collectives.Pending) -> None:
        """The reduction that reads what was put last."""
        self._last = pending

    def _rows_of(self, unit: int, fulls: Sequence[Tensor], source: int) -> list[list[Tensor]]:
        """A rank's slot of this turn, as rows for the others, of each of a unit's tensors."""
        key = (unit * 2 + self._turn, source)
        if key not in self._rows:
            self._rows[key] = _cut(self._slots[self._turn][source], fulls, self._group.size)
        return self._rows[key]


def _cut(slot: Tensor, fulls: Sequence[Tensor], size: int) -> list[list[Tensor]]:
    made, start = [], 0
    for full in fulls:
        end = start + num_bytes([full]) // size * (size - 1)
        rows = slot[start:end].view(full.dtype).view(size - 1, full.numel() // size)
        made.append(list(rows))
        start = _aligned(end)
    return made


def _slot_bytes(fulls: Sequence[Tensor], size: int) -> int:
    return sum(_aligned(num_bytes([full]) // size * (size - 1)) for full in fulls)


def _aligned(size: int) -> int:
    return math.ceil(size / _ALIGNMENT) * _ALIGNMENT


def _row(target: int, source: int) -> int:
    """A rank's place among the others of `source`."""
    return target if target < source else target - 1
