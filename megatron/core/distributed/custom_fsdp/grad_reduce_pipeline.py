"""Gradients into sums over ranks: contributions are added up in whole gradients, and these are reduced unit by unit.

When a unit is reduced is for others to say: a plan, or hooks. Nothing here counts microbatches. Nothing is zeroed: the
first contribution overwrites. All ranks of a group call alike, in the same order.

[Note: whole gradients] Where gradients are unsharded (no_shard, optim), they are what is reduced, once a step. Where
they are sharded, whole gradients have memory from a unit's first contribution to the end of its reduction, however
often that comes in a step, and the sums over ranks are added to the shard that stays.

[Note: final sums] A contribution to a unit whose sum is final in this step is refused before it is written: it would be
added to the sum of all ranks, or of all instances.

[Note: sums in rank order] Up to two ranks a sum has one order. With more, gloo's ring adds each part of the buffer in
another order, and 16-bit sums round at every hop; there a bucket is exchanged, added in rank order in fp32, and
gathered. The result then depends neither on the buckets nor on the run.

[Note: shared parameters first] What another pipeline stage shares (tied embeddings) is summed over the stages before it
is summed over data parallel ranks, where gradients are unsharded: a rank's uses are added first, as one process does,
and every schedule gets the same bits. Its buckets wait for the end of the step.

[Note: when to wait] The second half of some sums over instances is sent by whoever waits for them (`sum_gradients`), so
these are waited for at points that all ranks reach alike. A contribution waits for reductions of its own unit only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from torch import Tensor

from megatron.core.distributed.custom_fsdp.bucket_memory import ArenaGroups, BucketMemory, trained
from megatron.core.distributed.custom_fsdp.flat_buffer import FlatBuffer
from megatron.core.distributed.custom_fsdp.shared_sums import ModelParallelSums
from megatron.core.distributed.custom_fsdp.squared_sums import nonfinite_place
from megatron.core.distributed.custom_fsdp.transient_memory import (
    AllocatedMemory,
    RestingGrads,
)
from megatron.core.memory_tracker import MemoryTracker
from megatron.core.module import ModelError
from megatron.core.pipeline_parallel.plan import ir
from megatron.core.pipeline_parallel.plan.held.lanes import UnderWay, lane_of
from megatron.core.sharding_table import ShardOver
from megatron.core.transport import collectives
from megatron.core.transport.parallel_state import Group, ParallelState
from megatron.core.transport.peer_loss import PeerLostError

Calls = list[tuple[ArenaGroups, list[BucketMemory]]]
# One collective: a sum in place, or (shard, whole) of a reduce-scatter.
Sum = tuple[Group, Tensor | list[tuple[Tensor, Tensor]]]


class GradState:
    """A unit's gradients.

    is_sharded: they are cut at rest. is_summed: over some ranks. held: whole gradients have memory. has_sum: the shard
    holds what the next sum is added to. reduced, summed_outer: in this step. final: see [Note: final sums].
    """

    def __init__(self, name: str, buffer: FlatBuffer, tracker: MemoryTracker) -> None:
        self.name = name
        buckets = [bucket for bucket in buffer.buckets_of_unit(name) if bucket.trained]
        self.is_sharded = is_sharded = buffer.is_cut(buckets, "main_grads")
        waiting = [one for one in buckets if not is_sharded and buffer.arenas[one.arena].layout.shared]
        calls = buffer.by_groups(one for one in buckets if one not in waiting)
        last_calls = buffer.by_groups(waiting)  # see [Note: shared parameters first]
        self.sums, self.last_sums = (_inner(one, buffer, is_sharded) for one in (calls, last_calls))
        self.outer, self.last_outer = (_outer(one, buffer) for one in (calls, last_calls))
        self.is_summed = bool(self.sums or self.last_sums or self.outer or self.last_outer)
        self.fulls = [trained(bucket.full_grads) for bucket in buckets]
        names = [name for bucket in buckets for name in bucket.bucket.names]
        self.uses = [buffer.param_meta[name].grad_keys for name in names]
        self.keys = frozenset(key for uses in self.uses for key in uses)
        self.further = frozenset(key for uses in self.uses for key in uses[1:])
        self.shards = [trained(bucket.main_grads) for bucket in buckets] if is_sharded else []
        self.resting = RestingGrads(name, self.shards, tracker)
        self.held = self.has_sum = self.reduced = self.summed_outer = self.final = False


@dataclasses.dataclass(frozen=True, eq=False)
class _Sums:
    """The collectives of one reduction of a unit. inner: they read whole gradients."""

    unit: GradState
    pending: list[collectives.Pending]
    inner: bool


class GradReducePipeline:
    """units: their names. order: in which `finish` reduces those that nobody has reduced. `fresh`: keys without a
    contribution since their unit's last reduction. Communicates over the reduce
    and outer groups of the buffer's arenas, and in `finish` over tp and embedding where gradients have parts there;
    over these when built, too. Raises PeerLostError where it waits."""

    def __init__(
        self,
        units: Sequence[str],
        buffer: FlatBuffer,
        memory: AllocatedMemory,
        tracker: MemoryTracker,
        order: Iterable[int],
        ps: ParallelState,
    ) -> None:
        self._buffer, self._memory, self._tracker = buffer, memory, tracker
        self.model_parallel_sums = ModelParallelSums(buffer, ps, tracker)
        self.units = [GradState(name, buffer, tracker) for name in units]
        self._order = [self.units[unit] for unit in order]
        self._of_key = {key: unit for unit in self.units for key in unit.keys}
        self.fresh = set(self._of_key)
        self._under_way: UnderWay[_Sums] = UnderWay()
        self._reduce = True
        self.is_stepping = False  # a step was begun and is not finished
        self._nonfinite: dict[str, str] = {}

    def begin_step(self, *, reduce_gradients: bool, keep: bool) -> None:
        """What gradients there are is overwritten. keep: gradients at rest keep their memory until `release`.
        reduce_gradients: without, gradients are only looked at (`nonfinite_keys`)."""
        assert not self._under_way.entries, (
            "a step begins while gradients are still being reduced: call finish() first"
        )
        self._reduce, self.is_stepping = reduce_gradients, True
        self._nonfinite = {}
        self.fresh.update(self._of_key)
        for unit in self.units:
            self._drop(unit)
            unit.reduced = unit.summed_outer = unit.final = False
            unit.has_sum = False
        if not keep:
            self.release()

    def add_to_sums(self) -> None:
        """Before a step's first contribution: this one adds to what gradients there are."""
        for unit in self.units:
            unit.resting.hold()
            unit.has_sum = True
            self.fresh.difference_update(unit.keys)
            self.fresh.update(unit.keys if unit.is_sharded else unit.further)

    def release(self) -> None:
        """What gradients at rest hold is of no more use: cut ones have no memory until their unit's next reduction."""
        for unit in self.units:
            unit.resting.release()

    def grad_begins(self, key: str) -> bool:
        """A contribution is about to be written: its memory is there on return. Whether it overwrites. Raises
        ModelError where it comes too late."""
        assert self.is_stepping, f"a gradient for {key} outside of a step: call begin_step() first"
        unit = self._of_key[key]
        if key not in self.fresh:
            return False
        if unit.final:
            raise ModelError(
                f"a gradient for parameter {key!r} came after its unit {unit.name!r} was reduced for the last time in "
                "the step: units run in the order in which their modules are registered, and once; name those that do "
                "with --fsdp-unit-modules, and checkpoint modules that run several times with use_reentrant=False"
            )
        self._hold(unit)
        self.fresh.discard(key)
        if unit.is_sharded and key in unit.further:
            self._memory.acquire("extra", unit.name, [self._buffer.main_grad(key)])
        return True

    def grad_ready(self, key: str, microbatch: int) -> None:
        """A contribution is complete. That nothing more comes is for `start` and `finish` to say."""

    def start(self, unit: int) -> None:
        """Begin to sum over ranks what was contributed to a unit since the last time: zeros, where nothing was."""
        assert self.is_stepping, "start() outside of a step: call begin_step() first"
        self._start(self.units[unit])

    def start_outer(self, unit: int) -> None:
        """Begin to sum a unit over instances, behind its last `start`."""
        assert self.is_stepping, "start_outer() outside of a step: call begin_step() first"
        one = self.units[unit]
        assert not one.summed_outer, f"unit {one.name!r} is summed over instances already"
        if self._reduce:
            self._start_outer(one, one.outer)

    def check_reduced(self) -> None:
        """Before `finish`, where a plan says when each unit is reduced: nothing is left for `finish` to begin, but
        for units that no other rank holds, of which a plan says nothing."""
        left = [
            unit.name
            for unit in self.units
            if unit.is_summed and not (unit.reduced and unit.keys <= self.fresh)
        ]
        assert not left, f"no operation of the plan has reduced {left}"

    def wait_for_all(self) -> None:
        """That is under way. Raises PeerLostError."""
        self._wait_for(self._under_way.every())

    def finish(self) -> None:
        """After the last contribution: what nobody has reduced is, and all is complete where the optimizer reads it.
        Under a plan nothing is left to reduce (`check_reduced`)."""
        assert self.is_stepping, "finish() outside of a step: call begin_step() first"
        assert self._reduce, "finish() of a step begun without reduce_gradients"
        for unit in self._order:
            if not (unit.reduced and unit.keys <= self.fresh):
                self._start(unit)
        self.model_parallel_sums.before_data_parallel()
        for unit in self._order:
            self._launch(unit, unit.last_sums, inner=True)
        for unit in self._order:
            late = unit.last_outer if unit.summed_outer else unit.outer + unit.last_outer
            self._start_outer(unit, late)
        self.wait_for_all()
        self.model_parallel_sums.after_data_parallel()
        self.is_stepping = False

    def resting_bytes(self, unit: int) -> int:
        """What its gradients at rest take that have no memory from a step's beginning to the unit's first sum."""
        return self.units[unit].resting.num_bytes

    def nonfinite_keys(self) -> dict[str, str]:
        """Of a step begun without reduction: keys under which this rank's own gradients were not finite, with what a
        report calls the place."""
        for unit in self._order:
            self._look_at(unit)
        return dict(self._nonfinite)

    # ---

    def _start(self, unit: GradState) -> None:
        assert not unit.final, f"unit {unit.name!r} was reduced for the last time in this step"
        if not unit.keys:
            return
        if not self._reduce:
            self._look_at(unit)
            return
        self._hold(unit)  # also what no contribution came to on this rank: others may have some
        for first, *further in unit.uses:
            if first in self.fresh:
                self._buffer.main_grad(first).zero_()
            for key in further:
                if key not in self.fresh:
                    self._buffer.main_grad(first).add_(self._buffer.main_grad(key))
        self.fresh.update(unit.keys)
        unit.reduced, unit.final = True, not unit.is_sharded
        unit.resting.hold()
        self._launch(unit, unit.sums, inner=True)
        unit.has_sum = True

    def _start_outer(self, unit: GradState, sums: list[Sum]) -> None:
        unit.summed_outer = True
        if sums:
            unit.final = True
            self._wait_for(self._under_way.of(unit))
            self._launch(unit, sums, inner=False)

    def _launch(self, unit: GradState, sums: list[Sum], *, inner: bool) -> None:
        """inner: over the ranks that share shards, and added to what cut shards have; else over instances."""
        if not sums:
            return
        lane = lane_of(ir.REDUCE if inner else ir.HSDP_ALL_REDUCE)
        self._wait_for(self._under_way.before_one_more(lane))
        add = inner and unit.is_sharded and unit.has_sum
        pending = [
            collectives.sum_gradients(what, group)
            if isinstance(what, Tensor)
            else collectives.reduce_scatter_units(what, group, accumulate=add)
            for group, what in sums
        ]
        self._tracker.hold("exchange", unit.name, sum([one.temporary_bytes for one in pending]))
        self._under_way.begin(lane, unit, _Sums(unit, pending, inner))

    def _hold(self, unit: GradState) -> None:
        """Whole gradients have memory on return. See [Note: when to wait]."""
        if not unit.is_sharded or (unit.held and not self._under_way.entries):
            return
        self._wait_for(self._under_way.of(unit))
        if unit.held:
            return
        if self._memory.is_blocked("grads", unit.name):
            for inner in [sums.unit for _, _, sums in self._under_way.entries if sums.inner]:
                self._wait_for(self._under_way.of(inner))
        self._memory.acquire("grads", unit.name, unit.fulls)
        unit.held = True

    def _wait_for(self, through: Iterable[_Sums]) -> None:
        for one in through:
            try:
                for pending in one.pending:
                    pending.wait()
            except (
                PeerLostError
            ) as error:  # which may come to light in another operation, or behind the last one
                kind = "REDUCE" if one.inner else "HSDP_ALL_REDUCE"
                raise error.at(f"{kind} of unit {one.unit.name!r}") from error
            self._tracker.free(
                "exchange", one.unit.name, sum(pending.temporary_bytes for pending in one.pending)
            )
            if one.inner:
                self._drop(one.unit)

    def _drop(self, unit: GradState) -> None:
        """Whole gradients have no memory any more, where they are cut at rest."""
        if unit.held:
            self._memory.release("grads", unit.name, unit.fulls)
            extra = [self._buffer.main_grad(key) for key in unit.further]
            self._memory.release("extra", unit.name, [one for one in extra if one.untyped_storage().nbytes()])
            unit.held = False

    def _look_at(self, unit: GradState) -> None:
        """Instead of a reduction."""
        for key in sorted(unit.keys - self.fresh):
            meta = self._buffer.param_meta[self._buffer.param_of_key(key)]
            if (place := nonfinite_place(meta, self._buffer.main_grad(key).flatten())) is not None:
                self._nonfinite.setdefault(key, place)
        self.fresh.update(unit.keys)
        self._drop(unit)


