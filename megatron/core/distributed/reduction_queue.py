"""The buckets of one step on their way through the sum over data parallel ranks.

[Note: order of collectives] Buckets are reduced in layout order on every rank, however gradients become
ready: a bucket that is complete waits for those before it. Collectives of one group must be issued in one
order everywhere, and readiness is not the same everywhere (unused parameters, other microbatch shapes).
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping

from megatron.core import collectives
from megatron.core.distributed.flat_buffer import Arena, FlatBuffer
from megatron.core.distributed.shard_layout import Bucket
from megatron.core.parallel_state import Group
from megatron.core.param_meta import ParamMeta

MAX_TEMPORARIES = (
    2  # reductions under way that hold memory beside the buffer (gloo's exchange; NCCL's hold none)
)


class ReductionQueue:
    """Launches the reductions of a buffer's buckets, in the order in which backward completes them.

    average: divide by the number of ranks before the sum (`--ddp-average-in-collective`). Communicates over `group`.
    """

    def __init__(self, buffer: FlatBuffer, group: Group, *, average: bool) -> None:
        self._buffer = buffer
        self._group = group
        self._average = average
        self._reducers = _in_backward_order(buffer)
        self._reducer_of = {
            key: reducer
            for reducer in self._reducers
            for name in reducer.bucket.names
            for key in buffer.param_meta[name].grad_keys
        }
        self._in_flight: collections.deque[tuple[int, collectives.Pending]] = collections.deque()
        self.num_launched = 0

    def reset(self) -> None:
        """A new step: nothing is complete, nothing launched."""
        assert not self._in_flight, (
            "a step starts while gradients are still being reduced: call finish() first"
        )
        for reducer in self._reducers:
            reducer.reset()
        self.num_launched = 0

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
        while self._in_flight and (end is None or self._in_flight[0][0] < end):
            self._in_flight.popleft()[1].wait()

    def _launch_next(self) -> None:
        """Reduce the next bucket in order. See [Note: order of collectives]."""
        index = self.num_launched
        reducer = self._reducers[index]
        self.num_launched += 1
        reducer.launched = True
        for name in reducer.bucket.names:
            self._buffer.combine_uses(name)
        if self._group.size == 1:
            return
        if self._average:
            reducer.grads.mul_(1 / self._group.size)
            self._buffer.grads_divided_by = self._group.size
        self._make_room()
        self._in_flight.append((index, collectives.sum_gradients(reducer.grads, self._group)))

    def _make_room(self) -> None:
        """Wait until one more may hold a temporary. Safe: every rank launches the same buckets in the same order."""
        while sum(pending.holds_temporary for _, pending in self._in_flight) >= MAX_TEMPORARIES:
            self._in_flight.popleft()[1].wait()


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
