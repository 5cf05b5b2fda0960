"""The buckets of one step on their way through the sum over data parallel ranks.

[Note: order of collectives] Buckets are reduced in layout order on every rank, however gradients become
ready: a bucket that is complete waits for those before it. Collectives of one group must be issued in one
order everywhere, and readiness is not the same everywhere (unused parameters, other microbatch shapes).
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping

from megatron.core import collectives
from megatron.core.distributed.bucket_memory import num_bytes
from megatron.core.distributed.flat_buffer import BucketMemory, FlatBuffer
from megatron.core.distributed.ledger import Ledger
from megatron.core.distributed.sharding import Cut
from megatron.core.distributed.traffic_counter import TrafficCounter
from megatron.core.parallel_state import Group
from megatron.core.param_meta import ParamMeta

MAX_TEMPORARIES = (
    2  # reductions under way that hold memory beside the buffer (gloo's exchange; NCCL's hold none)
)


class ReductionQueue:
    """Launches the reductions of a buffer's buckets, in the order in which backward completes them.

    A bucket is summed in place; where the optimizer is cut, a rank gets the sum of its part only, and what it has of
    the other parts is of no more use. ledger: is told of what exchanges hold beside the buffer. Communicates over
    `group`.
    """

    def __init__(
        self, buffer: FlatBuffer, group: Group, traffic: TrafficCounter, ledger: Ledger | None = None
    ) -> None:
        self._buffer = buffer
        self._group = group
        self._traffic = traffic
        self._ledger = Ledger() if ledger is None else ledger
        self._scatters = buffer.sharding.optimizer is not Cut.WHOLE
        self._reducers = _in_backward_order(buffer)
        self._reducer_of = {
            key: reducer
            for reducer in self._reducers
            for name in reducer.bucket.names
            for key in buffer.param_meta[name].grad_keys
        }
        self._fresh: set[str] = set()  # keys without a contribution in this step
        self._in_flight: collections.deque[_InFlight] = collections.deque()
        self.num_launched = 0

    def reset(self, *, fresh: bool = True) -> None:
        """A new step: nothing is complete, nothing launched. fresh: what the buffers hold is to be overwritten."""
        assert not self._in_flight, (
            "a step starts while gradients are still being reduced: call finish() first"
        )
        for reducer in self._reducers:
            reducer.reset()
        self.num_launched = 0
        if fresh:
            self._fresh = set(self._reducer_of)

    def begins(self, key: str) -> bool:
        """Whether this is the first contribution to the key in this step."""
        if key in self._fresh:
            self._fresh.remove(key)
            return True
        return False

    def zero_fresh(self, keys: Iterable[str] | None = None) -> None:
        """What no contribution came to is zero: of these keys, or of all."""
        fresh = self._fresh if keys is None else self._fresh.intersection(keys)
        for key in fresh:
            self._buffer.main_grad(key).zero_()
        self._fresh = self._fresh - fresh

    def is_launched(self, key: str) -> bool:
        return self._reducer_of[key].launched

    def complete(self, keys: Iterable[str]) -> None:
        """Nothing more will be added under these keys in this step."""
        for key in keys:
            self._reducer_of[key].missing.discard(key)

    def launch_complete(self) -> None:
        """Launch what is complete, up to the first bucket that is not."""
        while self.num_launched < len(self._reducers) and not self._reducers[self.num_launched].missing:
            self._launch_next()

    def launch_all(self) -> None:
        while self.num_launched < len(self._reducers):
            self._launch_next()

    def wait(self, end: int | None = None) -> None:
        """Complete the reductions under way of the first `end` buckets (all by default), oldest first: on all ranks
        alike. Raises PeerLostError."""
        while self._in_flight and (end is None or self._in_flight[0].index < end):
            self._wait_oldest()

    def finish(self) -> None:
        """Complete all, after the last launch; gradients may be written. Raises PeerLostError."""
        self.wait()

    def _launch_next(self) -> None:
        """Reduce the next bucket in order. See [Note: order of collectives]."""
        index = self.num_launched
        reducer = self._reducers[index]
        self.num_launched += 1
        reducer.launched = True
        self.zero_fresh(reducer.keys)
        for name in reducer.bucket.names:
            self._buffer.combine_uses(name)
        if self._group.size == 1:
            return
        self._make_room()
        payload = num_bytes([reducer.grads])
        if self._scatters:
            self._traffic.count("reduce_scatter", payload)
            pending = collectives.reduce_scatter_units(
                [(reducer.part, reducer.grads)],
                self._group,
                accumulate=False,
            )
        else:
            self._traffic.count("all_reduce", payload)
            pending = collectives.sum_gradients(reducer.grads, self._group)
        self._ledger.hold("exchange", reducer.name, pending.temporary_bytes)
        self._in_flight.append(_InFlight(index, pending, reducer.name))

    def _make_room(self) -> None:
        """Wait until one more may hold a temporary. Safe: every rank launches the same buckets in the same order."""
        while sum(one.pending.holds_temporary for one in self._in_flight) >= MAX_TEMPORARIES:
            self._wait_oldest()

    def _wait_oldest(self) -> None:
        oldest = self._in_flight.popleft()
        oldest.pending.wait()
        self._ledger.free("exchange", oldest.name, oldest.pending.temporary_bytes)


@dataclasses.dataclass(frozen=True)
class _InFlight:
    """A bucket's reduction under way."""

    index: int
    pending: collectives.Pending
    name: str


class _Reducer:
    """One bucket in one step: what it still waits for, and whether its reduction was launched."""

    def __init__(self, memory: BucketMemory, param_meta: Mapping[str, ParamMeta]) -> None:
        assert memory.full_grads is not None, "a frozen bucket"
        assert memory.optimizer_grads is not None, "a frozen bucket"
        self.bucket, self.name = memory.bucket, memory.name
        self.grads, self.part = memory.full_grads, memory.optimizer_grads
        self.keys = frozenset(key for name in memory.bucket.names for key in param_meta[name].grad_keys)
        self.reset()

    def reset(self) -> None:
        self.missing = set(self.keys)
        self.launched = False


def _in_backward_order(buffer: FlatBuffer) -> list[_Reducer]:
    """The buckets of all arenas, by when backward reaches their last parameter."""
    registered = {name: index for index, name in enumerate(buffer.names)}
    reducers = [_Reducer(memory, buffer.param_meta) for memory in buffer.buckets if memory.trained]
    return sorted(reducers, key=lambda reducer: -min(registered[name] for name in reducer.bucket.names))
