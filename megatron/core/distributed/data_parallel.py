"""The data parallel engine, for every row of the table of strategies (`sharding_table.py`), all chunks of a rank.

It holds what gathers weights and what reduces gradients, unit by unit. Both do so when they are told: by a pipeline's
plan (`GradSync`), or by a loop of one's own, which need not tell anything where weights are unsharded:

    ddp.begin_step(num_microbatches)
    forwards and backwards, in any order       # gradients arrive in the flat buffer
    ddp.finish()                               # sums over microbatches and ranks, where the optimizer reads them
    optimizer.step(...)
    ddp.weights_changed()                      # all ranks compute with the new weights

Sums only: whoever uses the gradients divides once (`GradStats`, `step` of the optimizer), which costs one rounding
instead of one a microbatch. With `--ddp-average-in-collective` contributions are divided by the number of ranks as they
are added, which `FlatBuffer.grads_divided_by` records and the optimizer takes into account.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from megatron.core.distributed.custom_fsdp.all_gather_pipeline import AllGatherPipeline
from megatron.core.distributed.custom_fsdp.bucket_memory import ArenaGroups, ArenaSharding, num_bytes
from megatron.core.distributed.custom_fsdp.data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.custom_fsdp.flat_buffer import FlatBuffer
from megatron.core.distributed.custom_fsdp.grad_reduce_pipeline import GradReducePipeline
from megatron.core.distributed.custom_fsdp.gradient_sources import Sinks, connect
from megatron.core.distributed.custom_fsdp.released_tensors import watch_released
from megatron.core.distributed.custom_fsdp.sharding import debug_in_slots, residency_of
from megatron.core.distributed.custom_fsdp.stage_units import EngineUnits, find_engine_units, unit_costs
from megatron.core.distributed.custom_fsdp.transient_memory import AllocatedMemory, DoubleBuffer, plan_slots
from megatron.core.memory_tracker import MemoryTracker
from megatron.core.module import MegatronModule, ModelChunks, ModelError, ModelUnit
from megatron.core.param_meta import ParamMeta, infer_param_meta
from megatron.core.pipeline_parallel.plan.held.units import StageUnits
from megatron.core.pipeline_parallel.plan.residency import Residency
from megatron.core.protocols import GradListener, GradSync
from megatron.core.sharding_table import (
    EXPERT_GROUPS,
    Sharding,
    ShardOver,
    ShardPlace,
    outer_cut_of_nothing,
    sharding_of,
)
from megatron.core.transport.parallel_state import ParallelState
from megatron.core.transport.traffic import Traffic


class DistributedDataParallel(GradSync):
    """Data parallelism over any `nn.Module`s.

    chunks: this rank's model chunks, or its only one; their parameters' names are those of the whole model.
    param_meta: facts about the parameters; sinks: where each chunk's layers put their gradients, None for a plain
    module, whose gradients are taken from autograd's hooks; a chunk may have both. Both are a `MegatronModule`'s own
    where they are not given. stages: the global pipeline stage of each chunk, 0, 1, ... by default. units: of all
    chunks, or with what each needs of them; what each says itself, if not given, or else --fsdp-unit-modules
    (`stage_units.py`). listener: hears of contributions; what reduces them by default. hooks: all that listen to the
    model.

    Communicates over dp_gather, dp_reduce and dp_outer (the groups of its flat buffer's arenas), and over tp and
    embedding where gradients have parts there (`shared_sums`), there once when built. In a world of one no
    communication and no copy. Raises ModelError where units do not fit the model.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module] | nn.Module,
        ps: ParallelState,
        config: DistributedDataParallelConfig,
        param_meta: Mapping[str, ParamMeta] | None = None,
        sinks: Sinks = None,
        stages: Sequence[int] | None = None,
        *,
        units: EngineUnits | Sequence[ModelUnit] | None = None,
        listener: GradListener | None = None,
    ) -> None:
        modules = (chunks,) if isinstance(chunks, nn.Module) else tuple(chunks)
        self._chunks = own = ModelChunks(modules, None if stages is None else tuple(stages))
        self.ps, self.config = ps, config
        groups = ArenaGroups(ps.dp_gather_group, ps.dp_reduce_group, ps.dp_outer_group)
        self.place, experts = groups.place, expert_arenas(config, ps)
        self._places = (self.place,) if experts is None else (self.place, experts.place)
        dense = effective_sharding(config, self.place)
        self.sharding = dense if experts is None else dense.joined(experts.sharding)
        self.memory_tracker = MemoryTracker()
        if param_meta is None:
            found = [m.param_meta if isinstance(m, MegatronModule) else infer_param_meta(m) for m in modules]
            param_meta = {name: fact for facts in found for name, fact in facts.items()}
        if sinks is None:
            sinks = [one.context.grads if isinstance(one, MegatronModule) else None for one in modules]
        if not isinstance(units, EngineUnits):
            units = find_engine_units(own, units, config, self.sharding, self.place.dp_size)
        self._found = units
        self.units = self._found.units
        names = [unit.name for unit in self.units]
        memory = self._new_memory()
        self.slot_of_unit = memory.slot_of_unit
        unit_of = {name: unit.name for unit in self.units for name in unit.names}
        self.buffer = FlatBuffer(
            own.parameters,
            param_meta,
            config,
            sharding=dense,
            place=self.place,
            device=ps.device.torch_device,
            stages=own.stage_of,
            units=dict.fromkeys(own.parameters, "") | unit_of,
            new_full=memory.new,
            groups=groups,
            experts=experts,
            tracker=self.memory_tracker,
        )
        self.gathers = AllGatherPipeline(names, self.buffer, memory, config.overlap_param_gather)
        order = self._found.backward_order
        self.reductions = GradReducePipeline(names, self.buffer, memory, self.memory_tracker, order, ps)
        self._scale = 1.0 / self.place.dp_size if config.ddp_average_in_collective else 1.0
        self.hooks = connect(own, self.buffer, sinks, listener or self.reductions, scale=self._scale)
        self._counted_from = self._of_step = self._of_weights = Traffic()
        self._changed = self.began_with_new_weights = False
        held = self.buffer.persistent_bytes()
        held["main_grads"] -= self.resting_grad_bytes()  # they come and go: booked unit by unit
        self.memory_tracker.book({name: size for name, size in held.items() if size})
        if config.fsdp_debug:
            watch_released(self, self.buffer)

    # The model ------------------------------------------------------------------------------------------

    @property
    def chunks(self) -> tuple[nn.Module, ...]:
        return self._chunks.modules

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The forward of the only chunk, whose weights are unsharded, once those of the last step have come."""
        assert len(self.chunks) == 1, f"one of {len(self.chunks)} chunks is meant: call ddp.chunks[i]"
        for unit in range(len(self.units)):
            self.gathers.wait(unit)
        return self.chunks[0](*args, **kwargs)

    def residency(self, pipeline_ranks: int, chosen: Residency | None = None) -> Residency:
        """How it cuts states, for plans. chosen: whose limit, if it has one, is kept to."""
        element = max((arena.weights.element_size() for arena in self.buffer.arenas), default=1)
        asked = residency_of(self.config, self.sharding, pipeline_ranks, element_bytes=element)
        return asked if chosen is None or chosen.limit is None else asked.within(chosen.limit)

    def stage_units(self) -> tuple[StageUnits, ...]:
        """By chunk, what a plan has to know; times and activations are 0. Units with one name are one unit."""
        slots = self.slot_of_unit
        return self._found.stages(
            [unit_costs(unit, self.buffer, slots.get(unit.name)) for unit in self.units]
        )

    def unit_number(self, chunk: int, unit: int) -> int:
        """In `units`, of a chunk's unit."""
        return self._found.chunks[chunk].units[unit]

    def unit_modules(self) -> tuple[tuple[tuple[nn.Module, ...], ...], ...]:
        """By chunk and unit: the modules of the chunk whose runs tell that the unit is needed."""
        inside = [{id(one) for one in module.modules()} for module in self.chunks]
        return tuple(
            tuple(tuple(m for m in self.units[number].entered_by if id(m) in here) for number in chunk.units)
            for chunk, here in zip(self._found.chunks, inside, strict=True)
        )

    def unit_of_key(self) -> tuple[dict[str, int], ...]:
        """By chunk: in which of its units a weight gradient is, by the key that it is put under."""
        keys = {name: self.buffer.param_meta[name].grad_keys for name in self.buffer.names}
        return tuple(
            {
                key: place
                for place, number in enumerate(chunk.units)
                for name in self.units[number].names
                for key in keys.get(name, ())
            }
            for chunk in self._found.chunks
        )

    # A step ---------------------------------------------------------------------------------------------

    def begin_step(
        self,
        num_microbatches: int,
        *,
        reduce_gradients: bool = True,
        keep_gradients: bool = False,
    ) -> None:
        """Start a step: its gradients overwrite those of the last one, no unit is reduced yet.

        reduce_gradients: without, they stay this rank's own, and `finish` is not called. keep_gradients: those of the
        last step are still needed, until `release_gradients` (a step that is not decided on).
        """
        assert num_microbatches >= 1, f"a step of {num_microbatches} microbatches"
        # With what the last `weights_changed` has moved.
        self._counted_from, self._of_weights = self._moved() - self._of_weights, Traffic()
        self.began_with_new_weights, self._changed = self._changed, False
        self.reductions.begin_step(reduce_gradients=reduce_gradients, keep=keep_gradients)
        self.buffer.grads_divided_by = round(1.0 / self._scale)

    def finish(self) -> None:
        """After the last backward: reduce what nobody has reduced, wait for all, add what other ranks hold parts of.

        Raises PeerLostError.
        """
        self.reductions.finish()
        self.gathers.settle()  # the optimizer is about to write what they may still send
        self._of_step = self._moved() - self._counted_from

    def release_gradients(self) -> None:
        """The gradients are no longer needed: cut ones have no memory until their unit's next reduction, unless
        somebody has made views of them since this was first called."""
        self.reductions.release()

    def resting_grad_bytes(self) -> int:
        """What gradients at rest take that have no memory between steps, and keep it while a step is not decided on."""
        return num_bytes(self.buffer.cut_grads())

    def nonfinite_keys(self) -> dict[str, str]:
        """Ends a step begun without reduction: keys under which this rank's own gradients were not finite, with what a
        report calls the place."""
        return self.reductions.nonfinite_keys()

    # Weights --------------------------------------------------------------------------------------------

    def gathered(self, units: Iterable[int]) -> contextlib.AbstractContextManager[None]:
        """Weights are whole inside: for whoever reads them outside of steps. units: places in `units`."""
        return self.gathers.gathered(units)

    def weights_changed(self) -> None:
        """The optimizer, a load or an initialisation has written this rank's weights at rest; in a step that is under
        way, whose forwards are done again, behind `settle_weights`."""
        before = self._moved()
        self.gathers.weights_changed()
        if not self.is_stepping:
            self._of_weights, self._changed = self._moved() - before, True

    def settle_weights(self) -> None:
        """On return the weights at rest are up to date, and nothing reads them: before they are read or written by
        anything but the model."""
        self.gathers.settle()

    # ---

    @property
    def waits_for_units(self) -> bool:
        """Whether something is gathered or reduced unit by unit, for a computation to wait for."""
        cut = self.sharding.optimizer is not ShardOver.NONE
        return self.config.use_custom_fsdp or (self.config.overlap_param_gather and cut)

    @property
    def has_peers(self) -> bool:
        """Whether other ranks hold some of the model's parameters, or of their states, too: the same on all stages,
        which may have no experts, whose ranks alone may have peers."""
        return any(place.dp_size > 1 for place in self._places)

    @property
    def is_stepping(self) -> bool:
        """Whether a step was begun and is not finished."""
        return self.reductions.is_stepping

    @property
    def traffic(self) -> Traffic:
        """What the step under way has moved, or the last one: with the gathers of the weights that it began with."""
        return self._moved() - self._counted_from if self.is_stepping else self._of_step

    @functools.cached_property
    def groups(self) -> tuple[ArenaGroups, ...]:
        """All that communicate about a part of the model."""
        return tuple(groups for groups, _ in self.buffer.by_groups(self.buffer.buckets))

    def _moved(self) -> Traffic:
        """Since the groups were made."""
        return sum((groups.moved() for groups in self.groups), start=Traffic())

    def _new_memory(self) -> AllocatedMemory:
        config = self.config
        if not config.fsdp_double_buffer or self.sharding.main_grads is ShardOver.NONE:
            return AllocatedMemory(self.memory_tracker)
        if debug_in_slots(config):
            raise ModelError(
                "--fsdp-debug with --fsdp-double-buffer: a slot's memory is never released, so a view that was kept "
                "reads another unit's weights and cannot be told from one that was not; leave out one of them"
            )
        lasting = self._found.lasting | {unit.index for unit in self.units if unit.nested}
        if config.fsdp_reshard_policy != "memory":
            lasting = frozenset(range(len(self.units)))
        slots = plan_slots(len(self.units), lasting=lasting)
        return DoubleBuffer(self.memory_tracker, {unit.name: slots[unit.index] for unit in self.units})