def _inner(calls: Calls, buffer: FlatBuffer, is_sharded: bool) -> list[Sum]:
    """Over the ranks that share shards."""
    sums: list[Sum] = []
    for groups, buckets in calls:
        if groups.reduce.size == 1:
            continue
        if _optimizer(buffer, buckets) is ShardOver.NONE:
            sums += [(groups.reduce, trained(one.full_grads)) for one in buckets]
            continue
        shards = [trained(one.main_grads if is_sharded else one.optimizer_grads) for one in buckets]
        fulls = [trained(one.full_grads) for one in buckets]
        sums.append((groups.reduce, collectives.Kept(zip(shards, fulls, strict=True))))
    return sums


def _outer(calls: Calls, buffer: FlatBuffer) -> list[Sum]:
    """Over instances. Once a step: views would keep the memory of gradients at rest (`RestingGrads`)."""
    sums: list[Sum] = []
    for groups, buckets in calls:
        if groups.outer.size == 1:
            continue
        parts = [(trained(one.optimizer_grads), trained(one.main_grads)) for one in buckets]
        if _optimizer(buffer, buckets) is ShardOver.FULL:
            sums.append((groups.outer, parts))
        else:
            sums += [(groups.outer, part) for part, _ in parts]
    return sums


def _optimizer(buffer: FlatBuffer, buckets: Sequence[BucketMemory]) -> ShardOver:
    """How the optimizer's states of buckets that one call is about are cut."""
    return buffer.arenas[buckets[0].arena].sharding.optimizer
