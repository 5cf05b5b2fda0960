"""Weights that every rank holds whole, where the optimizer updates a part of them only: gathered after each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron.core import collectives
from megatron.core.distributed.flat_buffer import FlatBuffer
from megatron.core.distributed.sharding import Cut
from megatron.core.distributed.traffic_counter import TrafficCounter
from megatron.core.parallel_state import Group


class WholeWeights:
    """Gathers the buckets in the order of the forward, in place, all at once; each is waited for when it is used.

    overlap: leave the waiting to `need`; without, `weights_changed` waits. buckets_of: unit -> the buckets that hold
    its parameters. Communicates over dp_gather.
    """

    def __init__(
        self,
        buffer: FlatBuffer,
        group: Group,
        traffic: TrafficCounter,
        *,
        overlap: bool,
        buckets_of: Mapping[int, Sequence[int]],
    ) -> None:
        self._buffer, self._group, self._traffic = buffer, group, traffic
        self._overlap = overlap
        self._buckets_of = buckets_of
        self._pending: dict[int, collectives.Pending] = {}  # by place of the bucket

    def weights_changed(self) -> None:
        """This rank's parts hold new weights."""
        cut = self._buffer.sharding.optimizer
        if cut is Cut.WHOLE or self._group.size == 1:
            return
        self.settle()
        index = self._buffer.place.index(cut)
        for place in reversed(range(len(self._buffer.buckets))):  # laid in the order of the backward
            bucket = self._buffer.buckets[place]
            part = bucket.weights.view(self._group.size, -1)[index]
            self._traffic.count("all_gather", bucket.weights.numel() * bucket.weights.element_size())
            self._pending[place] = collectives.all_gather_units(
                [(bucket.weights, part)], self._group, async_op=True
            )
        if not self._overlap:
            self.settle()

    def need(self, unit: int) -> None:
        """On return a unit's weights are those of the last step."""
        if self._pending:
            for place in self._buckets_of[unit]:
                self._wait(place)

    def begin(self, *, training: bool, repeats: bool) -> None:
        """Weights are whole whatever runs."""

    def passed(self, unit: int) -> None:
        """Nothing to free."""

    def leave_forward(self, unit: int, *, training: bool) -> None:
        """Nothing to free."""

    def leave_recompute(self, unit: int) -> None:
        """Nothing to free."""

    def leave_evaluation(self) -> None:
        """Nothing to free."""

    def end_microbatch(self, *, last: bool) -> None:
        """Nothing to free."""

    def end_step(self) -> None:
        """Of units that the step has not come to, gathers may still send what the optimizer is about to write."""
        self.settle()

    def settle(self) -> None:
        """On return all weights are those of the last step."""
        for place in tuple(self._pending):
            self._wait(place)

    def _wait(self, place: int) -> None:
        pending = self._pending.pop(place, None)
        if pending is not None:
            pending.wait()
