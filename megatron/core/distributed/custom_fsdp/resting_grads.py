"""Gradients at rest, without memory while they mean nothing: from a step's beginning to their unit's first reduction.

That is when activations are at their most. Views of them stay valid; reading one in between would read freed memory,
so they keep it where somebody holds a view that was not there when the first step began, or an array of numpy's, which
pins it for good.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from megatron.core.memory_tracker import MemoryTracker


class RestingGrads:
    """The gradients of one unit's buckets."""

    def __init__(self, unit: str, grads: Iterable[Tensor], tracker: MemoryTracker) -> None:
        self._unit = unit
        self._storages = [tensor.untyped_storage() for tensor in grads]
        self._bytes = [storage.nbytes() for storage in self._storages]
        self._tracker = tracker
        self._views: list[int] | None = None  # references to each storage when the first step began
        self._held = True
        tracker.hold("main_grads", unit, sum(self._bytes))

    def release(self) -> None:
        """What they hold is of no more use."""
        views = [_references(storage) for storage in self._storages]
        if self._views is None:
            self._views = views
        pinned = not all(storage.resizable() for storage in self._storages)
        if self._held and not pinned and all(now <= old for now, old in zip(views, self._views, strict=True)):
            for storage in self._storages:
                storage.resize_(0)
            self._tracker.free("main_grads", self._unit, sum(self._bytes))
            self._held = False

    def hold(self) -> None:
        """They have memory on return; their values are anything."""
        if self._held:
            return
        for storage, num_bytes in zip(self._storages, self._bytes, strict=True):
            storage.resize_(num_bytes)
        self._tracker.hold("main_grads", self._unit, sum(self._bytes))
        self._held = True


def _references(storage: torch.UntypedStorage) -> int:
    """How many tensors share a storage (torch keeps no public word for it)."""
    return int(torch._C._storage_Use_Count(storage._cdata))
