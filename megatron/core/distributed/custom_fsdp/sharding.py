"""What data parallelism's flags mean for a row of the sharding table: dtypes, what must not be, and what plans are
asked for (floor 0, pure)."""

from __future__ import annotations

from megatron.core.distributed.custom_fsdp.data_parallel_config import DistributedDataParallelConfig
from megatron.core.pipeline_parallel.plan.residency import Residency
from megatron.core.sharding_table import Sharding, ShardOver, grads_are_sharded, row_name

# What must not be, beside `sharding_table`'s: rules of the command line, the engine and `fully_shard` with a config of
# its own all ask these, and each says it in its words.


def is_contradicted(config: DistributedDataParallelConfig) -> bool:
    """Whether --use-distributed-optimizer is to shard what the strategy keeps whole."""
    return config.use_distributed_optimizer and config.data_parallel_sharding_strategy == "no_shard"


def debug_in_slots(config: DistributedDataParallelConfig) -> bool:
    """Whether --fsdp-debug looks for views of memory that --fsdp-double-buffer never releases."""
    return (
        config.fsdp_debug
        and config.fsdp_double_buffer
        and grads_are_sharded(config.data_parallel_sharding_strategy)
    )


def budget_misfits(policy: str, budget_bytes: int | None) -> bool:
    """Whether a budget stands without its policy, or the policy without one."""
    return (policy == "budget") != (budget_bytes is not None)


def keeps_nothing(policy: str, *, weights_sharded: bool, grads_sharded: bool) -> bool:
    """Whether the strategy, which shards these, leaves --fsdp-reshard-policy nothing to keep."""
    if policy == "backward":
        return not weights_sharded
    return policy != "memory" and not (weights_sharded or grads_sharded)


def holds_weights(main: str, weights: str) -> bool:
    """Whether main weights of this dtype are no coarser than the model's (fp32, bf16, ...)."""
    return main == weights or (main == "fp32" and weights in ("bf16", "fp16"))


def main_grads_dtype(weights: str, config: DistributedDataParallelConfig) -> str:
    """What gradients are accumulated in, for weights of fp64, fp32, bf16 or fp16: --megatron-fsdp-main-grads-dtype.

    With auto, fp32 and fp64 weights: their own. bf16: fp32 unless --grad-reduce-in-bf16. fp16: fp16 unless
    --accumulate-allreduce-grads-in-fp32.
    """
    if config.megatron_fsdp_main_grads_dtype != "auto":
        return config.megatron_fsdp_main_grads_dtype
    if weights == "bf16":
        return "bf16" if config.grad_reduce_in_bf16 else "fp32"
    if weights == "fp16":
        return "fp32" if config.accumulate_allreduce_grads_in_fp32 else "fp16"
    return weights


def main_params_dtype(weights: str, config: DistributedDataParallelConfig) -> str:
    """What the optimizer updates: --megatron-fsdp-main-params-dtype; with fp32 (default) fp64 models keep theirs."""
    asked = config.megatron_fsdp_main_params_dtype
    return weights if asked == "auto" or (asked, weights) == ("fp32", "fp64") else asked


def residency_of(
    config: DistributedDataParallelConfig,
    sharding: Sharding,
    pipeline_ranks: int,
    *,
    element_bytes: int,
) -> Residency:
    """sharding: the effective row of the table. element_bytes: of a weight."""
    cut = sharding.main_grads is not ShardOver.NONE
    policy = config.fsdp_reshard_policy if cut else "memory"
    budget, unit_size = config.fsdp_memory_budget, config.suggested_communication_unit_size
    return Residency(
        strategy=row_name(sharding),
        policy=policy,
        budget=(budget or 0,) * pipeline_ranks if policy == "budget" else None,
        ahead=0 if unit_size is None else max(1, unit_size * element_bytes),
        overlap_gather=cut or config.overlap_param_gather,
        overlap_reduce=cut or config.overlap_grad_reduce,
    )
