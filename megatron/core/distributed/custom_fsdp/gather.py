"""Whole weights out of shards, unit by unit, and only for as long as they are read.

[Note: when weights are freed] Backward may read a unit's weights up to its very last operation, which can come after
its last gradient was reported. `passed` therefore only marks a unit; its memory goes when the next one is needed, or
at the end of the microbatch.

[Note: what is planned] A step's gathers and the most elements gathered are those of its plan if each of its
microbatches is one forward and one backward that need units in the planned order, after one that did so too, and nobody
else gathers in between. `as_planned` says whether that was so; a step that was not is right as well, and no plan is
held against it.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from enum import Enum

import torch
from torch import Tensor

from megatron.core import collectives
from megatron.core.distributed.bucket_memory import num_bytes
from megatron.core.distributed.custom_fsdp.memory import TransientMemory
from megatron.core.distributed.custom_fsdp.reshard_plan import Keep
from megatron.core.distributed.custom_fsdp.run_order import RunOrder
from megatron.core.distributed.flat_buffer import FlatBuffer
from megatron.core.distributed.sharding import Cut
from megatron.core.distributed.traffic_counter import TrafficCounter
from megatron.core.distributed.units import Unit
from megatron.core.parallel_state import Group


class State(Enum):
    """Who owns a unit's whole weights."""

    SHARDED = "sharded"  # nobody: their storage is empty
    GATHERING = "gathering"  # a collective writes them
    WHOLE = "whole"  # the model reads them


