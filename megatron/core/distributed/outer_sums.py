"""Sums over distributed optimizer instances: what is left once gradients are summed over the inner ranks.

Once a step, and one collective a dtype: the ranks of an outer group hold the same part of the gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core import collectives
from megatron.core.distributed.bucket_memory import BucketMemory, num_bytes
from megatron.core.distributed.flat_buffer import FlatBuffer
from megatron.core.distributed.ledger import Ledger
from megatron.core.distributed.sharding import Cut
from megatron.core.distributed.traffic_counter import TrafficCounter
from megatron.core.parallel_state import Group


class OuterSums:
    """Communicates over dp_outer. Where the optimizer is cut over it too (HFSDP), each rank gets its part only.
    ledger: is told of the packed buffer and of what exchanges hold."""

    def __init__(
        self, buffer: FlatBuffer, group: Group, traffic: TrafficCounter, ledger: Ledger | None = None
    ) -> None:
        self._group = group
        self._ledger = Ledger() if ledger is None else ledger
        self._traffic = traffic
        self._scatters = buffer.sharding.optimizer is Cut.FULL
        self._by_dtype: dict[torch.dtype, list[BucketMemory]] = {}
        for bucket in buffer.buckets:
            if bucket.main_grads is not None:
                self._by_dtype.setdefault(bucket.main_grads.dtype, []).append(bucket)

    def add(self) -> None:
        """The optimizer's part of the gradients holds the sum over all instances. Raises PeerLostError."""
        if self._group.size == 1:
            return
        for buckets in self._by_dtype.values():
            if self._scatters:
                self._scatter(buckets)
            else:
                self._sum(buckets)

    def _scatter(self, buckets: list[BucketMemory]) -> None:
        items = [_tensors(bucket.optimizer_grads, bucket.main_grads) for bucket in buckets]
        self._traffic.count("outer_reduce_scatter", num_bytes(full for _, full in items))
        self._wait(collectives.reduce_scatter_units(items, self._group, accumulate=False, async_op=True))

    def _sum(self, buckets: list[BucketMemory]) -> None:
        parts = [_tensors(bucket.optimizer_grads, bucket.main_grads)[0] for bucket in buckets]
        payload = num_bytes(parts)
        with self._ledger.holding("outer", payload):
            packed = torch.cat(parts)
            self._traffic.count("outer_all_reduce", payload)
            self._wait(collectives.sum_gradients(packed, self._group))
            for part, total in zip(parts, packed.split([part.numel() for part in parts]), strict=True):
                part.copy_(total)

    def _wait(self, pending: collectives.Pending) -> None:
        """Complete the sum; until then an exchange holds what the others have sent."""
        with self._ledger.holding("exchange", pending.temporary_bytes):
            pending.wait()


def _tensors(part: Tensor | None, full: Tensor | None) -> tuple[Tensor, Tensor]:
    assert part is not None, "a frozen bucket"
    assert full is not None, "a frozen bucket"
    return part, full
