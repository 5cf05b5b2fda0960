"""A `DistributedDataParallelConfig` given without the trainer, whose flags nobody has resolved."""

from __future__ import annotations

import dataclasses

from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.sharding import STRATEGIES, goes_with_outer, grads_are_cut, is_contradicted
from megatron.core.module import ModelError

# Fields that act only where gradients are cut -> their value where nobody has set them.
OF_CUT_GRADIENTS: dict[str, object] = {
    "fsdp_double_buffer": False,
    "fsdp_reshard_policy": "memory",
    "fsdp_memory_budget": None,
    "suggested_communication_unit_size": None,
    "fsdp_debug": False,
    "megatron_fsdp_grad_comm_dtype": "auto",
}
CUT_GRADIENTS = tuple(filter(grads_are_cut, STRATEGIES))


def resolve_standalone(
    config: DistributedDataParallelConfig | None, *, instances: int
) -> DistributedDataParallelConfig:
    """What a config means for these ranks: optim_grads_params where none is given. instances: of the ranks.

    Raises ModelError where a field is set that the strategy or the ranks leave without effect.
    """
    if config is None:
        return DistributedDataParallelConfig(
            data_parallel_sharding_strategy="optim_grads_params",
            num_distributed_optimizer_instances=instances,
        )
    strategy, told = config.data_parallel_sharding_strategy, config.num_distributed_optimizer_instances
    if strategy not in CUT_GRADIENTS:
        idle = [field for field, unset in OF_CUT_GRADIENTS.items() if getattr(config, field) != unset]
        if idle:
            raise ModelError(
                f"{', '.join(idle)}: no effect with data_parallel_sharding_strategy={strategy!r}, which cuts no "
                f"gradients; set the strategy to one of {list(CUT_GRADIENTS)}, or leave {_them(idle)} out"
            )
    if is_contradicted(config):
        raise ModelError(
            "use_distributed_optimizer: data_parallel_sharding_strategy='no_shard' (its default) does not shard the "
            "optimizer; set the strategy to 'optim', 'optim_grads' or 'optim_grads_params'"
        )
    if told not in (1, instances):
        raise ModelError(
            f"num_distributed_optimizer_instances={told}: the ranks given have {instances} "
            f"instance{'s' * (instances != 1)}; pass a mesh of shape ({told}, ranks of an instance), or leave it out"
        )
    outer = "optim" if config.enable_full_sharding_in_hsdp else config.outer_dp_sharding_strategy
    if not goes_with_outer(strategy, outer):
        raise ModelError(
            f"outer_dp_sharding_strategy={outer!r} with data_parallel_sharding_strategy={strategy!r}: the optimizer is "
            "cut over instances only with 'optim_grads_params'; set that, or leave the outer strategy out"
        )
    return dataclasses.replace(
        config, outer_dp_sharding_strategy=outer, num_distributed_optimizer_instances=instances
    )


def _them(fields: list[str]) -> str:
    return "it" if len(fields) == 1 else "them"
