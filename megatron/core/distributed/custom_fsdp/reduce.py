"""Gradients into shards, unit by unit, microbatch by microbatch.

A unit's whole gradients exist from its first contribution of a microbatch to the end of their reduce-scatter; the sums
over ranks are added to the shard that stays. Nothing is zeroed: the first contribution overwrites, in the whole
gradients as in the shard.

[Note: order of reductions] Reductions are issued in one order on every rank. A unit that is complete waits for those
before it: readiness is not the same everywhere, parameters may be unused on some ranks only. Where weights are gathered
all ranks run the same units, and the order is the reverse of that in which the microbatch's forward first reached them,
with units that no forward reached at the end. Where weights are whole, a rank may skip units that others run: there the
order is the reverse of registration (`forward`). A model whose forward runs in another order stays right, but keeps
whole gradients longer.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from megatron.core import collectives
from megatron.core.distributed.custom_fsdp.memory import TransientMemory
from megatron.core.distributed.custom_fsdp.resting_grads import RestingGrads
from megatron.core.distributed.finalize_model_grads import PartialSums
from megatron.core.distributed.flat_buffer import FlatBuffer
from megatron.core.distributed.gradient_sources import late_message
from megatron.core.distributed.ledger import Ledger
from megatron.core.distributed.outer_sums import OuterSums
from megatron.core.distributed.traffic_counter import TrafficCounter
from megatron.core.distributed.units import Unit
from megatron.core.module import ModelError
from megatron.core.parallel_state import Group
from megatron.core.protocols import Work


class MicrobatchReduction:
    """The reduction of gradients that are cut at rest.

    bound: elements of whole gradients under way, the unit that is accumulating included; one unit in any case.
    forward: units in the order of registration, for an order of reductions that does not depend on the run; None: that
    of the run. on_complete: is told of every unit with all its gradients of a microbatch. Communicates over dp_reduce
    (`group`), and once a step over dp_outer, and over tp where gradients have parts there.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        buffer: FlatBuffer,
        group: Group,
        outer: OuterSums,
        partial: PartialSums,
        memory: TransientMemory,
        ledger: Ledger,
        traffic: TrafficCounter,
        *,
        bound: int,
        on_complete: Callable[[int], None],
        forward: Sequence[int] | None = None,
    ) -> None:
        self._on_complete = on_complete
        self._buffer, self._group = buffer, group
        self._outer, self._partial = outer, partial
        self._memory, self._ledger, self._traffic = memory, ledger, traffic
        self._bound = bound
        self._forward = None if forward is None else dict.fromkeys(forward)
        self._units = [_UnitGrads(unit, buffer, ledger) for unit in units]
        self._of_key = {key: unit for unit in self._units for key in unit.keys}
        self._reports: Mapping[str, int] = {}
        self._order: dict[int, None] = {}  # units by first forward of the microbatch
        self._launch_order: list[int] | None = None  # by these; None while they are not looked at
        self._last_order: dict[
            int, None
        ] = {}  # of an earlier one: several forwards may precede their backwards
        self._launched = 0  # of the reductions of this microbatch
        self._in_flight: collections.deque[tuple[_UnitGrads, collectives.Pending, int]] = collections.deque()
        self._in_flight_numel = 0
        self._reduce = True
        self._held_back = False
        self._nonfinite: list[str] = []

    def set_late(self, late: Sequence[bool]) -> None:
        """Which units keep their whole gradients between microbatches and reduce once a step. Between steps."""
        for unit, is_late in zip(self._units, late, strict=True):
            unit.late = is_late

    def hold_back(self, held_back: bool) -> None:
        """Whether no unit reduces before the step's last microbatch, whatever its policy."""
        self._held_back = held_back

    def bind(self, reports: Mapping[str, int]) -> None:
        """How often each key is reported in a microbatch."""
        self._reports = reports

    def begin_step(self, num_microbatches: int | None, *, reduce_gradients: bool, accumulate: bool) -> None:
        """num_microbatches: None where `expect` tells it later. accumulate: add to what the shards hold.
        reduce_gradients: without, gradients are only looked at (`nonfinite_keys`) and dropped."""
        assert not self._in_flight, (
            "a step starts while gradients are still being reduced: call finish() first"
        )
        self._reduce = reduce_gradients
        self._nonfinite = []
        for unit in self._units:
            unit.has_sum = accumulate
            self._drop(unit)
        if not accumulate:
            self.release()
        self._begin_microbatch()
        if num_microbatches is not None:
            self.expect(num_microbatches)

    def release(self) -> None:
        """What the shards hold is of no more use."""
        for unit in self._units:
            unit.resting.release()

    def expect(self, num_microbatches: int) -> None:
        """So many microbatches are still to come, the one under way included."""
        self._last = num_microbatches == 1

    def grad_begins(self, key: str) -> bool:
        unit = self._of_key[key]
        if unit.index in self._reduced:
            raise ModelError(late_message(key, f"its unit {unit.name!r}"))
        if key not in unit.fresh:
            return False
        self._hold(unit)  # waits for the microbatch before, whose end makes all keys fresh
        unit.fresh.discard(key)
        if key in unit.extra_keys:
            self._memory.acquire("extra", unit.name, [self._buffer.main_grad(key)])
        return True

    def grad_ready(self, key: str) -> None:
        """A contribution is complete; the unit is reduced with its last one."""
        unit = self._of_key[key]
        unit.missing[key] -= 1
        if unit.missing[key] < 0:
            raise ModelError(late_message(key, f"its unit {unit.name!r}"))
        if unit.missing[key] == 0:
            unit.open_keys -= 1
            if unit.open_keys == 0:
                self._complete(unit)

    def forward_reached(self, unit: int) -> None:
        """The forward of this microbatch has reached a unit (again, perhaps)."""
        if unit not in self._order:
            self._order[unit] = None
            self._launch_order = None

    def make_room(self, unit: int) -> None:
        """Wait for reductions until the unit's whole gradients are within the bound, as far as that can help."""
        ours = self._units[unit]
        while self._in_flight and (
            self._in_flight_numel + ours.numel > self._bound or self._memory.is_blocked("grads", ours.name)
        ):
            self._wait_oldest()

    def passed(self, unit: int) -> None:
        """Backward is through the unit: what has not come by now does not come."""
        if self._units[unit].index not in self._completed:
            self._complete(self._units[unit])

    def microbatch_done(self, complete: Iterable[str], *, left: int) -> None:
        """All gradients of the microbatch are there; `left` more come."""
        self._completed |= {unit.index for unit in self._units}
        order = self._in_launch_order()
        while self._launched < len(order):
            self._launch(self._units[order[self._launched]])
        if left:
            self._begin_microbatch()
            self.expect(left)

    def launch(self, complete: Iterable[str]) -> Work:
        """Units are reduced by themselves."""
        return _AllInFlight(self)

    def wait(self) -> None:
        """What is under way is in the shards."""
        while self._in_flight:
            self._wait_oldest()

    def finish(self) -> None:
        """After the last microbatch: shards hold the sums over microbatches and ranks. Raises PeerLostError."""
        self.wait()
        for unit in self._units:
            unit.resting.hold()
            if not unit.has_sum:
                unit.zero_shard()
        if self._reduce:
            self._outer.add()
            self._partial.add()

    def nonfinite_keys(self) -> tuple[str, ...]:
        """Of a step begun without reduction: keys of this rank's gradients that were not finite."""
        return tuple(dict.fromkeys(self._nonfinite))

    # ---

    def _begin_microbatch(self) -> None:
        self._last = False
        self._launched = 0
        self._order, self._last_order = {}, self._order or self._last_order
        self._launch_order = None
        self._completed: set[int] = set()
        self._reduced: set[int] = set()
        for unit in self._units:
            unit.missing = {key: self._reports[key] for key in unit.keys}
            unit.open_keys = len(unit.keys)
            if unit.in_flight or not unit.holds:
                unit.fresh = set(unit.keys)

    def _complete(self, unit: _UnitGrads) -> None:
        """No gradient of the unit is still to come in this microbatch."""
        self._completed.add(unit.index)
        self._on_complete(unit.index)
        order = self._in_launch_order()
        while self._launched < len(order) and order[self._launched] in self._completed:
            self._launch(self._units[order[self._launched]])

    def _in_launch_order(self) -> list[int]:
        """See [Note: order of reductions]."""
        if self._launch_order is None:
            order = self._forward or self._order or self._last_order
            rest = (unit.index for unit in self._units if unit.index not in order)
            self._launch_order = [*reversed(order), *rest]
        return self._launch_order

    def _launch(self, unit: _UnitGrads) -> None:
        self._launched += 1
        self._reduced.add(unit.index)
        if not unit.keys or ((unit.late or self._held_back) and not self._last):
            return
        self._hold(unit)  # also what no contribution came to on this rank: others may have some
        for key in unit.fresh:
            self._zero(unit, key)
        unit.fresh = set()
        if not self._reduce:
            self._look_at(unit)
            self._drop(unit)
            return
        for name in unit.names:
            self._combine_uses(unit, name)
        if self._group.size > 1:
            self._traffic.count("reduce_scatter", unit.num_bytes)
        unit.resting.hold()
        pending = collectives.reduce_scatter_units(unit.items, self._group, accumulate=unit.has_sum)
        exchanged = pending.temporary_bytes
        self._ledger.hold("exchange", unit.name, exchanged)
        unit.has_sum = True
        unit.in_flight = True
        self._in_flight.append((unit, pending, exchanged))
        self._in_flight_numel += unit.numel
        while self._in_flight and self._in_flight_numel > self._bound:
            self._wait_oldest()

    def _hold(self, unit: _UnitGrads) -> None:
        """Memory for the unit's whole gradients, within the bound as far as waiting can help."""
        while unit.in_flight:
            self._wait_oldest()
        if unit.holds:
            return
        self.make_room(unit.index)
        self._memory.acquire("grads", unit.name, unit.full_grads)
        unit.holds = True

    def _wait_oldest(self) -> None:
        unit, pending, exchanged = self._in_flight.popleft()
        pending.wait()
        self._in_flight_numel -= unit.numel
        self._ledger.free("exchange", unit.name, exchanged)
        unit.in_flight = False
        self._drop(unit)

    def _drop(self, unit: _UnitGrads) -> None:
        """The unit has no whole gradients any more."""
        if unit.holds:
            self._memory.release("grads", unit.name, unit.full_grads)
            unit.holds = False
        self._drop_extra(unit)
        unit.fresh = set(unit.keys)

    def _drop_extra(self, unit: _UnitGrads) -> None:
        for key in unit.extra_keys:
            extra = self._buffer.main_grad(key)
            if _has_memory(extra):
                self._memory.release("extra", unit.name, [extra])

    def _combine_uses(self, unit: _UnitGrads, name: str) -> None:
        """Add what further uses of a parameter have contributed."""
        for key in self._buffer.param_meta[name].grad_keys[1:]:
            extra = self._buffer.main_grad(key)
            if _has_memory(extra):
                self._buffer.main_grad(name).add_(extra)
                self._memory.release("extra", unit.name, [extra])

    def _zero(self, unit: _UnitGrads, key: str) -> None:
        if key not in unit.extra_keys:  # a further use without a contribution is not added
            self._buffer.main_grad(key).zero_()

    def _look_at(self, unit: _UnitGrads) -> None:
        for key in unit.keys:
            grad = self._buffer.main_grad(key)
            if _has_memory(grad) and not bool(torch.isfinite(grad).all()):  # sync: a failed step
                self._nonfinite.append(key)


