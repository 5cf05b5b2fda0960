"""Fully sharded data parallelism: weights, gradients and optimizer state cut over ranks, whole only where in use.

All rows of the sharding table over the flat buffer of `HookDrivenDataParallel`, with one bucket a unit of the model
and type of weights. Weights are gathered unit by unit as forward and backward come to them; gradients are reduced unit
by unit as backward leaves them. Source of the rows: ZeRO (Rajbhandari et al. 2020).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron.core.distributed.custom_fsdp.debug import watch_released
from megatron.core.distributed.custom_fsdp.gather import Gatherer
from megatron.core.distributed.custom_fsdp.hook_driven import HookDrivenDataParallel
from megatron.core.distributed.custom_fsdp.memory import AllocatedMemory, DoubleBuffer, TransientMemory
from megatron.core.distributed.custom_fsdp.reduce import MicrobatchReduction
from megatron.core.distributed.custom_fsdp.slots import plan_slots
from megatron.core.distributed.custom_fsdp.step_plan import StepPlan
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.drive import Drive
from megatron.core.distributed.engine_parts import Reduction, Weights
from megatron.core.distributed.finalize_model_grads import PartialSums
from megatron.core.distributed.flat_buffer import FlatBuffer, Reading, as_they_are
from megatron.core.distributed.gradient_sources import Sinks
from megatron.core.distributed.hooks import UnitHooks
from megatron.core.distributed.outer_sums import OuterSums
from megatron.core.distributed.sharding import Cut
from megatron.core.distributed.units import Unit, UnitModule, find_units
from megatron.core.mesh import data_parallel_state, parallel_state_of_mesh
from megatron.core.module import MegatronModule, ModelError, ModelUnit
from megatron.core.parallel_state import ParallelState
from megatron.core.param_meta import ParamMeta, infer_param_meta
from megatron.core.protocols import Work


class FullyShardedDataParallel(HookDrivenDataParallel):
    """`HookDrivenDataParallel` by units, for every `--data-parallel-sharding-strategy`, over any `nn.Module`.

    ps_or_mesh: the ranks; a mesh has one dim, or two: (instances, ranks of an instance). param_meta, sinks: a
    `MegatronModule`'s own where they are not given.
    units: declared by the model (of all chunks); without, a `MegatronModule` says them itself. fsdp_unit_modules: for
    other models, the classes of their modules that are one unit each, or tuples of names of modules that are one
    together; those of the config if not given. What is in none of them forms units of its own (`units.py`).
    reading: a unit's parameters are read inside it, where another engine has cut them.

    A step is that of `HookDrivenDataParallel`, with `microbatch_done` after each backward. Communicates over dp_gather
    in forward and backward, over dp_reduce in backward, over dp_outer once a step.

    Raises ModelError where units do not fit the model, or where gradients are cut and the model is in several chunks;
    MeshError for a mesh of more dims; ReshardPlanError where a budget does not fit the policy.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module] | nn.Module,
        ps_or_mesh: ParallelState | DeviceMesh,
        config: DistributedDataParallelConfig,
        param_meta: Mapping[str, ParamMeta] | None = None,
        sinks: Sinks = None,
        stages: Sequence[int] | None = None,
        *,
        units: Sequence[ModelUnit] | None = None,
        fsdp_unit_modules: Sequence[UnitModule] | None = None,
        reading: Reading = as_they_are,
    ) -> None:
        self._reading = reading
        self._unit_modules = config.fsdp_unit_modules if fsdp_unit_modules is None else fsdp_unit_modules
        chunks = (chunks,) if isinstance(chunks, nn.Module) else tuple(chunks)
        if param_meta is None:
            param_meta = {name: fact for chunk in chunks for name, fact in _param_meta(chunk).items()}
        if sinks is None:
            sinks = [chunk.context.grads if isinstance(chunk, MegatronModule) else None for chunk in chunks]
        super().__init__(chunks, ranks_of(ps_or_mesh), config, param_meta, sinks, stages, units=units)
        if self.sharding.main_grads is not Cut.WHOLE:
            self.plan.policies(1)  # what does not go together is said here, and not in the first step
        if config.fsdp_debug:
            watch_released(self, self.buffer, self.units)

    # What the row of the table decides ----------------------------------------------------------------

    def _find_units(self, declared: Sequence[ModelUnit] | None) -> tuple[Unit, ...]:
        if self.sharding.main_grads is not Cut.WHOLE and len(self.chunks) > 1:
            raise ModelError(
                f"--data-parallel-sharding-strategy {self.config.data_parallel_sharding_strategy}: a rank with "
                f"{len(self.chunks)} model chunks shards no more than its optimizer: use optim"
            )
        if declared is None:
            declared = declared_units(self.chunks)
        units = find_units(self.chunks, self._chunks.parameters, declared, self._unit_modules)
        self._memory = self._new_memory(units)
        return units

    def _new_memory(self, units: Sequence[Unit]) -> TransientMemory:
        if not self.config.fsdp_double_buffer or self.sharding.main_grads is Cut.WHOLE:
            return AllocatedMemory(self.ledger)
        if self.config.fsdp_debug:
            raise ModelError(
                "--fsdp-debug with --fsdp-double-buffer: a slot's memory is never released, so a view that was kept "
                "reads another unit's weights and cannot be told from one that was not; leave out one of them"
            )
        keeps = self.config.fsdp_reshard_policy != "memory"
        lasting = [unit.index for unit in units if keeps or unit.lasts or unit.nested]
        slots = plan_slots(len(units), lasting=lasting)
        return DoubleBuffer(self.ledger, {unit.name: slots[unit.index] for unit in units})

    def _new_buffer(self, param_meta: Mapping[str, ParamMeta]) -> FlatBuffer:
        unit_of = {name: unit.name for unit in self.units for name in unit.names}
        return self._flat_buffer(
            param_meta, unit_of=unit_of, new_full=self._memory.new, reading=self._reading
        )

    def _new_reduction(self, outer: OuterSums) -> Reduction:
        if self.sharding.main_grads is Cut.WHOLE:
            return super()._new_reduction(outer)
        self._by_microbatch = MicrobatchReduction(
            self.units,
            self.buffer,
            self.ps.dp_reduce_group,
            outer,
            PartialSums(self.buffer, self.ps.tp_group, ledger=self.ledger),
            self._memory,
            self.ledger,
            self.traffic,
            bound=self.plan.bound,
            forward=self.plan.order if self._reduces_in_one_order else None,
            on_complete=self._unit_complete,
        )
        return self._by_microbatch

    def _unit_complete(self, unit: int) -> None:
        """A unit has all its gradients of a microbatch. That tells that backward is through it only where nothing else
        of it can come: frozen weights report no gradient, a unit around others comes back behind them."""
        if unit not in self._read_beyond_gradients:
            self._weights.passed(unit)

    @functools.cached_property
    def _read_beyond_gradients(self) -> frozenset[int]:
        """The units that only the hooks, or the end of the microbatch, pass."""
        frozen = set(self.buffer.frozen)
        units = (unit for unit in self.units if unit.lasts or unit.nests or not frozen.isdisjoint(unit.names))
        return frozenset(unit.index for unit in units)

    def _new_weights(self) -> Weights:
        if self.sharding.weights is Cut.WHOLE:
            return self._whole_weights()
        groups = self.ps.dp_gather_group, self.ps.dp_outer_group
        self._gatherer = Gatherer(
            self.units,
            self.buffer,
            *groups,
            self._memory,
            self.traffic,
            bound=self.plan.bound,
            last=self.plan.order[-1],
            planned=self.plan.demands,
        )
        return self._gatherer

    def _install_hooks(self) -> None:
        cut = self.sharding.main_grads is not Cut.WHOLE
        if cut or self.config.overlap_param_gather:
            drive = Drive(self, self._reduction, self._weights)
            self._hooks += UnitHooks(self.chunks, self.units, drive, backward=cut).handles

    # Plans ----------------------------------------------------------------------------------------------

    @functools.cached_property
    def plan(self) -> StepPlan:
        """What steps move and hold."""
        return StepPlan(self.chunks, self.units, self.buffer)

    @property
    def peak_gathered(self) -> int:
        """The most elements gathered at once so far; 0 where weights are whole."""
        return 0 if self.sharding.weights is Cut.WHOLE else self._gatherer.peak_gathered

    @property
    def _reduces_in_one_order(self) -> bool:
        """Whether units reduce in the order of registration, so that some ranks may skip some: where weights are whole.
        Where they are gathered no rank can skip a unit anyway, and slots taken in turns need the order of the run."""
        return self.sharding.weights is Cut.WHOLE and not self.config.fsdp_double_buffer

    def begin_step(
        self, num_microbatches: int | None, *, reduce_gradients: bool = True, accumulate: bool = False
    ) -> None:
        if self.sharding.main_grads is not Cut.WHOLE:
            chosen = self.plan.policies(num_microbatches or 1)
            self._by_microbatch.set_late([one.reduce_late for one in chosen])
            if self.sharding.weights is not Cut.WHOLE:
                self._gatherer.set_keep([one.keep for one in chosen])
                self._gatherer.begin_step()
        super().begin_step(num_microbatches, reduce_gradients=reduce_gradients, accumulate=accumulate)

    # GradSync -------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """After the last backward: gradients are complete where the optimizer reads them. Raises PeerLostError."""
        step = self._running("finish()")
        super().finish()
        if step.num_microbatches is not None:
            self.plan.check(
                step.num_microbatches,
                self.traffic.as_traffic(),
                new_weights=step.new_weights,
                as_planned=not self.plan.gathers or self._gatherer.as_planned,
                peak=self._gatherer.step_peak if self.plan.gathers else 0,
            )

    def microbatch_done(self, chunk: int, microbatch: int) -> None:
        """A chunk has all its gradients of one microbatch."""
        super().microbatch_done(chunk, microbatch)
        left = self._running("microbatch done").chunks_left
        self._weights.end_microbatch(last=left is not None and left[chunk] == 0)

    def unshard(self, chunk: int, unit: int | None = None) -> Work:
        """Begin to gather a unit's weights, or all. Communicates over dp_gather."""
        if self.sharding.weights is Cut.WHOLE:
            return super().unshard(chunk, unit)
        units = range(len(self.units)) if unit is None else (unit,)
        return _Gathers([pending for one in units if (pending := self._gatherer.begin_fetch(one))])

    def wait(self, chunk: int, unit: int | None = None) -> None:
        """Return once the weights are whole."""
        if self.sharding.weights is Cut.WHOLE:
            super().wait(chunk, unit)
            return
        for one in range(len(self.units)) if unit is None else (unit,):
            self._gatherer.fetch(one)

    def weights_read(self, unit: int) -> None:
        """What `wait` gathered to be read outside of the model is not needed any more."""
        if self.sharding.weights is not Cut.WHOLE:
            self._gatherer.unfetch(unit)

    def reshard(self, chunk: int, unit: int | None = None) -> None:
        """Free the whole weights of a unit, or of all: at once what `wait` gathered, what the model uses when it needs
        the next one."""
        if self.sharding.weights is not Cut.WHOLE:
            for one in range(len(self.units)) if unit is None else (unit,):
                self._gatherer.unfetch(one)
                self._gatherer.passed(one)


class _Gathers:
    """Gathers under way."""

    def __init__(self, pending: Sequence[Work]) -> None:
        self._pending = pending

    def wait(self) -> None:
        for one in self._pending:
            one.wait()


def ranks_of(ps_or_mesh: ParallelState | DeviceMesh | None) -> ParallelState:
    """The ranks that are meant; None: all of the default process group. Communicates over that where a state is made.

    Raises MeshError for a mesh of more than two dims, or without this rank.
    """
    if ps_or_mesh is None:
        return data_parallel_state()
    return parallel_state_of_mesh(ps_or_mesh) if isinstance(ps_or_mesh, DeviceMesh) else ps_or_mesh


def _param_meta(chunk: nn.Module) -> Mapping[str, ParamMeta]:
    return chunk.param_meta if isinstance(chunk, MegatronModule) else infer_param_meta(chunk)


def declared_units(chunks: Sequence[nn.Module]) -> list[ModelUnit] | None:
    """What the chunks declare themselves; None where one of them does not."""
    units: list[ModelUnit] = []
    for chunk in chunks:
        own = chunk.units() if isinstance(chunk, MegatronModule) else None
        if own is None:
            return None
        units += own
    return units
