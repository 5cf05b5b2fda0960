"""Allocates a flat buffer's memory, and makes a model's parameters views of it.

Parameters become views of their buckets' full weights, accumulators views of full gradients. Where a buffer is
unsharded these are the buffer at rest; where it is sharded they are transient, and the views find memory under them
whenever somebody gathers or fills it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from megatron.core.distributed.bucket_memory import (
    Arena,
    ArenaGroups,
    BucketMemory,
    bucket_name,
    grad_comm_dtype,
    main_grad_dtype,
    main_weight_dtype,
)
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.shard_layout import Bucket, FlatLayout
from megatron.core.distributed.transient_memory import own_storage, with_memory
from megatron.core.param_meta import ParamMeta
from megatron.core.sharding_table import Sharding, ShardOver, ShardPlace

# (role "weights" | "grads" | "extra", name of the unit or bucket, elements, dtype, device) -> a 1-D tensor of so many
# elements, whose storage may be empty.
NewFull = Callable[[str, str, int, torch.dtype, torch.device], Tensor]
# Makes parameters' values readable inside, where they lie in memory that comes and goes.
Reading = Callable[[Sequence[nn.Parameter]], contextlib.AbstractContextManager[None]]


def as_they_are(parameters: Sequence[nn.Parameter]) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


@dataclasses.dataclass
class BufferMaker:
    """arenas, buckets: of layouts. weights: parameter -> its view, without autograd. grads: key -> accumulator, in the
    parameter's shape. extra_grads: key of a further use -> its accumulator, 1-D, outside of the layout.

    Unsharded gradients of one dtype are one allocation (`flat_grads`). Sharded ones are one a bucket, so that a
    bucket's can be without memory while they mean nothing: one allocation for all would be there from the first unit of
    the backward on, when activations are at their most.

    new_full: makes transient tensors. reading: a bucket's parameters are read inside it.
    """

    parameters: Mapping[str, nn.Parameter]
    param_meta: Mapping[str, ParamMeta]
    config: DistributedDataParallelConfig
    sharding: Sharding
    place: ShardPlace
    device: torch.device
    new_full: NewFull
    reading: Reading

    def make(self, layouts: Sequence[FlatLayout], groups: ArenaGroups | None) -> None:
        cuts = (self.sharding.weights, self.sharding.main_grads, self.sharding.optimizer)
        ways = [self.place.ways(cut) for cut in cuts]
        assert ways == sorted(ways), (
            f"{self.sharding} over {self.place}: each of weights, gradients, optimizer is cut as its predecessor or "
            "finer"
        )
        self.shapes = {name: tuple(p.shape) for name, p in self.parameters.items()}
        self.weights: dict[str, Tensor] = {}
        self.grads: dict[str, Tensor] = {}
        self.extra_grads: dict[str, Tensor] = {}
        self.arenas: list[Arena] = []
        self.buckets: list[BucketMemory] = []
        dtypes = {str(p.dtype): p.dtype for p in self.parameters.values()}
        numel: dict[torch.dtype, int] = {}
        for layout in layouts:
            if layout.trained and self.sharding.main_grads is ShardOver.NONE:
                dtype = main_grad_dtype(dtypes[layout.dtype], self.config)
                numel[dtype] = numel.get(dtype, 0) + layout.numel
        self.flat_grads = {dtype: self._zeros(size, dtype) for dtype, size in numel.items()}
        self._grads_left = dict(self.flat_grads)
        for index, layout in enumerate(layouts):
            self.arenas.append(dataclasses.replace(self._arena(layout, dtypes[layout.dtype]), groups=groups))
            self.buckets += [self._bucket(index, bucket) for bucket in layout.buckets]
        for name, parameter in self.parameters.items():
            if name not in self.weights:  # a frozen one that keeps a storage of its own
                if parameter.device != self.device:
                    _repoint(parameter, torch.empty_like(parameter, device=self.device))
                self.weights[name] = parameter.detach()

    def _arena(self, layout: FlatLayout, dtype: torch.dtype) -> Arena:
        main = main_weight_dtype(dtype, self.config) if layout.trained else dtype
        numel = layout.numel_at_rest(self.place, self.sharding.weights)
        if main != dtype and self.sharding.gathers_from_main(self.place):
            weights, from_main = own_storage("weights", "", numel, dtype, self.device), True
        else:
            weights, from_main = self._zeros(numel, dtype), False
        if main == dtype:
            return Arena(layout, weights)
        main_weights = self._zeros(layout.numel_at_rest(self.place, self.sharding.optimizer), main)
        return Arena(layout, weights, main_weights, gathers_from_main=from_main)

    def _bucket(self, index: int, bucket: Bucket) -> BucketMemory:
        """The bucket's memory, with its parameters and accumulators in it; weights come to rest."""
        arena, sharding = self.arenas[index], self.sharding
        dtype, name = arena.weights.dtype, bucket_name(index, bucket)
        start, end = (
            at - bucket.start for at in arena.layout.shard(bucket.index, self.place, sharding.weights)
        )
        full = None
        if sharding.weights is not ShardOver.NONE:
            full = self.new_full("weights", name, bucket.numel, dtype, self.device)
        if arena.gathers_from_main:
            assert full is not None, "nothing is gathered"
            with with_memory(full):
                weights = optimizer_weights = full[start:end]
        else:
            weights = self._at_rest(arena, bucket, arena.weights, sharding.weights)
            optimizer_weights = self._narrowed(arena, bucket, weights, sharding.weights)
        memory = BucketMemory(
            arena=index,
            bucket=bucket,
            trained=arena.trained,
            weights=weights,
            full_weights=weights if full is None else full,
            gathers_from_main=arena.gathers_from_main,
        )
        parameters = [self.parameters[param] for param in bucket.names]
        if arena.trained:
            own, main_grads = arena.own_main_weights, self._main_grads(arena, bucket)
            full_grads = main_grads
            if sharding.main_grads is not ShardOver.NONE:
                wire = grad_comm_dtype(dtype, self.config)
                full_grads = self.new_full("grads", name, bucket.numel, wire, self.device)
            memory = dataclasses.replace(
                memory,
                main_weights=optimizer_weights
                if own is None
                else self._at_rest(arena, bucket, own, sharding.optimizer),
                main_grads=main_grads,
                full_grads=full_grads,
                optimizer_grads=self._narrowed(arena, bucket, main_grads, sharding.main_grads),
                optimizer_weights=optimizer_weights,
            )
            with with_memory(full_grads):
                self.grads |= self._views(arena, bucket, full_grads)
            for param in bucket.names:
                for key in self.param_meta[param].grad_keys[1:]:
                    self._add_extra(key, param, name, full_grads.dtype)
        with with_memory(memory.full_weights) as whole, self.reading(parameters):
            if full is not None:
                whole.zero_()
            views = self._views(arena, bucket, whole)
            for param, view in views.items():
                _repoint(self.parameters[param], view)
            self.weights |= views
            if full is not None:
                memory.weights_at_rest.copy_(whole[start:end])
        return memory

    def _views(self, arena: Arena, bucket: Bucket, full: Tensor) -> dict[str, Tensor]:
        slots = [arena.layout.by_name[param] for param in bucket.names]
        return {
            slot.name: full[slot.start - bucket.start : slot.end - bucket.start].view(self.shapes[slot.name])
            for slot in slots
        }

    def _main_grads(self, arena: Arena, bucket: Bucket) -> Tensor:
        """A bucket's gradients at rest."""
        dtype = main_grad_dtype(arena.weights.dtype, self.config)
        if self.sharding.main_grads is not ShardOver.NONE:
            return self._zeros(bucket.numel // self.place.ways(self.sharding.main_grads), dtype)
        left = self._grads_left[dtype]
        self._grads_left[dtype] = left[bucket.numel :]
        return left[: bucket.numel]

    def _at_rest(self, arena: Arena, bucket: Bucket, flat: Tensor, cut: ShardOver) -> Tensor:
        """A bucket's part of a flat buffer at rest."""
        start = arena.layout.rest_start(bucket.index, self.place, cut)
        return flat.narrow(0, start, bucket.numel // self.place.ways(cut))

    def _narrowed(self, arena: Arena, bucket: Bucket, part: Tensor, cut: ShardOver) -> Tensor:
        """The optimizer's part of a bucket's part."""
        outside, _ = arena.layout.shard(bucket.index, self.place, cut)
        start, end = arena.layout.shard(bucket.index, self.place, self.sharding.optimizer)
        return part[start - outside : end - outside]

    def _add_extra(self, key: str, param: str, bucket: str, dtype: torch.dtype) -> None:
        """The accumulator of a further use."""
        numel = math.prod(self.shapes[param])
        if self.sharding.main_grads is ShardOver.NONE:
            extra = self._zeros(numel, dtype)
        else:
            extra = self.new_full("extra", bucket, numel, dtype, self.device)
        self.extra_grads[key] = extra
        with with_memory(extra):
            self.grads[key] = extra.view(self.shapes[param])

    def _zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype, device=self.device)


def _repoint(parameter: nn.Parameter, storage: Tensor) -> None:
    """Give a parameter this storage and keep its value and its identity: others hold references to it. Writing to the
    storage later is no modification to autograd: `.data` has a version of its own."""
    if parameter.is_meta:  # no value, and `.data` cannot change the kind of device
        made = nn.Parameter(storage.data, requires_grad=parameter.requires_grad)
        torch.utils.swap_tensors(parameter, made)
        return
    storage.copy_(parameter.detach())
    parameter.data = storage