class _UnitGrads:
    """A unit's whole gradients. fresh: keys without a contribution since they were dropped. has_sum: the shard holds
    something to be added to. holds: they have memory. in_flight: a collective reads them."""

    def __init__(self, unit: Unit, buffer: FlatBuffer, ledger: Ledger) -> None:
        self.index, self.name = unit.index, unit.name
        self.late = False
        pairs = [(bucket.main_grads, bucket.full_grads) for bucket in buffer.buckets_of_unit(unit.name)]
        self.items = [(shard, full) for shard, full in pairs if shard is not None and full is not None]
        self.full_grads = [full for _, full in self.items]
        self.resting = RestingGrads(unit.name, [shard for shard, _ in self.items], ledger)
        self.names = [name for name in unit.names if name in set(buffer.names)]
        self.keys = [key for name in self.names for key in buffer.param_meta[name].grad_keys]
        self.extra_keys = {key for name in self.names for key in buffer.param_meta[name].grad_keys[1:]}
        self.numel = sum(full.numel() for full in self.full_grads)
        self.num_bytes = sum(full.numel() * full.element_size() for full in self.full_grads)
        self.missing: dict[str, int] = {}
        self.open_keys = 0
        self.fresh = set(self.keys)
        self.has_sum = False
        self.holds = False
        self.in_flight = False

    def zero_shard(self) -> None:
        for shard, _ in self.items:
            shard.zero_()


class _AllInFlight:
    """Waits for all reductions under way."""

    def __init__(self, reduction: MicrobatchReduction) -> None:
        self._reduction = reduction

    def wait(self) -> None:
        self._reduction.wait()


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() > 0
