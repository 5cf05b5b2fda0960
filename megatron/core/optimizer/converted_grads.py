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
                for one in batch:
                    held.enter_context(self._tracker.holding("casts", one.num_bytes, one.memory.name))
                yield {id(one.memory): self._made(one) for one in batch}, batch is batches[-1]

    def most_bytes(self, *, in_place: bool) -> int:
        """Of temporaries at once, where gradients are multiplied with anything but 1."""
        batches = self._batches(0.5, in_place)
        sizes = (sum(one.num_bytes for one in of) + max(one.meanwhile for one in of) for of in batches)
        return max(sizes, default=0)

    def _made(self, one: _Conversion) -> Tensor:
        with self._tracker.holding("casts", one.meanwhile, one.memory.name):
            return one.make()

    def _batches(self, factor: float, in_place: bool) -> list[list[_Conversion]]:
        made = [self._conversion(one, factor, in_place) for one in self._buffer.buckets if one.trained]
        batches, left = [[one for one in made if not one.num_bytes]], 0
        for one in (one for one in made if one.num_bytes):
            if one.num_bytes > left:
                batches.append([])
                left = MAX_CAST_BYTES
            batches[-1].append(one)
            left -= one.num_bytes
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
