"""A `DistributedDataParallelConfig` given without the trainer, whose flags nobody has resolved."""

from __future__ import annotations

import dataclasses

from megatron.core.distributed.data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.sharding import is_contradicted
from megatron.core.module import ModelError
from megatron.core.sharding_table import STRATEGIES, goes_with_outer, grads_are_sharded

# Fields that act only where gradients are sharded -> their value where nobody has set them.
OF_SHARDED_GRADIENTS: dict[str, object] = {
    "fsdp_double_buffer": False,
    "fsdp_reshard_policy": "memory",
    "fsdp_memory_budget": None,
    "suggested_communication_unit_size": None,
    "fsdp_debug": False,
    "megatron_fsdp_grad_comm_dtype": "auto",
}
SHARDED_GRADIENTS = tuple(filter(grads_are_sharded, STRATEGIES))


def resolve_standalone(
    config: DistributedDataParallelConfig | None, *, instances: int
) -> DistributedDataParallelConfig:
    """What a config means for these ranks: optim_grads_params where none is given. instances: of the ranks.

    Raises ModelError where a field is set that the strategy or the ranks leave without effect.
    """
    config = config or DistributedDataParallelConfig(data_parallel_sharding_strategy="optim_grads_params")
    strategy, told = config.data_parallel_sharding_strategy, config.num_distributed_optimizer_instances
    idle = [field for field, unset in OF_SHARDED_GRADIENTS.items() if getattr(config, field) != unset]
    if idle and strategy not in SHARDED_GRADIENTS:
        raise ModelError(
            f"{', '.join(idle)}: no effect with data_parallel_sharding_strategy={strategy!r}, which cuts no gradients; "
            f"set the strategy to one of {list(SHARDED_GRADIENTS)}, or leave {'it' if len(idle) == 1 else 'them'} out"
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
