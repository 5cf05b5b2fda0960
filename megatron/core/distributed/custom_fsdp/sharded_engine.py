"""Fully sharded data parallelism for loops without a plan: the engine, and hooks that say what it does when.

The steps are those of `DistributedDataParallel`, with `microbatch_done` behind each backward. Weights are gathered unit
by unit as forward and backward come to them; gradients are reduced unit by unit as backward leaves them. Source of the
rows: ZeRO (Rajbhandari et al. 2020).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron.core.distributed.bucket_memory import Reading, as_they_are
from megatron.core.distributed.custom_fsdp.hooks import UnitHooks
from megatron.core.distributed.custom_fsdp.reshard_policy import UnitFacts, UnitPolicy, check_policy, policies
from megatron.core.distributed.custom_fsdp.run_order import ReductionOrder
from megatron.core.distributed.custom_fsdp.unit_driver import UnitDriver
from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.distributed.data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.stage_units import EngineUnits, unit_costs
from megatron.core.module import ModelChunks, ModelError, ModelUnit
from megatron.core.protocols import GradListener
from megatron.core.sharding_table import ShardOver, grads_are_sharded, weights_are_sharded
from megatron.core.transport.mesh import data_parallel_state, parallel_state_of_mesh
from megatron.core.transport.parallel_state import ParallelState
from megatron.core.unit_accesses import Accesses
from megatron.core.units import UnitModule, declared_units, find_units, forward_order


class FullyShardedDataParallel(DistributedDataParallel):
    """`DistributedDataParallel` by units, for every `--data-parallel-sharding-strategy`, over any `nn.Module`.

    ps_or_mesh: the ranks; a mesh has one dim, or two: (instances, ranks of an instance). fsdp_unit_modules: for models
    that do not say their units themselves (`MegatronModule`), the classes of their modules that are one unit each, or
    tuples of names of modules that are one together; those of the config if not given. What is in none of them forms
    units of its own (`units.py`). A unit is a bucket in every row: the config's sizes of buckets have no effect.

    Communicates over dp_gather in forward and backward, over dp_reduce in backward, over dp_outer once a step.

    Raises ModelError where units do not fit the model, or where gradients are sharded and the model is in several
    chunks; MeshError for a mesh of more dims; ReshardPlanError where a budget does not fit the policy.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module] | nn.Module,
        ps_or_mesh: ParallelState | DeviceMesh,
        config: DistributedDataParallelConfig,
        *,
        fsdp_unit_modules: Sequence[UnitModule] | None = None,
        reading: Reading = as_they_are,
    ) -> None:
        self._unit_modules = config.fsdp_unit_modules if fsdp_unit_modules is None else fsdp_unit_modules
        super().__init__(chunks, ranks_of(ps_or_mesh), config, reading=reading)
        sharded = self.sharding.main_grads is not ShardOver.NONE
        if sharded or config.overlap_param_gather:
            self.hooks += UnitHooks(self.chunks, self.units, self.driver, backward=sharded).handles

    def _find_units(self, chunks: ModelChunks, declared: Sequence[ModelUnit] | None) -> EngineUnits:
        config, modules = self.config, chunks.modules
        strategy = config.data_parallel_sharding_strategy
        if self.sharding.main_grads is not ShardOver.NONE and len(modules) > 1:
            raise ModelError(
                f"--data-parallel-sharding-strategy {strategy}: a rank with "
                f"{len(modules)} model chunks shards no more than its optimizer: use optim"
            )
        check_policy(
            config.fsdp_reshard_policy,
            config.fsdp_memory_budget,
            weights_sharded=weights_are_sharded(strategy),
            grads_sharded=grads_are_sharded(strategy),
        )
        units = find_units(modules, chunks.parameters, declared_units(modules), self._unit_modules)
        forwards = [forward_order([module], units) for module in modules]
        self._forward_order = [unit for forward in forwards for unit in forward]
        rows = [tuple((unit,) for unit in forward) for forward in forwards]
        return EngineUnits(units, tuple(Accesses(row, row[::-1]) for row in rows))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The forward of the only chunk."""
        assert len(self.chunks) == 1, f"one of {len(self.chunks)} chunks is meant: call ddp.chunks[i]"
        return self.chunks[0](*args, **kwargs)

    def _grad_listener(self) -> GradListener:
        frees, forward, config = self.sharding.weights is not ShardOver.NONE, self._forward_order, self.config
        numel = [
            sum(bucket.bucket.numel for bucket in self.buffer.buckets_of_unit(unit.name))
            for unit in self.units
        ]
        bound = config.suggested_communication_unit_size
        # Where weights are gathered no rank can skip a unit, and slots taken in turns need the order of the run.
        registered = None if frees or config.fsdp_double_buffer else forward
        overlap = config.overlap_grad_reduce and len(self.chunks) == 1
        # Frozen weights report no gradient, and a unit around others comes back behind them: hooks or the end of the
        # microbatch tell that backward is through these.
        frozen = set(self.buffer.frozen)
        told = [one for one in self.units if not (one.lasts or one.nests) and frozen.isdisjoint(one.names)]
        self.driver = UnitDriver(
            self.units,
            self.gathers,
            self.reductions,
            ReductionOrder([unit.keys for unit in self.reductions.units], registered),
            overlap=overlap or self.sharding.main_grads is not ShardOver.NONE,
            numel=numel,
            bound=math.ceil(2 * sum(numel) / max(1, len(numel))) if bound is None else bound,
            last=forward[-1],
            frees=frees,
            passed_by_gradients=frozenset(unit.index for unit in told),
        )
        return self.driver

    # A step ---------------------------------------------------------------------------------------------

    def begin_step(self, num_microbatches: int | None, **how: bool) -> None:
        """As `DistributedDataParallel`'s. num_microbatches: None where the driver is told which is the last."""
        super().begin_step(1 if num_microbatches is None else num_microbatches, **how)
        calls = None if num_microbatches is None else num_microbatches * len(self.chunks)
        self.driver.begin_step(calls, self._policies(num_microbatches or 1))

    def microbatch_done(self, chunk: int, microbatch: int) -> None:
        """A chunk has all its gradients of one microbatch."""
        assert self.is_stepping, f"microbatch {microbatch} done outside of a step: call begin_step() first"
        self.driver.microbatch_done()

    def weights_changed(self) -> None:
        super().weights_changed()
        self.driver.weights_changed()

    @functools.cached_property
    def _facts(self) -> list[UnitFacts]:
        reads, forward = [unit.backward_reads for unit in self.units], self._forward_order
        demands = [*forward, *(unit for unit in reversed(forward) if reads[unit])]
        gathers = Counter(unit for unit, _ in itertools.groupby(demands))
        costs = [unit_costs(unit, self.buffer) for unit in self.units]
        return [
            UnitFacts(cost.weight_bytes, cost.grad_bytes, gathers=1 if unit.lasts else gathers[unit.index])
            for unit, cost in zip(self.units, costs, strict=True)
        ]

    def _policies(self, num_microbatches: int) -> tuple[UnitPolicy, ...]:
        """What each unit keeps in a step of so many microbatches: --fsdp-reshard-policy."""
        return policies(
            self._facts,
            self.config.fsdp_reshard_policy,
            num_microbatches=num_microbatches,
            weights_sharded=self.sharding.weights is not ShardOver.NONE,
            grads_sharded=self.sharding.main_grads is not ShardOver.NONE,
            budget_bytes=self.config.fsdp_memory_budget,
        )


def ranks_of(ps_or_mesh: ParallelState | DeviceMesh | None) -> ParallelState:
    """The ranks that are meant; None: all of the default process group. Communicates over that where a state is made.

    Raises MeshError for a mesh of more than two dims, or without this rank.
    """
    if ps_or_mesh is None:
        return data_parallel_state()
    return parallel_state_of_mesh(ps_or_mesh) if isinstance(ps_or_mesh, DeviceMesh) else ps_or_mesh
