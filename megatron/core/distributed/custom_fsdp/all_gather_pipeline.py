"""Param all-gather: whole weights out of what ranks hold at rest, gathered, waited for and freed unit by unit (FSDP:
arXiv 2304.11277).

When each happens is for others to say: a plan, or hooks. All ranks of a group call alike, in the same order.

[Note: at rest and whole] Where weights are sharded (optim_grads_params), `start` gathers a unit into memory that `free`
takes away. Where the optimizer is sharded finer than the weights at rest, each rank has written a part of these only
(optim and optim_grads; with HFSDP over instances): `weights_changed` begins to gather them in place, and whoever needs
them waits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum

from torch import Tensor

from megatron.core.distributed.custom_fsdp.flat_buffer import FlatBuffer
from megatron.core.distributed.custom_fsdp.transient_memory import AllocatedMemory
from megatron.core.transport import collectives
from megatron.core.transport.parallel_state import Group


class UnitState(Enum):
    """Who owns a unit's whole weights."""

    SHARDED = "sharded"  # nobody: they have no memory
    GATHERING = "gathering"  # collectives write them
    UNSHARDED = "unsharded"  # the model reads them


class AllGatherPipeline:
    """units: their names, in the order of the forward, which is that of the gathers behind a step. overlap: return from
    `weights_changed` before these have come. Communicates over the gather groups of the buffer's arenas, and over the
    outer ones where the optimizer is sharded over instances. Raises PeerLostError where it waits."""

    def __init__(
        self, units: Sequence[str], buffer: FlatBuffer, memory: AllocatedMemory, overlap: bool
    ) -> None:
        self._memory, self._overlap = memory, overlap
        self._units = [_Unit(name, buffer) for name in units]

    def state(self, unit: int) -> UnitState:
        return self._units[unit].state

    def start(self, unit: int) -> None:
        """Begin to gather; nothing to do where weights are unsharded. Raises ModelError where the unit's slot of a
        double buffer is in use."""
        one = self._units[unit]
        if one.is_sharded:
            assert one.state is UnitState.SHARDED, f"unit {one.name!r} is {one.state.value} already"
            self._gather(one)

    def wait(self, unit: int) -> None:
        """Return once the weights are whole."""
        one = self._units[unit]
        assert one.state is not UnitState.SHARDED, f"nobody has begun to gather unit {one.name!r}"
        one.wait()

    def free(self, unit: int) -> None:
        """Whole weights have no memory on return; nothing to do where weights are unsharded."""
        one = self._units[unit]
        if one.is_sharded:
            assert one.state is not UnitState.SHARDED, f"unit {one.name!r} is not gathered"
            one.wait()  # memory is never taken from a collective under way
            self._memory.release("weights", one.name, one.fulls)
            one.state = UnitState.SHARDED

    def weights_changed(self) -> None:
        """This rank's part of the weights at rest was written (see `settle`): what is gathered is out of date, and is
        freed; what other ranks have written is gathered."""
        self.settle()
        for number, unit in enumerate(self._units):
            if unit.is_sharded and unit.state is not UnitState.SHARDED:
                self.free(number)
        for unit in self._units:
            unit.gather_at_rest()
        if not self._overlap:
            self.settle()

    def settle(self) -> None:
        """On return weights at rest are up to date, and no gather reads or writes them: they may be written."""
        for unit in self._units:
            unit.wait()

    @contextlib.contextmanager
    def gathered(self, units: Iterable[int]) -> Iterator[None]:
        """Their weights are whole inside: for whoever reads them outside of a step."""
        units = tuple(units)
        own = [unit for unit in units if self.state(unit) is UnitState.SHARDED]
        for unit in own:
            self.start(unit)
        for unit in units:
            self.wait(unit)
        try:
            yield
        finally:
            for unit in own:
                if self.state(unit) is not UnitState.SHARDED:  # as where weights were written meanwhile
                    self.free(unit)

    def _gather(self, one: _Unit) -> None:
        one.wait()  # for what is gathered from
        self._memory.acquire("weights", one.name, one.fulls)
        one.gather()


class _Unit:
    """fulls: its whole weights. See [Note: at rest and whole]."""

    def __init__(self, name: str, buffer: FlatBuffer) -> None:
        buckets = buffer.buckets_of_unit(name)
        self.name = name
        self.fulls = [bucket.full_weights for bucket in buckets]
        self.is_sharded = buffer.is_cut(buckets, "weights")
        self.state = UnitState.SHARDED if self.is_sharded else UnitState.UNSHARDED
        self._pending: list[collectives.Pending] = []
        self._rounded = [(one.weights, one.weights_at_rest) for one in buckets if one.gathers_from_main]
        # What is gathered where it is needed, and what of weights at rest is, behind a step.
        self._gathers: list[tuple[Group, collectives.Kept]] = []
        self._at_rest: list[tuple[Group, list[tuple[Tensor, Tensor]]]] = []
        for groups, together in buffer.by_groups(buckets):
            full = collectives.Kept((one.full_weights, one.weights) for one in together)
            self._gathers.append((groups.gather, full))
            row = buffer.arenas[together[0].arena].sharding
            if row.optimizer is not row.weights:
                trained = [(one.weights, one.optimizer_weights) for one in together]
                pairs = [(whole, part) for whole, part in trained if part is not None]
                self._at_rest.append((groups.outer if self.is_sharded else groups.gather, pairs))

    def gather(self) -> None:
        self.state = UnitState.GATHERING
        for weights, main in self._rounded:
            weights.copy_(main)
        self._pending = [collectives.all_gather_units(pairs, group) for group, pairs in self._gathers]

    def gather_at_rest(self) -> None:
        if self._at_rest and not self.is_sharded:
            self.state = UnitState.GATHERING
        self._pending = [collectives.all_gather_units(pairs, group) for group, pairs in self._at_rest]

    def wait(self) -> None:
        """For all that is under way."""
        for pending in self._pending:
            pending.wait()
        self._pending = []
        if self.state is UnitState.GATHERING:
            self.state = UnitState.UNSHARDED
