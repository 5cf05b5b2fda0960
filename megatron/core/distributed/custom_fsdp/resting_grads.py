"""The gradients at rest, without memory while they mean nothing: from the beginning of a step to its first reduction.

That is when activations are at their most. Views of them stay valid; reading one in between would read freed memory, so
the memory stays where somebody holds a view that was not there when the first step began.
"""

from __future__ import annotations

import torch

from megatron.core.distributed.custom_fsdp.ledger import Ledger
from megatron.core.distributed.flat_buffer import FlatBuffer


class RestingGrads:
    """One allocation a dtype, released and held as a whole."""

    def __init__(self, buffer: FlatBuffer, ledger: Ledger) -> None:
        self._storages = [flat.untyped_storage() for flat in buffer.main_grads_flat.values()]
        self._bytes = [storage.nbytes() for storage in self._storages]
        self._ledger = ledger
        self._views: list[int] | None = None  # references to each storage when the first step began
        self._held = True

    def release(self) -> None:
        """What they hold is of no more use."""
        views = [_references(storage) for storage in self._storages]
        if self._views is None:
            self._views = views
        if self._held and all(now <= before for now, before in zip(views, self._views, strict=True)):
            for storage, num_bytes in zip(self._storages, self._bytes, strict=True):
                storage.resize_(0)
                self._ledger.free("main_grads", "", num_bytes)
            self._held = False

    def hold(self) -> None:
        """They have memory on return; their values are anything."""
        if self._held:
            return
        for storage, num_bytes in zip(self._storages, self._bytes, strict=True):
            storage.resize_(num_bytes)
            self._ledger.hold("main_grads", "", num_bytes)
        self._held = True


def _references(storage: torch.UntypedStorage) -> int:
    """How many tensors share a storage (torch keeps no public word for it)."""
    return int(torch._C._storage_Use_Count(storage._cdata))
