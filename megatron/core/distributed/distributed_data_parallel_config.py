"""How gradients (later also weights) travel between data parallel ranks (floor 0)."""

import dataclasses
from typing import Literal

from megatron.core.config_base import arg


@dataclasses.dataclass(frozen=True)
class DistributedDataParallelConfig:
    """One row of the sharding table and how its collectives run."""

    data_parallel_sharding_strategy: Literal["no_shard", "optim", "optim_grads", "optim_grads_params"] = arg(
        "no_shard", "what each data parallel rank holds a shard of"
    )
    use_distributed_optimizer: bool = arg(
        False, "shard the optimizer state over data parallel ranks (ZeRO-1)"
    )
    num_distributed_optimizer_instances: int = arg(
        1,
        "divide the data parallel ranks into so many instances, each with the whole sharded optimizer state; as long "
        "as no state is sharded, only the process groups are made",
        unit="instances",
    )
    overlap_grad_reduce: bool = arg(
        False, "reduce buckets of gradients during the last backward, instead of after it"
    )
    overlap_param_gather: bool = arg(False, "gather sharded weights during the forward")
    ddp_bucket_size: int | None = arg(
        None, "size of one bucket of gradients", unit="elements", derived="max(40 million, 1 million x DP)"
    )
    ddp_num_buckets: int | None = arg(None, "number of buckets, instead of their size")
    ddp_average_in_collective: bool = arg(False, "the collective averages, instead of a division afterwards")
    accumulate_allreduce_grads_in_fp32: bool = arg(
        False, "accumulate and reduce gradients in fp32 (always so with --bf16, unless --grad-reduce-in-bf16)"
    )
    grad_reduce_in_bf16: bool = arg(False, "accumulate and reduce gradients in bf16")
    check_weight_hash_across_dp_replicas_interval: int | None = arg(
        None, "compare weights between replicas every so many iterations", unit="iterations"
    )
