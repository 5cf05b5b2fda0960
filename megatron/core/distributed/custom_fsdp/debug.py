"""--fsdp-debug: whoever reads or writes a tensor of an engine whose memory is released hears which.

A view of a gathered weight that is kept beyond its unit (`self.kept = self.weight.t()`), a weight that is read between
steps, a gradient that is looked at after its reduction (`released_tensors`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from megatron.core.distributed.bucket_memory import BucketMemory
from megatron.core.distributed.flat_buffer import FlatBuffer
from megatron.core.distributed.released_tensors import Released, watch
from megatron.core.distributed.sharding import Cut
from megatron.core.units import Unit


def watch_released(owner: object, buffer: FlatBuffer, units: Sequence[Unit]) -> None:
    """From here on, for as long as `owner` lives, this thread's operations on released tensors of the buffer raise
    ModelError. Does nothing where the buffer releases none."""
    if known := dict(_released(buffer, units)):
        watch(owner, known)


def _released(buffer: FlatBuffer, units: Sequence[Unit]) -> Iterator[tuple[int, Released]]:
    """Storage -> what lies in it, for all that an engine takes memory away from."""
    unit_of = {name: unit.name for unit in units for name in unit.names}
    for bucket in buffer.buckets:
        if buffer.sharding.weights is not Cut.WHOLE:
            yield _entry(buffer, bucket, bucket.full_weights, "weight")
        if buffer.sharding.main_grads is Cut.WHOLE or bucket.full_grads is None:
            continue
        assert bucket.main_grads is not None, bucket.name
        yield _entry(buffer, bucket, bucket.full_grads, "gradient")
        at_rest = Released(bucket.name, "sharded gradients", ())
        yield bucket.main_grads.untyped_storage()._cdata, at_rest
        for key in (key for name in bucket.bucket.names for key in buffer.param_meta[name].grad_keys[1:]):
            extra, name = buffer.extra_grads[key], buffer.param_of_key(key)
            size = extra.numel() * extra.element_size()
            what = Released(unit_of[name], "gradient of a further use", ((0, size, name),))
            yield extra.untyped_storage()._cdata, what


def _entry(buffer: FlatBuffer, bucket: BucketMemory, full: Tensor, what: str) -> tuple[int, Released]:
    layout, size = buffer.arenas[bucket.arena].layout, full.element_size()
    slots = [layout.by_name[name] for name in bucket.bucket.names]
    start = bucket.bucket.start
    places = tuple(((slot.start - start) * size, (slot.end - start) * size, slot.name) for slot in slots)
    return full.untyped_storage()._cdata, Released(bucket.name, what, places)
