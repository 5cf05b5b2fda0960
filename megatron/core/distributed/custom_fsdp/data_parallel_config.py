"""What of weights, gradients and optimizer state is sharded, and how it travels between ranks (floor 0)."""

import dataclasses
from typing import Annotated, Literal

from megatron.core.config_base import Bounds, Bytes, Ranks, arg
from megatron.core.sharding_table import STRATEGIES


@dataclasses.dataclass(frozen=True)
class DistributedDataParallelConfig:
    """One row of the sharding table and how its collectives run."""

    use_custom_fsdp: bool = arg(
        False, "shard by units of the model", flags=("--use-custom-fsdp", "--use-megatron-fsdp")
    )
    data_parallel_sharding_strategy: Literal[(*STRATEGIES, "auto")] = arg(  # type: ignore[valid-type]
        "no_shard", "what each data parallel rank holds a shard of; auto: as --rank-memory-limit has it"
    )
    outer_dp_sharding_strategy: Literal["no_shard", "optim"] = arg(
        "no_shard", "what is sharded over distributed optimizer instances besides"
    )
    enable_full_sharding_in_hsdp: bool = arg(False, "the same as --outer-dp-sharding-strategy optim")
    use_distributed_optimizer: bool = arg(
        False, "shard the optimizer state over data parallel ranks (ZeRO-1)"
    )
    num_distributed_optimizer_instances: Ranks = arg(
        1,
        "divide the data parallel ranks into so many instances, each with the whole sharded state",
        unit="instances",
    )
    fsdp_unit_modules: tuple[str, ...] | None = arg(
        None,
        "classes of modules that are gathered and reduced as one unit each, for models that do not name their units",
    )
    suggested_communication_unit_size: Annotated[int, Bounds(0, 2**60)] | None = arg(
        None,
        "gather ahead as long as no more than this is gathered at any time, the unit in use included",
        unit="elements",
        derived="2 x the mean unit",
    )
    fsdp_double_buffer: bool = arg(
        False,
        "gather into two lasting slots a role, sized by the largest units, instead of memory allocated each time; with "
        "one pipeline stage",
        flags=("--fsdp-double-buffer", "--megatron-fsdp-max-pool-double-buffer"),
    )
    fsdp_reshard_policy: Literal["memory", "backward", "step", "budget"] = arg(
        "memory",
        "how long units stay gathered and unreduced: as short as possible, from forward to backward (with one pipeline "
        "stage), for a whole step, or what moves the fewest bytes within --fsdp-memory-budget",
        ours=True,
    )
    fsdp_memory_budget: Annotated[int, Bounds(0, 2**60)] | None = arg(
        None,
        "what the units of a rank may keep gathered or unreduced beyond what the policy memory does",
        unit="bytes",
        ours=True,
    )
    log_fsdp_ledger: bool = arg(False, "log what the engine holds, by category and unit", ours=True)
    fsdp_debug: bool = arg(False, "find views of gathered weights that outlive them (slow)", ours=True)
    overlap_grad_reduce: bool = arg(
        False, "reduce buckets of gradients during the last backward, instead of after it"
    )
    overlap_param_gather: bool = arg(False, "gather sharded weights during the forward")
    ddp_bucket_size: Bytes | None = arg(
        None, "size of one bucket of gradients", unit="elements", derived="max(40 million, 1 million x DP)"
    )
    ddp_num_buckets: int | None = arg(None, "number of buckets, instead of their size")
    ddp_average_in_collective: bool = arg(
        False,
        "contributions are divided by the number of ranks as they are added, instead of their sum afterwards",
    )
    accumulate_allreduce_grads_in_fp32: bool = arg(
        False, "accumulate and reduce gradients in fp32 (always so with --bf16, unless --grad-reduce-in-bf16)"
    )
    grad_reduce_in_bf16: bool = arg(False, "accumulate and reduce gradients in bf16")
    megatron_fsdp_main_params_dtype: Literal["fp32", "bf16", "fp16", "auto"] = arg(
        "fp32", "of the weights that the optimizer updates; auto: the model's"
    )
    megatron_fsdp_main_grads_dtype: Literal["fp32", "bf16", "fp16", "auto"] = arg(
        "auto", "what gradients are accumulated in; auto: fp32 for bf16 weights, else theirs"
    )
    megatron_fsdp_grad_comm_dtype: Literal["fp32", "bf16", "fp16", "auto"] = arg(
        "auto", "what gradients travel in; auto: what they are accumulated in"
    )
    check_weight_hash_across_dp_replicas_interval: int | None = arg(
        None, "compare weights between replicas every so many iterations", unit="iterations"
    )