class Gatherer:
    """Gathers on demand and ahead of it, in recorded order, within a bound.

    bound: elements gathered at any time, the unit in use included; a unit that is needed is gathered whatever the
    bound, and nothing is gathered ahead that would exceed it. last: the unit that is taken for the forward's last
    as long as nothing is recorded. planned: the order in which a microbatch needs units, see [Note: what is planned].
    peak_gathered: the most elements at once so far; step_peak: since the step began. group: the inner ranks; outer: the
    instances over which the optimizer is cut besides, which gather what it has written first. Communicates over these,
    over `group` when built too.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        buffer: FlatBuffer,
        group: Group,
        outer: Group,
        memory: TransientMemory,
        traffic: TrafficCounter,
        *,
        bound: int,
        last: int,
        planned: Sequence[int] = (),
    ) -> None:
        self._units = tuple(units)
        self._buckets = [buffer.buckets_of_unit(unit.name) for unit in units]
        self._full = [[bucket.full_weights for bucket in buckets] for buckets in self._buckets]
        self._numel = [sum(full.numel() for full in fulls) for fulls in self._full]
        self._buffer, self._group, self._outer = buffer, group, outer
        self._memory, self._traffic = memory, traffic
        self._bound, self._last = bound, last
        self._keep = (Keep.NOTHING,) * len(units)
        self._state = [State.SHARDED] * len(units)
        self._pending: dict[int, collectives.Pending] = {}
        self._passed: set[int] = set()
        self._ahead: set[int] = set()  # gathered before anybody needed them
        self._gathered = 0
        self.peak_gathered = self.step_peak = 0
        self._planned = tuple(planned)
        self.as_planned = True
        self._fetched: set[int] = set()  # to be read outside of the model
        self._orders = {True: RunOrder(), False: RunOrder()}  # training or not
        self._order = self._orders[True]
        for order in self._orders.values():
            order.begin(repeats=False)  # units may be called without the model around them
        self._outer_stale = False
        self._open = False  # a microbatch has begun and not ended
        self._held_by_training: set[int] | None = None  # while a forward without backward runs
        self._waiting: set[int] = set()  # for their backward, gathered in the forward
        self._recomputed: set[int] = set()  # likewise, inside a backward

    def set_keep(self, keep: Sequence[Keep]) -> None:
        """For how long each unit stays gathered. Between steps."""
        assert len(keep) == len(self._units), f"{len(keep)} policies for {len(self._units)} units"
        self._keep = tuple(keep)

    @property
    def order(self) -> RunOrder:
        return self._order

    def state(self, unit: int) -> State:
        return self._state[unit]

    def begin_step(self) -> None:
        """What is planned counts from here."""
        self.step_peak = self._gathered
        self.as_planned = self._gathered == 0 and not self._open

    def begin(self, *, training: bool, repeats: bool) -> None:
        """A microbatch begins, or a forward without backward. repeats: another microbatch follows in this step.

        Its units may find their slots of a double buffer taken: by an earlier forward that waits for its backward, or
        that ended with an error. They take these. A forward without backward leaves what training holds otherwise.
        """
        if self._open and any(self._memory.is_blocked("weights", unit.name) for unit in self._units):
            self._ahead.clear()
            self._free_all(last=False)
        self._order = self._orders[training]
        self._order.begin(repeats=repeats)
        follows_plan = not self._open and self._order.recorded in ((), self._planned)
        self.as_planned = self.as_planned and training and follows_plan
        self._held_by_training = None
        if training:
            self._open = True
        else:
            whole = (unit for unit, state in enumerate(self._state) if state is not State.SHARDED)
            self._held_by_training = set(whole)

    def need(self, unit: int) -> None:
        """On return the unit's weights are whole. Begins to gather what is needed next, as far as the bound allows.
        Communicates over dp_gather (and over dp_outer at the first need after a step that is cut there)."""
        self._free_passed(but=unit)
        self._order.need(unit)
        self._fetched.discard(unit)
        if self._held_by_training is None:
            self._waiting.discard(unit)
            self._recomputed.discard(unit)
        self._make_room(unit)
        self._start(unit)
        for ahead in self._order.upcoming():
            if self._state[ahead] is State.SHARDED:
                if self._gathered + self._numel[ahead] > self._bound or self._memory.is_blocked(
                    "weights", self._units[ahead].name
                ):
                    break
                self._start(ahead)
                self._ahead.add(ahead)
        self._ahead.discard(unit)
        self._finish(unit)

    def fetch(self, unit: int) -> None:
        """On return the unit's weights are whole, to be read outside of the model, until `unfetch`. No order knows of
        it. Communicates over dp_gather."""
        self.begin_fetch(unit)
        self._finish(unit)

    def begin_fetch(self, unit: int) -> collectives.Pending | None:
        """The same without waiting; None where they are whole."""
        self.as_planned = False
        if self._state[unit] is State.SHARDED:
            self._free_passed(but=unit)
            if self._memory.is_blocked("weights", self._units[unit].name):
                self._free_waiting()
            self._start(unit, "explicit_all_gather")
            self._fetched.add(unit)
        return self._pending.get(unit)

    def unfetch(self, unit: int) -> None:
        """They are read: what `fetch` has gathered goes, unless the model has come to need it."""
        if unit in self._fetched:
            self.free(unit)

    def _make_room(self, unit: int) -> None:
        """Free what only waits and can be gathered again: all where the unit's slot is taken, and of units that were
        recomputed together, which backward reaches in reverse, the first as far as they exceed the bound."""
        if self._state[unit] is not State.SHARDED:
            return
        if self._memory.is_blocked("weights", self._units[unit].name):
            self._free_waiting()
        for other in sorted(self._recomputed):
            if self._gathered + self._numel[unit] <= self._bound:
                return
            self.free(other)

    def _free_waiting(self) -> None:
        """All that can be gathered again when it is needed."""
        for other in self._waiting | self._ahead | self._recomputed:
            self.free(other)

    def passed(self, unit: int) -> None:
        """The microbatch's backward has gone through the unit: see [Note: when weights are freed]."""
        if self._state[unit] is not State.SHARDED and self._keep[unit] is not Keep.STEP:
            self._passed.add(unit)

    def leave_forward(self, unit: int, *, training: bool) -> None:
        """The unit's forward is over; its weights go unless they stay for the backward."""
        if self._state[unit] is State.SHARDED or unit in (self._held_by_training or ()):
            return
        if training and (self._is_kept(unit) or self._backward_is_next(unit)):
            self._waiting.add(unit)
            return
        self.free(unit)

    def _is_kept(self, unit: int) -> bool:
        """Whether it stays for a later use: for a backward only where that reads weights."""
        keep = self._keep[unit]
        return keep is Keep.STEP or (keep is Keep.TO_BACKWARD and self._units[unit].backward_reads)

    def _backward_is_next(self, unit: int) -> bool:
        """Whether it stays for a backward that follows at once, or to its last use."""
        if self._units[unit].lasts:
            return True
        if self._order.follows:
            return self._order.next_is_same(unit)
        return unit == self._last

    def leave_recompute(self, unit: int) -> None:
        """As `leave_forward`, inside a backward: the unit's own backward comes soon; one gather serves both, unless
        others are recomputed before it and all of them exceed the bound."""
        if self._keep[unit] is Keep.NOTHING and not self._units[unit].lasts:
            self._recomputed.add(unit)

    def leave_evaluation(self) -> None:
        """A forward without backward is over: nothing stays gathered but what training held before it."""
        held, self._held_by_training = self._held_by_training or set(), None
        for unit, state in enumerate(self._state):
            if state is not State.SHARDED and unit not in held:
                self.free(unit)
        if self._open:
            self._order = self._orders[True]

    def end_microbatch(self, *, last: bool) -> None:
        """Free all but what stays for the whole step and what was gathered ahead; with the last one, all."""
        self._order, self._held_by_training = self._orders[True], None
        is_left = any(self._is_left(unit) for unit in range(len(self._units)))
        in_order = self._open and not is_left and self._order.demanded == self._planned
        self.as_planned = self.as_planned and in_order
        self._open = False
        self._free_all(last=last)

    def end_step(self) -> None:
        """Nothing is gathered any more."""

    def _is_left(self, unit: int) -> bool:
        """Whether nothing has told that the microbatch's backward is through a unit that is not to stay."""
        stays = self._keep[unit] is Keep.STEP or unit in self._ahead or self._units[unit].lasts
        return self._state[unit] is not State.SHARDED and not stays and unit not in self._passed

    def _free_all(self, *, last: bool) -> None:
        for unit in range(len(self._units)):
            stays = self._keep[unit] is Keep.STEP or unit in self._ahead
            if self._state[unit] is not State.SHARDED and (last or not stays):
                self.free(unit)

    def free(self, unit: int) -> None:
        """The storage of the unit's weights is empty on return."""
        self._finish(unit)  # never takes memory away from a collective under way
        self._memory.release("weights", self._units[unit].name, self._full[unit])
        self._state[unit] = State.SHARDED
        self._gathered -= self._numel[unit]
        self._passed.discard(unit)
        self._ahead.discard(unit)
        self._waiting.discard(unit)
        self._recomputed.discard(unit)
        self._fetched.discard(unit)
        if self._held_by_training:
            self._held_by_training.discard(unit)

    def weights_changed(self) -> None:
        """Shards hold new weights: what is gathered is out of date."""
        for unit, state in enumerate(self._state):
            if state is not State.SHARDED:
                self.free(unit)
        self._outer_stale = self._outer.size > 1 and self._buffer.sharding.optimizer is Cut.FULL

    def settle(self) -> None:
        """Shards at rest are up to date on return. Communicates over dp_outer where the optimizer is cut there."""
        if not self._outer_stale:
            return
        self._outer_stale = False
        place, sharding = self._buffer.place, self._buffer.sharding
        by_dtype: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = collections.defaultdict(list)
        for bucket in self._buffer.buckets:
            if bucket.trained:
                part = bucket.weights.view(place.outer_size, -1)[place.outer_rank]
                by_dtype[bucket.weights.dtype].append((bucket.weights, part))
        assert sharding.weights is Cut.INNER, sharding
        for pairs in by_dtype.values():
            self._traffic.count("outer_all_gather", num_bytes(full for full, _ in pairs))
            collectives.all_gather_units(pairs, self._outer, async_op=True).wait()

    def _start(self, unit: int, kind: str | None = None) -> None:
        """kind: for whom, in the count of traffic; for the model, if not given."""
        if self._state[unit] is not State.SHARDED:
            return
        self.settle()
        fulls = self._full[unit]
        self._memory.acquire("weights", self._units[unit].name, fulls)
        self._gathered += self._numel[unit]
        self.peak_gathered = max(self.peak_gathered, self._gathered)
        self.step_peak = max(self.step_peak, self._gathered)
        pairs = [(bucket.full_weights, bucket.weights) for bucket in self._buckets[unit]]
        if self._group.size > 1:
            is_training = self._order is self._orders[True]
            kind = kind or ("all_gather" if is_training else "evaluation_all_gather")
            self._traffic.count(kind, num_bytes(fulls))
        self._pending[unit] = collectives.all_gather_units(pairs, self._group, async_op=True)
        self._state[unit] = State.GATHERING

    def _finish(self, unit: int) -> None:
        if self._state[unit] is State.GATHERING:
            self._pending.pop(unit).wait()
            self._state[unit] = State.WHOLE

    def _free_passed(self, but: int) -> None:
        for unit in tuple(self._passed):
            if unit != but:
                self.free(unit)
        self._passed.discard(but)
