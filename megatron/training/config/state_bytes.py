"""What states of a run take by its flags, before a model is built, and what one limit in bytes is chosen under
(floor 0)."""

from __future__ import annotations

import dataclasses

from megatron.core.distributed.custom_fsdp.data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.custom_fsdp.shard_layout import ALIGNMENT, bucket_size_of
from megatron.core.distributed.custom_fsdp.sharding import main_grads_dtype, main_params_dtype, residency_of
from megatron.core.parallelism_config import ModelParallelConfig
from megatron.core.pipeline_parallel.plan.held.state_bytes import RankBudget, StateBytes
from megatron.core.sharding_table import EXPERT_GROUPS, Sharding, ShardOver, ShardPlace, sharding_of

DTYPE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}  # as flags have them
_MOMENTS = 2
_TO_CHOOSE = ("optim", "optim_grads", "optim_grads_params")
# By backend, where no flag says so: TFLOP/s of a rank, and GB/s to its data parallel peers. An H100 computing in bf16
# and a 400 Gb/s port of its own; one core, and ranks of one host.
SPEEDS = {"nccl": (450.0, 45.0), "gloo": (0.05, 1.0)}


def state_bytes(
    config: DistributedDataParallelConfig,
    sharding: Sharding,
    place: ShardPlace,
    dtype: str,
    *,
    copies: bool = False,
    experts: ShardPlace | None = None,
) -> StateBytes:
    """sharding: of the table. dtype: of the model's weights, as flags have it (bf16, ...). AdamW's moments are counted,
    in the dtype of main weights. copies: of both, that a step is taken back by. experts: place of experts with a grid
    of their own."""
    wire, main_dtype = config.megatron_fsdp_grad_comm_dtype, main_params_dtype(dtype, config)
    main, main_grad = DTYPE_BYTES[main_dtype], DTYPE_BYTES[main_grads_dtype(dtype, config)]
    row = sharding.at(place)
    of_experts = None if experts is None else sharding.of_experts(experts)
    joined = row if of_experts is None else row.joined(of_experts)
    whole = joined.main_grads is ShardOver.NONE
    sizes = StateBytes(
        row,
        place,
        align=ALIGNMENT * place.dp_size,
        weight=DTYPE_BYTES[dtype],
        grad=main_grad if wire == "auto" else DTYPE_BYTES[wire],
        main_grad=main_grad,
        main_weight=main if main_dtype != dtype else 0,
        optimizer=main * (_MOMENTS + copies * (1 + _MOMENTS)),
        bucket_size=bucket_size_of(0, place.dp_size, config.ddp_bucket_size) if whole else None,
        num_buckets=config.ddp_num_buckets if whole else None,
    )
    if experts is None or of_experts is None:
        return sizes
    align = ALIGNMENT * experts.dp_size
    apart = dataclasses.replace(sizes, sharding=of_experts, place=experts, align=align, groups=EXPERT_GROUPS)
    return dataclasses.replace(sizes, experts=apart)


def rank_budget(
    parallel: ModelParallelConfig,
    ddp: DistributedDataParallelConfig,
    place: ShardPlace,
    dtype: str,
    experts: ShardPlace | None = None,
) -> RankBudget | None:
    """What --rank-memory-limit is chosen under; None without it, or while it is the device's. dtype: of weights.
    experts: as in `state_bytes`."""
    limit, tflops, speed = (
        parallel.rank_memory_limit,
        parallel.achieved_tflops,
        parallel.dp_bandwidth_gb_per_s,
    )
    if not isinstance(limit, int) or tflops is None or speed is None:
        return None
    asked = ddp.data_parallel_sharding_strategy
    ranks, rows = parallel.pipeline_model_parallel_size, []
    for strategy in _TO_CHOOSE if asked == "auto" else (asked,):
        config = dataclasses.replace(ddp, data_parallel_sharding_strategy=strategy)
        outer = ddp.outer_dp_sharding_strategy if strategy == "optim_grads_params" else "no_shard"
        row = sharding_of(strategy, outer)
        residency = residency_of(config, row, ranks, element_bytes=DTYPE_BYTES[dtype])
        sizes = state_bytes(config, row, place, dtype, copies=parallel.keeps_copies, experts=experts)
        rows.append((residency.within((float(limit),) * ranks), sizes))
    return RankBudget(tuple(rows), tflops * 1e12, speed * 1e9)
