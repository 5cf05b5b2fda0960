"""How large the states of a run are, by its flags: what units are planned with before a model is built (floor 0)."""

from __future__ import annotations

from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.shard_layout import ALIGNMENT, bucket_size_of
from megatron.core.distributed.sharding import Cut, Sharding, ShardPlace, main_grads_dtype
from megatron.core.pipeline_parallel.plan.units import StateBytes

_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
_MOMENTS = 2


def state_bytes(
    config: DistributedDataParallelConfig, sharding: Sharding, place: ShardPlace, dtype: str
) -> StateBytes:
    """dtype: of the model's weights, as flags have it (bf16, ...). Moments of AdamW in fp32 are counted."""
    accumulated = main_grads_dtype(
        dtype,
        config.megatron_fsdp_main_grads_dtype,
        grad_reduce_in_bf16=config.grad_reduce_in_bf16,
        accumulate_in_fp32=config.accumulate_allreduce_grads_in_fp32,
    )
    wire, asked = config.megatron_fsdp_grad_comm_dtype, config.megatron_fsdp_main_params_dtype
    main = dtype if asked == "auto" or (asked == "fp32" and dtype == "fp64") else asked
    weight, grad = _BYTES[dtype], _BYTES[accumulated]
    moment = max(4, _BYTES[main])
    own = _BYTES[main] if main != dtype else 0
    whole = sharding.main_grads is Cut.WHOLE
    scattered = sharding.optimizer is Cut.FULL and place.outer_size > 1
    return StateBytes(
        align=ALIGNMENT * place.dp_size,
        weight=weight,
        grad=grad if wire == "auto" else _BYTES[wire],
        at_rest=(
            (weight, place.ways(sharding.weights)),
            (grad, place.ways(sharding.main_grads)),
            (own + _MOMENTS * moment, place.ways(sharding.optimizer)),
        ),
        inner=place.inner_size,
        outer_grad=grad,
        outer_weight=weight if scattered else 0,
        bucket_size=bucket_size_of(0, place.dp_size, config.ddp_bucket_size) if whole else None,
    )
