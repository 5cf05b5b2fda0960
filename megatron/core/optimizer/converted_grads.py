"""Gradients as the optimizer takes them: multiplied, in the dtype of main weights; and what that takes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.core.distributed.custom_fsdp.bucket_memory import BucketMemory, num_bytes, trained
from megatron.core.distributed.custom_fsdp.flat_buffer import FlatBuffer
from megatron.core.memory_tracker import MemoryTracker

MAX_CAST_BYTES = 64 * 2**20  # of converted gradients at once, or one bucket's where that is larger


class _Conversion(NamedTuple):
    """Of a bucket's gradients. num_bytes: of the temporary that this takes; meanwhile: more, while it is made."""

    memory: BucketMemory
    num_bytes: int
    meanwhile: int
    make: Callable[[], Tensor]


class ConvertedGrads:
    """tracker: is told of temporaries."""

    def __init__(self, buffer: FlatBuffer, tracker: MemoryTracker) -> None:
        self._buffer, self._tracker = buffer, tracker

    def batches(self, factor: float, *, in_place: bool) -> Iterator[tuple[dict[int, Tensor], bool]]:
        """Gradients * factor by bucket, in batches of temporaries of a bounded size: first all buckets that need no
        temporary, then the others. And whether a batch is the last. in_place: they may be multiplied where they are.
        """
        batches = self._batches(factor, in_place)
        for batch in batches:
            with contextlib.ExitStack() as held:
                for conversion in batch:
                    name = conversion.memory.name
                    held.enter_context(self._tracker.holding("casts", conversion.num_bytes, name))
                grads = {id(conversion.memory): self._made(conversion) for conversion in batch}
                yield grads, batch is batches[-1]

    def most_bytes(self, *, in_place: bool) -> int:
        """Of temporaries at once, where gradients are multiplied with anything but 1."""
        sizes = (
            sum(conversion.num_bytes for conversion in batch)
            + max(conversion.meanwhile for conversion in batch)
            for batch in self._batches(0.5, in_place)
        )
        return max(sizes, default=0)

    def _made(self, conversion: _Conversion) -> Tensor:
        with self._tracker.holding("casts", conversion.meanwhile, conversion.memory.name):
            return conversion.make()

    def _batches(self, factor: float, in_place: bool) -> list[list[_Conversion]]:
        buckets = (bucket for bucket in self._buffer.buckets if bucket.trained)
        every = [self._conversion(bucket, factor, in_place) for bucket in buckets]
        batches, left = [[conversion for conversion in every if not conversion.num_bytes]], 0
        for conversion in (conversion for conversion in every if conversion.num_bytes):
            if conversion.num_bytes > left:
                batches.append([])
                left = MAX_CAST_BYTES
            batches[-1].append(conversion)
            left -= conversion.num_bytes
        return [batch for batch in batches if batch]

    def _conversion(self, memory: BucketMemory, factor: float, in_place: bool) -> _Conversion:
        """A bucket's gradients * factor in the dtype of main weights, rounded at most twice."""
        grads, dtype = trained(memory.optimizer_grads), self._buffer.arenas[memory.arena].main_dtype
        if grads.dtype == dtype and (factor == 1.0 or in_place):
            return _Conversion(memory, 0, 0, lambda: grads if factor == 1.0 else grads.mul_(factor))
        size = grads.numel() * dtype.itemsize
        if factor == 1.0:
            return _Conversion(memory, size, 0, lambda: grads.to(dtype))
        if grads.dtype != dtype and torch.promote_types(grads.dtype, dtype) == dtype:
            return _Conversion(memory, size, 0, lambda: grads.to(dtype).mul_(factor))
        meanwhile = 0 if grads.dtype == dtype else num_bytes([grads])
        return _Conversion(memory, size, meanwhile, lambda: (grads * factor).to(dtype))
