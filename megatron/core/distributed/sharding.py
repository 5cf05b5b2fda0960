"""What each data parallel rank holds of weights, gradients and optimizer state between steps, and what plans are asked
for by it (floor 0, pure).

Ranks are inner x outer: the inner ranks share one copy of everything that is sharded, the outer ones (distributed
optimizer instances) repeat it. With one instance all data parallel ranks are inner.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType

from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.pipeline_parallel.plan.residency import Residency


class ShardOver(Enum):
    """Over which ranks a buffer is sharded."""

    NONE = "none"  # each rank has all of it
    INNER = "inner"  # over the inner ranks; the same on all outer ones
    FULL = "full"  # over inner x outer ranks


@dataclasses.dataclass(frozen=True)
class Sharding:
    """One row of the table. optimizer: main weights and moments."""

    weights: ShardOver
    main_grads: ShardOver
    optimizer: ShardOver

    def at(self, place: ShardPlace) -> Sharding:
        """The same row where cuts into a single part are called what they are: whole."""
        cuts = (self.weights, self.main_grads, self.optimizer)
        return Sharding(*(ShardOver.NONE if place.ways(cut) == 1 else cut for cut in cuts))

    def gathers_from_main(self, place: ShardPlace) -> bool:
        """Whether gathers round main weights, where these have another dtype, so that nothing else rests: weights and
        optimizer are cut into the same parts, more than one."""
        return 1 < place.ways(self.weights) == place.ways(self.optimizer)


STRATEGIES: Mapping[str, Sharding] = MappingProxyType(
    {
        "no_shard": Sharding(ShardOver.NONE, ShardOver.NONE, ShardOver.NONE),
        "optim": Sharding(ShardOver.NONE, ShardOver.NONE, ShardOver.INNER),  # ZeRO-1
        "optim_grads": Sharding(ShardOver.NONE, ShardOver.INNER, ShardOver.INNER),  # ZeRO-2
        "optim_grads_params": Sharding(ShardOver.INNER, ShardOver.INNER, ShardOver.INNER),  # ZeRO-3
    }
)


def sharding_of(strategy: str, outer: str = "no_shard") -> Sharding:
    """The row of --data-parallel-sharding-strategy; of auto, while nothing is chosen, the one that cuts everything.
    outer: --outer-dp-sharding-strategy.

    Raises ValueError where the two do not go together.
    """
    row = STRATEGIES["optim_grads_params" if strategy == "auto" else strategy]
    if outer == "no_shard":
        return row
    if not goes_with_outer(strategy, outer):
        raise ValueError(
            f"--outer-dp-sharding-strategy {outer} with --data-parallel-sharding-strategy {strategy}: the optimizer is "
            "cut over instances only with optim_grads_params; use that, or leave the outer strategy out"
        )
    return dataclasses.replace(row, optimizer=ShardOver.FULL)


def weights_are_sharded(strategy: str) -> bool:
    """Whether weights are sharded at rest: ZeRO-3."""
    return sharding_of(strategy).weights is not ShardOver.NONE


def grads_are_sharded(strategy: str) -> bool:
    """Whether main gradients are sharded at rest: ZeRO-2 and ZeRO-3."""
    return sharding_of(strategy).main_grads is not ShardOver.NONE


# What must not be. Rules of the command line, the engine and `fully_shard` with a config of its own all ask these, and
# each says it in its words.


def goes_with_outer(strategy: str, outer: str) -> bool:
    """Whether --outer-dp-sharding-strategy has a sharded model to cut the optimizer of."""
    return outer == "no_shard" or weights_are_sharded(strategy)


def outer_cut_of_nothing(outer: str, place: ShardPlace) -> bool:
    """Whether instances of one rank each have nothing that the optimizer could be cut over besides."""
    return outer != "no_shard" and place.inner_size == 1 < place.outer_size


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


@dataclasses.dataclass(frozen=True)
class ShardPlace:
    """Where a rank stands among those that share the work."""

    inner_rank: int = 0
    inner_size: int = 1
    outer_rank: int = 0
    outer_size: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.inner_rank < self.inner_size, self
        assert 0 <= self.outer_rank < self.outer_size, self

    @property
    def dp_size(self) -> int:
        return self.inner_size * self.outer_size

    def ways(self, cut: ShardOver) -> int:
        """Into how many equal parts a buffer is sharded."""
        if cut is ShardOver.NONE:
            return 1
        return self.inner_size if cut is ShardOver.INNER else self.dp_size

    def index(self, cut: ShardOver) -> int:
        """Which of these parts this rank holds: outer parts lie inside the inner ones."""
        if cut is ShardOver.NONE:
            return 0
        if cut is ShardOver.INNER:
            return self.inner_rank
        return self.inner_rank * self.outer_size + self.outer_rank


def residency_of(
    config: DistributedDataParallelConfig,
    sharding: Sharding,
    place: ShardPlace,
    pipeline_ranks: int,
    *,
    element_bytes: int,
) -> Residency:
    """sharding: the effective row of the table. element_bytes: of a weight."""
    cut = sharding.main_grads is not ShardOver.NONE
    strategy = "optim_grads_params" if sharding.weights is not ShardOver.NONE else "optim_grads"
    if not cut:
        strategy = "no_shard" if sharding.optimizer is ShardOver.NONE else "optim"
    policy = config.fsdp_reshard_policy if cut else "memory"
    budget, unit_size = config.fsdp_memory_budget, config.suggested_communication_unit_size
    return Residency(
        strategy=strategy,
        ways=place.inner_size,
        outer=place.outer_size,
        outer_optimizer=sharding.optimizer is ShardOver.FULL and place.outer_size > 1,
        policy=policy,
        budget=(budget or 0,) * pipeline_ranks if policy == "budget" else None,
        ahead=0 if unit_size is None else max(1, unit_size * element_bytes),
        overlap_gather=cut or config.overlap_param_gather,
        overlap_reduce=cut or config.overlap_grad_reduce,
    )