def expert_arenas(config: DistributedDataParallelConfig, ps: ParallelState) -> ArenaSharding | None:
    """How experts' states are cut: over the ranks that hold the same experts; None where they lie as the rest."""
    if ps.experts is None:
        return None
    groups = ArenaGroups(
        ps.expert_dp_gather_group,
        ps.expert_dp_reduce_group,
        ps.expert_dp_outer_group,
        EXPERT_GROUPS,
    )
    row = sharding_of(config.data_parallel_sharding_strategy, config.outer_dp_sharding_strategy)
    return ArenaSharding(row.of_experts(groups.place), groups.place, groups)


def effective_sharding(config: DistributedDataParallelConfig, place: ShardPlace) -> Sharding:
    """The row of the table; what is cut into one part is whole. Raises ModelError where instances have one rank each
    and the optimizer is to be cut over them."""
    row = sharding_of(config.data_parallel_sharding_strategy, config.outer_dp_sharding_strategy)
    if outer_cut_of_nothing(config.outer_dp_sharding_strategy, place):
        raise ModelError(
            f"--num-distributed-optimizer-instances {place.outer_size}: an instance of one rank has nothing to shard, "
            "and --outer-dp-sharding-strategy optim needs something sharded: use fewer instances"
        )
    return row.at(place)
