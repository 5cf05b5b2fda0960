"""Sums over distributed optimizer instances: what is left once gradients are summed over the inner ranks.

Once a step, and one collective a dtype: the ranks of an outer group hold the same part of the gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core import collectives
from megatron.core.distributed.flat_buffer import BucketMemory, FlatBuffer
from megatron.core.distributed.sharding import Cut
from megatron.core.distributed.traffic_counter import TrafficCounter
from megatron.core.parallel_state import Group


class OuterSums:
    """Communicates over dp_outer. Where the optimizer is cut over it too (HFSDP), each rank gets its part only."""

    def __init__(self, buffer: FlatBuffer, group: Group, traffic: TrafficCounter) -> None:
        self._group = group
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
        self._traffic.count("outer_reduce_scatter", sum(_bytes(full) for _, full in items))
        collectives.reduce_scatter_units(items, self._group, accumulate=False, async_op=True).wait()

    def _sum(self, buckets: list[BucketMemory]) -> None:
        parts = [_tensors(bucket.optimizer_grads, bucket.main_grads)[0] for bucket in buckets]
        packed = torch.cat(parts)
        self._traffic.count("outer_all_reduce", _bytes(packed))
        collectives.sum_gradients(packed, self._group).wait()
        for part, total in zip(parts, packed.split([part.numel() for part in parts]), strict=True):
            part.copy_(total)


def _tensors(part: Tensor | None, full: Tensor | None) -> tuple[Tensor, Tensor]:
    assert part is not None, "a frozen bucket"
    assert full is not None, "a frozen bucket"
    return part, full


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
