"""Fully sharded data parallelism for loops without a plan: the engine, and hooks that say what it does when.

The steps are those of `DistributedDataParallel`, with `microbatch_done` behind each backward. Weights are gathered unit
by unit as forward and backward come to them; gradients are reduced unit by unit as backward leaves them. Source of the
rows: ZeRO (Rajbhandari et al. 2020).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron.core.distributed.custom_fsdp.data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.custom_fsdp.stage_units import find_units_of
from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.distributed.sharded_module.unit_driver import UnitDriver
from megatron.core.module import ModelChunks, ModelError
from megatron.core.sharding_table import ShardOver
from megatron.core.transport.mesh import data_parallel_state, parallel_state_of_mesh
from megatron.core.transport.parallel_state import ParallelState
from megatron.core.units import UnitModule, declared_units, derive_units


class FullyShardedDataParallel(DistributedDataParallel):
    """`DistributedDataParallel` by units, for every `--data-parallel-sharding-strategy`, over any `nn.Module`.

    ps_or_mesh: the ranks; a mesh has one dim, or two: (instances, ranks of an instance). fsdp_unit_modules: for models
    that do not say their units themselves (`MegatronModule`), the classes of their modules that are one unit each, or
    tuples of names of modules that are one together; those of the config if not given. What is in none of them forms
    units of its own (`units.py`). A unit is a bucket in every row: the config's sizes of buckets have no effect.

    Communicates over dp_gather in forward and backward, over dp_reduce in backward, over dp_outer once a step.

    Raises ModelError where units do not fit the model, where gradients are sharded and the model is in several chunks,
    or where the config asks for what a plan decides; MeshError for a mesh of more dims.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module] | nn.Module,
        ps_or_mesh: ParallelState | DeviceMesh,
        config: DistributedDataParallelConfig,
        *,
        fsdp_unit_modules: Sequence[UnitModule] | None = None,
    ) -> None:
        refuse_plans(config)
        modules = (chunks,) if isinstance(chunks, nn.Module) else tuple(chunks)
        words = config.fsdp_unit_modules if fsdp_unit_modules is None else fsdp_unit_modules
        declared = declared_units(modules) or derive_units(modules, words or ())
        units = find_units_of(ModelChunks(modules), declared, ())
        self.driver = UnitDriver()
        super().__init__(modules, ranks_of(ps_or_mesh), config, units=units, listener=self.driver)
        if self.sharding.main_grads is not ShardOver.NONE and len(modules) > 1:
            raise ModelError(
                f"--data-parallel-sharding-strategy {config.data_parallel_sharding_strategy}: a rank with "
                f"{len(modules)} model chunks shards no more than its optimizer: use optim"
            )
        self.driver.attach(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The forward of the only chunk."""
        assert len(self.chunks) == 1, f"one of {len(self.chunks)} chunks is meant: call ddp.chunks[i]"
        return self.chunks[0](*args, **kwargs)

    def begin_step(self, num_microbatches: int | None, **how: bool) -> None:
        """As `DistributedDataParallel`'s. num_microbatches: None where the driver is told which is the last."""
        super().begin_step(1 if num_microbatches is None else num_microbatches, **how)
        self.driver.begin_step(None if num_microbatches is None else num_microbatches * len(self.chunks))

    def microbatch_done(self, chunk: int, microbatch: int) -> None:
        """A chunk has all its gradients of one microbatch."""
        assert self.is_stepping, f"microbatch {microbatch} done outside of a step: call begin_step() first"
        self.driver.end_microbatch()

    def weights_changed(self) -> None:
        self.driver.free_all()
        super().weights_changed()


# What only a trainer's plan decides: fields of a config, and the values that they may have without one.
_WITHOUT_A_PLAN: dict[str, tuple[object, ...]] = {
    "fsdp_double_buffer": (False,),
    "fsdp_memory_budget": (None,),
    "fsdp_reshard_policy": ("memory", "step"),
}


def refuse_plans(config: DistributedDataParallelConfig) -> None:
    """Raises ModelError for what only a trainer's plan decides."""
    for field, values in _WITHOUT_A_PLAN.items():
        if getattr(config, field) not in values:
            raise ModelError(
                f"{field}={getattr(config, field)!r}: a loop without a plan can have {' or '.join(map(repr, values))}; "
                "use that, or pretrain() with --use-custom-fsdp"
            )


def ranks_of(ps_or_mesh: ParallelState | DeviceMesh | None) -> ParallelState:
    """The ranks that are meant; None: all of the default process group. The same for the same ranks, so that one call
    for each layer makes communicators once. Communicates over the default group where a state is made.

    Raises MeshError for a mesh of more than two dims, or without this rank.
    """
    if isinstance(ps_or_mesh, ParallelState):
        return ps_or_mesh
    return _ranks_within(ps_or_mesh, dist.group.WORLD if dist.is_initialized() else None)


@functools.lru_cache(maxsize=4)
def _ranks_within(mesh: DeviceMesh | None, world: object) -> ParallelState:
    return data_parallel_state() if mesh is None else parallel_state_of_mesh(mesh)
