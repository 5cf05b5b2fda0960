"""Memory that comes and goes: of gathered weights, of gradients on their way to a shard, and of gradients at rest.

[Note: storages] A parameter is a view of its unit's full tensor, for the whole run. The tensor's storage is empty while
the weights are sharded; `acquire` gives it memory again, `release` takes it away, and no view notices: parameters, and
what autograd saved of them, keep identity and storage object. A view that somebody reads while the storage is empty
reads freed memory; `released_tensors.py` finds those.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from megatron.core.memory_tracker import MemoryTracker
from megatron.core.module import ModelError

# Of the memory tracker, by role.
CATEGORY = {"weights": "gathered", "grads": "grads", "extra": "extra", "rest": "main_grads"}
_BOUNDARY = 256  # bytes; where a tensor in a slot begins: any kernel is content with it


def own_storage(role: str, name: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A transient tensor [numel] with a storage of its own."""
    tensor = torch.empty(numel, dtype=dtype, device=device)
    tensor.untyped_storage().resize_(0)
    return tensor


@contextlib.contextmanager
def with_memory(tensor: Tensor) -> Iterator[Tensor]:
    """A transient tensor has memory inside; its values are anything. Views can be made only where there is memory."""
    storage = tensor.untyped_storage()
    if storage.nbytes() or not tensor.numel():
        yield tensor
        return
    storage.resize_(int(tensor.storage_offset() + tensor.numel()) * tensor.element_size())
    try:
        yield tensor
    finally:
        storage.resize_(0)


class AllocatedMemory:
    """Allocates and frees: on CUDA from torch's caching allocator, on CPU from the C library. Roles: see `CATEGORY`."""

    # Of units whose weights and gradients lie in memory that others take in turn.
    slot_of_unit: Mapping[str, int] = MappingProxyType({})

    def __init__(self, tracker: MemoryTracker) -> None:
        self._tracker = tracker

    def new(self, role: str, unit: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """[numel] without memory."""
        return own_storage(role, unit, numel, dtype, device)

    def acquire(self, role: str, unit: str, tensors: Sequence[Tensor]) -> None:
        """Memory for all of a unit's tensors of one role; their values are anything."""
        for tensor in tensors:
            num_bytes = tensor.numel() * tensor.element_size()
            storage = tensor.untyped_storage()
            assert storage.nbytes() == 0, f"{role} of {unit}: acquired twice"
            storage.resize_(num_bytes)
            self._tracker.hold(CATEGORY[role], unit, num_bytes)

    def release(self, role: str, unit: str, tensors: Sequence[Tensor]) -> None:
        """Take it away. Raises ModelError where somebody has pinned it."""
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
        """Whether `acquire` has to wait until another unit has released its memory."""
        return False


class DoubleBuffer(AllocatedMemory):
    """Two lasting slots a role, shared by all units but those that overflow. Units take them in turns in the order of
    the forward, whatever their sizes, so that neighbours never share one: while one is used, the next is on its way.

    slot_of: unit -> slot, None for a unit with memory of its own. A slot is as large as its largest unit; a unit's
    tensors of one role lie in it one after the other.
    """

    def __init__(self, tracker: MemoryTracker, slot_of: Mapping[str, int | None]) -> None:
        super().__init__(tracker)
        self._slot_of = slot_of
        self.slot_of_unit = {unit: slot for unit, slot in slot_of.items() if slot is not None}
        self._storages: dict[tuple[str, int], torch.UntypedStorage] = {}
        self._slot_bytes: dict[tuple[str, int], int] = {}
        self._used_bytes: dict[tuple[str, str], int] = {}  # (role, unit) -> bytes given out
        self._held_by: dict[tuple[str, int], str] = {}

    def new(self, role: str, unit: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        slot = self._slot(role, unit)
        if slot is None:
            return super().new(role, unit, numel, dtype, device)
        if slot not in self._storages:
            self._storages[slot] = torch.empty(0, dtype=torch.uint8, device=device).untyped_storage()
        start = math.ceil(self._used_bytes.get((role, unit), 0) / _BOUNDARY) * _BOUNDARY
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
            super().acquire(role, unit, tensors)
            return
        other = self._held_by.setdefault(slot, unit)
        if other != unit:  # parameters and accumulators are views of the slot, and of no other
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
            super().release(role, unit, tensors)
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
    turns = [unit for unit in range(num_units) if unit not in lasting]
    return tuple(turns.index(unit) % 2 if unit in turns else None for unit in range(num_units))


class RestingGrads:
    """The gradients at rest of one unit's buckets, without memory while they mean nothing: from a step's beginning to
    the unit's first reduction, when activations are at their most.

    Views of them stay valid; reading one in between would read freed memory, so they keep it where somebody holds a
    view that was not there when the first step began, or an array of numpy's, which pins it for good.
    """

    def __init__(self, unit: str, grads: Iterable[Tensor], tracker: MemoryTracker) -> None:
        self._unit, self._grads, self._memory = unit, tuple(grads), AllocatedMemory(tracker)
        self._views: list[int] | None = None  # references to each storage when the first step began
        self._held = True
        self.num_bytes = sum(grad.nbytes for grad in self._grads)
        tracker.hold("main_grads", unit, self.num_bytes)

    def release(self) -> None:
        """What they hold is of no more use."""
        storages = [grad.untyped_storage() for grad in self._grads]
        # How many tensors share each storage (torch keeps no public word for it).
        views = [int(torch._C._storage_Use_Count(storage._cdata)) for storage in storages]
        self._views = views if self._views is None else self._views
        pinned = not all(storage.resizable() for storage in storages)
        if self._held and not pinned and all(now <= old for now, old in zip(views, self._views, strict=True)):
            self._memory.release("rest", self._unit, self._grads)
            self._held = False

    def hold(self) -> None:
        """They have memory on return; their values are anything."""
        if not self._held:
            self._memory.acquire("rest", self._unit, self._grads)
            self._held = True
