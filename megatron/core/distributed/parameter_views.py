"""Makes a model's parameters views of their buckets' whole weights, and accumulators views of whole gradients.

Where a buffer is whole these are the buffer at rest; where it is cut they are transient, and the views find memory
under them whenever somebody gathers or fills it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from megatron.core.distributed.bucket_memory import (
    ArenaMaker,
    BucketMemory,
    NewFull,
    bucket_name,
    grad_comm_dtype,
    with_memory,
)
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.shard_layout import Bucket
from megatron.core.distributed.sharding import Cut, Sharding, ShardPlace
from megatron.core.param_meta import ParamMeta

# Makes parameters' values readable inside, where they lie in memory that comes and goes.
Reading = Callable[[Sequence[nn.Parameter]], contextlib.AbstractContextManager[None]]


def as_they_are(parameters: Sequence[nn.Parameter]) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


class ParameterViews:
    """weights: parameter -> its view, without autograd. grads: key -> accumulator, in the parameter's shape.
    extra_grads: key of a further use -> its accumulator, 1-D, outside of the layout.

    new_full: makes transient tensors. reading: a bucket's parameters are read inside it.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        param_meta: Mapping[str, ParamMeta],
        config: DistributedDataParallelConfig,
        sharding: Sharding,
        place: ShardPlace,
        device: torch.device,
        new_full: NewFull,
        reading: Reading,
    ) -> None:
        self._parameters, self._param_meta, self._config = parameters, param_meta, config
        self._sharding, self._place, self._device = sharding, place, device
        self._new_full, self._reading = new_full, reading
        self.shapes = {name: tuple(p.shape) for name, p in parameters.items()}
        self.weights: dict[str, Tensor] = {}
        self.grads: dict[str, Tensor] = {}
        self.extra_grads: dict[str, Tensor] = {}

    def bucket(self, maker: ArenaMaker, arena: int, bucket: Bucket) -> BucketMemory:
        """The bucket's memory, with its parameters and accumulators in it; weights come to rest."""
        layout, dtype = maker.arenas[arena].layout, maker.arenas[arena].weights.dtype
        cut, name = self._sharding.weights is not Cut.WHOLE, bucket_name(arena, bucket)
        full = self._new_full("weights", name, bucket.numel, dtype, self._device) if cut else None
        grads = None
        if layout.trained and self._sharding.main_grads is not Cut.WHOLE:
            wire = grad_comm_dtype(dtype, self._config)
            grads = self._new_full("grads", name, bucket.numel, wire, self._device)
        memory = maker.bucket(arena, bucket.index, full, grads)

        def view(whole: Tensor, param: str) -> Tensor:
            slot = layout.by_name[param]
            return whole[slot.start - bucket.start : slot.end - bucket.start].view(self.shapes[param])

        parameters = [self._parameters[param] for param in bucket.names]
        with with_memory(memory.full_weights) as whole, self._reading(parameters):
            if cut:
                whole.zero_()
            for param, parameter in zip(bucket.names, parameters, strict=True):
                self.weights[param] = view(whole, param)
                _repoint(parameter, self.weights[param])
            if cut:
                start, end = layout.shard(bucket.index, self._place, self._sharding.weights)
                memory.resting.copy_(whole[start - bucket.start : end - bucket.start])
        if memory.full_grads is not None:
            with with_memory(memory.full_grads) as whole:
                self.grads |= {param: view(whole, param) for param in bucket.names}
            for param in bucket.names:
                for key in self._param_meta[param].grad_keys[1:]:
                    self._add_extra(key, param, name, memory.full_grads.dtype)
        return memory

    def alone(self, name: str) -> None:
        """A frozen parameter that keeps a storage of its own."""
        parameter = self._parameters[name]
        if parameter.device != self._device:
            _repoint(parameter, torch.empty_like(parameter, device=self._device))
        self.weights[name] = parameter.detach()

    def _add_extra(self, key: str, param: str, bucket: str, dtype: torch.dtype) -> None:
        """The accumulator of a further use."""
        numel = math.prod(self.shapes[param])
        if self._sharding.main_grads is Cut.WHOLE:
            extra = torch.zeros(numel, dtype=dtype, device=self._device)
        else:
            extra = self._new_full("extra", bucket, numel, dtype, self._device)
        self.extra_grads[key] = extra
        with with_memory(extra) as whole:
            self.grads[key] = whole.view(self.shapes[param])


def _repoint(parameter: nn.Parameter, storage: Tensor) -> None:
    """Give a parameter this storage and keep its value and its identity: others hold references to it. Writing to the
    storage later is no modification to autograd: `.data` has a version of its own."""
    if parameter.is_meta:  # no value, and `.data` cannot change the kind of device
        made = nn.Parameter(storage.data, requires_grad=parameter.requires_grad)
        torch.utils.swap_tensors(parameter, made)
        return
    storage.copy_(parameter.detach())
    parameter.data = storage
