"""Memory of transient tensors: gathered weights, gradients on their way to a shard.

[Note: storages] A parameter is a view of its unit's full tensor, for the whole run. The tensor's storage is empty while
the weights are cut; `acquire` gives it memory again, `release` takes it away, and no view notices: parameters, and what
autograd saved of them, keep identity and storage object. A view that somebody reads while the storage is empty reads
freed memory; `debug.py` finds those.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from megatron.core.distributed.bucket_memory import own_storage
from megatron.core.memory_tracker import MemoryTracker
from megatron.core.module import ModelError

CATEGORY = {"weights": "gathered", "grads": "grads", "extra": "extra"}  # of the memory tracker, by role


class TransientMemory(Protocol):
    """Where transient tensors live."""

    def new(self, role: str, unit: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """[numel] without memory. role: "weights", "grads" or "extra"."""

    def acquire(self, role: str, unit: str, tensors: Sequence[Tensor]) -> None:
        """Memory for all of a unit's tensors of one role; their values are anything."""

    def release(self, role: str, unit: str, tensors: Sequence[Tensor]) -> None:
        """Take it away. Raises ModelError where somebody has pinned it."""

    def is_blocked(self, role: str, unit: str) -> bool:
        """Whether `acquire` has to wait until another unit has released its memory."""


class AllocatedMemory:
    """Allocates and frees: on CUDA from torch's caching allocator, on CPU from the C library."""

    def __init__(self, tracker: MemoryTracker) -> None:
        self._tracker = tracker

    def new(self, role: str, unit: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return own_storage(role, unit, numel, dtype, device)

    def acquire(self, role: str, unit: str, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            num_bytes = tensor.numel() * tensor.element_size()
            storage = tensor.untyped_storage()
            assert storage.nbytes() == 0, f"{role} of {unit}: acquired twice"
            storage.resize_(num_bytes)
            self._tracker.hold(CATEGORY[role], unit, num_bytes)

    def release(self, role: str, unit: str, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if not storage.resizable():
                raise ModelError(
                    f"{role} of unit {unit!r} were made an array while they were gathered (Tensor.numpy), which pins "
                    "memory that is about to be freed: make it of a copy, tensor.detach().clone().numpy()"
                )
            self._tracker.free(CATEGORY[role], unit, storage.nbytes())
            storage.resize_(0)

    def is_blocked(self, role: str, unit: str) -> bool:
        return False


class DoubleBuffer:
    """Two lasting slots a role, shared by all units but those that overflow. Units take them in turns in the order of
    the forward, whatever their sizes, so that neighbours never share one: while one is used, the next is on its way.

    slot_of: unit -> slot, None for a unit with memory of its own. A slot is as large as its largest unit; a unit's
    tensors of one role lie in it one after the other.
    """

    def __init__(self, tracker: MemoryTracker, slot_of: Mapping[str, int | None]) -> None:
        self._tracker = tracker
        self._slot_of = slot_of
        self._beside = AllocatedMemory(tracker)
        self._storages: dict[tuple[str, int], torch.UntypedStorage] = {}
        self._slot_bytes: dict[tuple[str, int], int] = {}
        self._used_bytes: dict[tuple[str, str], int] = {}  # (role, unit) -> bytes given out
        self._held_by: dict[tuple[str, int], str] = {}

    def new(self, role: str, unit: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        slot = self._slot(role, unit)
        if slot is None:
            return self._beside.new(role, unit, numel, dtype, device)
        if slot not in self._storages:
            self._storages[slot] = torch.empty(0, dtype=torch.uint8, device=device).untyped_storage()
        start = self._used_bytes.get((role, unit), 0)
        start = -(-start // 256) * 256  # each tensor on a boundary that any kernel is content with
        end = start + numel * dtype.itemsize
        self._used_bytes[role, unit] = end
        self._slot_bytes[slot] = max(self._slot_bytes.get(slot, 0), end)
        storage = self._storages[slot]
        if storage.nbytes() < end:
            storage.resize_(end)
        tensor = torch.empty(0, dtype=dtype, device=device)
        tensor.set_(storage, start // dtype.itemsize, (numel,), (1,))
        storage.resize_(0)  # until it is used for the first time
        return tensor

    def acquire(self, role: str, unit: str, tensors: Sequence[Tensor]) -> None:
        slot = self._slot(role, unit)
        if slot is None:
            self._tracker.overflows += 1
            self._beside.acquire(role, unit, tensors)
            return
        other = self._held_by.setdefault(slot, unit)
        if (
            other != unit
        ):  # parameters and accumulators are views of the slot: there is no other memory for them
            raise ModelError(
                f"--fsdp-double-buffer: unit {unit!r} needs its slot for {CATEGORY[role]} {role} while unit {other!r} "
                "still uses it: units take the slots in turns, in the order in which they are registered, and these "
                "two do not run one after the other, or nothing tells that backward is through the latter (its inputs "
                "are leaves, and a parameter of it is unused or frozen); leave out --fsdp-double-buffer"
            )
        storage = self._storages[slot]
        if storage.nbytes() == 0:
            storage.resize_(self._slot_bytes[slot])
            self._tracker.hold("slots", f"{role} {slot[1]}", self._slot_bytes[slot])

    def release(self, role: str, unit: str, tensors: Sequence[Tensor]) -> None:
        slot = self._slot(role, unit)
        if slot is None:
            self._beside.release(role, unit, tensors)
        else:
            assert self._held_by.pop(slot) == unit

    def is_blocked(self, role: str, unit: str) -> bool:
        slot = self._slot(role, unit)
        return slot is not None and self._held_by.get(slot, unit) != unit

    def _slot(self, role: str, unit: str) -> tuple[str, int] | None:
        slot = self._slot_of[unit] if role in ("weights", "grads") else None
        return None if slot is None else (role, slot)


def plan_slots(num_units: int, *, lasting: Collection[int] = ()) -> tuple[int | None, ...]:
    """The slot of each unit, in the order of the forward: 0 or 1, None where it has memory of its own.

    lasting: units that stay while others come and go (gathered from first to last use, or kept by a policy), or that
    run inside others, cannot take turns and get memory of their own; the others take turns as if these were not there.
    """
    assert all(0 <= unit < num_units for unit in lasting), (lasting, num_units)
    slot_of: list[int | None] = [None] * num_units
    for turn, unit in enumerate(unit for unit in range(num_units) if unit not in lasting):
        slot_of[unit] = turn % 2
    return tuple(slot_of)
