"""Data parallelism: every rank holds all weights, gradients are summed over ranks, bucket by bucket.

The first row (`no_shard`) of the table of sharding strategies over `FlatBuffer`. One step:

    ddp.zero_grad_buffer()
    for index in range(n):
        ddp.begin_microbatch(index, last=index == n - 1)
        forward, backward            # gradients arrive in the flat buffer
    ddp.finish()                     # after it: the sum over microbatches and ranks, the same on all ranks

Sums only: whoever uses the gradients divides once (`GradStats`, `step` of the optimizer), which costs one
rounding instead of one a microbatch. With `--ddp-average-in-collective` they come out divided by the number
of ranks, which `FlatBuffer.grads_divided_by` records and the optimizer takes into account.

[Note: order of collectives] Buckets are reduced in layout order on every rank, however gradients become
ready: a bucket that is complete waits for those before it. Collectives of one group must be issued in one
order everywhere, and readiness is not the same everywhere (unused parameters, other microbatch shapes).

[Note: sums in rank order] Up to two ranks a sum has one order. With more, gloo's ring adds each part of the
buffer in another order, and 16-bit sums round at every hop; there a bucket is exchanged (all-to-all), added
in rank order in fp32, and gathered. The result then depends neither on the buckets nor on the run.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from megatron.core import collectives
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.flat_buffer import Arena, FlatBuffer
from megatron.core.distributed.shard_layout import Bucket
from megatron.core.parallel_state import ParallelState
from megatron.core.param_meta import GradRoute, ParamMeta, infer_param_meta
from megatron.core.weight_grad import WeightGradAccumulator

MAX_IN_FLIGHT = 2  # buckets being reduced at a time: bounds what the exchange needs beside the buffer


class DistributedDataParallel:
    """Reduces the gradients of any `nn.Module` over the data parallel ranks.

    param_meta: facts about the parameters; derived for a module that is not ours. sink: where the module's
    layers put their gradients; None for a plain module, whose gradients are taken from autograd's hooks. A
    module may have both. Communicates over dp_reduce. Does no communication and no copy in a data parallel
    world of one.
    """

    def __init__(
        self,
        module: nn.Module,
        ps: ParallelState,
        config: DistributedDataParallelConfig,
        param_meta: Mapping[str, ParamMeta] | None = None,
        sink: WeightGradAccumulator | None = None,
    ) -> None:
        self.module = module
        self.ps = ps
        self.config = config
        self._group = ps.dp_reduce_group
        meta = dict(param_meta) if param_meta is not None else infer_param_meta(module)
        self.buffer = FlatBuffer(
            module, meta, config, dp_size=self._group.size, device=ps.device.torch_device
        )
        self._reducers = _in_backward_order(self.buffer)
        self._reducer_of = {name: r for r in self._reducers for name in r.bucket.names}
        self._in_flight: collections.deque[collectives.Pending] = collections.deque()
        self._next = 0  # the first bucket not launched yet
        self._microbatch = -1
        self._last = False
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._autograd_hook(name))
            for name, parameter in module.named_parameters()
            if parameter.requires_grad and (sink is None or meta[name].route is GradRoute.AUTOGRAD)
        ]
        if sink is not None:
            sink.bind(self.buffer.main_grads_by_key(), listener=self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def broadcast_weights(self) -> None:
        """All ranks take rank 0's weights: for modules initialised from the rank's own generator."""
        for arena in self.buffer.arenas:
            collectives.broadcast(arena.weights, self._group)
        for name in self.buffer.frozen:
            collectives.broadcast(self.buffer.weight(name), self._group)
        self.buffer.copy_weights_to_main()

    def zero_grad_buffer(self) -> None:
        """Start a step: gradients are zero, no bucket is reduced yet."""
        assert not self._in_flight, (
            "a step starts while gradients are still being reduced: call finish() first"
        )
        self.buffer.zero_grads()
        for reducer in self._reducers:
            reducer.reset()
        self._next = 0
        self._microbatch = -1
        self._last = False

    def begin_microbatch(self, index: int, last: bool) -> None:
        """Before the forward of a microbatch. Gradients are reduced in the backward of the last one."""
        assert not self._last, f"microbatch {index} after the one that was announced as the last"
        self._microbatch = index
        self._last = last

    def grad_ready(self, key: str, microbatch: int) -> None:
        """The contribution of `microbatch` under `key` is complete (from the sink and autograd hooks)."""
        if not self._last or microbatch != self._microbatch or self._group.size == 1:
            return
        reducer = self._reducer_of[self.buffer.param_of_key(key)]
        assert not reducer.launched, f"a gradient for {key} arrived after its bucket was reduced"
        reducer.missing.discard(key)
        if self.config.overlap_grad_reduce and not reducer.missing:
            while self._next < len(self._reducers) and not self._reducers[self._next].missing:
                self._launch_next()

    def finish(self) -> None:
        """After the last backward: combine the uses of tied parameters, reduce what is left, wait for all.

        Raises PeerLostError.
        """
        assert self._last, "finish() without a microbatch announced as the last (begin_microbatch)"
        while self._next < len(
            self._reducers
        ):  # all of them without overlap; else those with unused parameters
            self._launch_next()
        while self._in_flight:
            self._in_flight.popleft().wait()
        self._last = False

    def _autograd_hook(self, name: str) -> Callable[[Tensor], None]:
        main_grad = self.buffer.main_grad(name)

        def take(parameter: Tensor) -> None:
            assert parameter.grad is not None
            main_grad.add_(parameter.grad)
            parameter.grad = None
            self.grad_ready(name, self._microbatch)

        return take

    def _launch_next(self) -> None:
        """Reduce the next bucket in order. See [Note: order of collectives]."""
        reducer = self._reducers[self._next]
        self._next += 1
        reducer.launched = True
        for name in reducer.bucket.names:
            self.buffer.combine_uses(name)
        if self._group.size == 1:
            return
        if self.config.ddp_average_in_collective:
            reducer.grads.mul_(1 / self._group.size)
            self.buffer.grads_divided_by = self._group.size
        # Waiting here is safe: every rank launches the same buckets in the same order.
        while len(self._in_flight) >= MAX_IN_FLIGHT:
            self._in_flight.popleft().wait()
        self._in_flight.append(collectives.sum_gradients(reducer.grads, self._group))


class _Reducer:
    """One bucket in one step: what it still waits for, and whether its reduction was launched."""

    def __init__(self, arena: Arena, bucket: Bucket, param_meta: Mapping[str, ParamMeta]) -> None:
        self.bucket = bucket
        self.grads = arena.main_grads[bucket.start : bucket.end]
        self._keys = frozenset(key for name in bucket.names for key in param_meta[name].grad_keys)
        self.reset()

    def reset(self) -> None:
        self.missing = set(self._keys)
        self.launched = False


def _in_backward_order(buffer: FlatBuffer) -> list[_Reducer]:
    """The buckets of all arenas, by when backward reaches their last parameter."""
    registered = {name: index for index, name in enumerate(buffer.names)}
    reducers = [
        _Reducer(arena, bucket, buffer.param_meta)
        for arena in buffer.arenas
        for bucket in arena.layout.buckets
    ]
    return sorted(reducers, key=lambda reducer: -min(registered[name] for name in reducer.bucket.names))
