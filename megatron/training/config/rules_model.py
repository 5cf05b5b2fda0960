"""Rules on the model's shape, on how tensor parallel ranks cut it, and on what data parallel ranks shard (floor 0)."""

from __future__ import annotations

from megatron.core import sharding_table
from megatron.core.distributed import sharding
from megatron.core.distributed.custom_fsdp.reshard_policy import budget_misfits, keeps_nothing
from megatron.core.optional import available
from megatron.core.transformer.transformer_config import ACTIVATIONS
from megatron.core.transport.rank_grid import RankGridError, check_instances
from megatron.training.config.resolve import known_vocabulary
from megatron.training.config.rule_table import Predicate, RuleContext, exclusive, refusal, spelled


def _rotary(c: RuleContext) -> str | None:
    percent, head = c.rotary_percent, c.kv_channels
    if c.position_embedding_type != "rope" or head is None:
        return None
    if not 0 < percent <= 1:
        return f"--rotary-percent {percent}: must be above 0 and at most 1"
    rotated = int(head * percent)
    return f"{rotated} of {head} head dimensions would be rotated" if rotated < 2 or rotated % 2 else None


def _transformer_engine(c: RuleContext) -> str | None:
    if c.transformer_impl != "transformer_engine" or c.check_only:
        return None
    here = available("transformer_engine")
    why = (
        "layers on Transformer Engine are not supported yet"
        if here
        else "Transformer Engine is not installed here"
    )
    return f"--transformer-impl transformer_engine: {why}"


def _recompute(c: RuleContext) -> str | None:
    if c.recompute_granularity != "full":
        return None
    if c.recompute_activations:
        return "--recompute-activations (selective) contradicts --recompute-granularity full"
    if c.known("recompute_method", "recompute_num_layers"):
        return None
    return "--recompute-granularity full needs --recompute-method and --recompute-num-layers"


def _recompute_modules(c: RuleContext) -> str | None:
    if c.recompute_granularity != "selective":
        return None  # without effect: a warning
    others = [name for name in c.recompute_modules if name != "core_attn"]
    return f"--recompute-modules {' '.join(others)}: only core_attn is supported" if others else None


def _heads_tensor_parallel(c: RuleContext) -> str | None:
    heads, groups, tp = c.num_attention_heads, c.num_query_groups, c.tensor_model_parallel_size
    if not heads or not groups or groups < 1 or tp < 1:
        return None
    if heads % tp:
        return c.undivided("num_attention_heads", "tensor_model_parallel_size")
    apart = groups % tp and tp % groups
    return (
        f"--num-query-groups {groups} and {c.told('tensor_model_parallel_size')} do not divide each other"
        if apart
        else None
    )


def _vocabulary(c: RuleContext) -> str | None:
    padded, tp = c.padded_vocab_size, c.tensor_model_parallel_size
    known = known_vocabulary(c.tokenizer_type, c.vocab_size) or c.vocab_size
    if padded is None or tp < 1:
        return None
    saved = c.config.origin.get("padded_vocab_size") == "checkpoint"
    told = f"the checkpoint's padded vocabulary of {padded}" if saved else f"--padded-vocab-size {padded}"
    if padded % tp:
        return f"{told} is not divisible by --tensor-model-parallel-size {tp}"
    less = known is not None and padded < known
    return f"{told} is smaller than the tokenizer's vocabulary of {known}" if less else None


def _sequence_tensor_parallel(c: RuleContext) -> str | None:
    ranks = c.tensor_model_parallel_size * c.context_parallel_size
    if not c.sequence_parallel or c.seq_length is None or ranks < 1 or c.seq_length % ranks == 0:
        return None
    return f"--seq-length {c.seq_length} does not divide into {ranks} parts for --sequence-parallel"


# What data parallel ranks shard


def _shards(c: RuleContext) -> tuple[bool, bool]:
    """Whether the strategy shards weights (ZeRO-3) and gradients (ZeRO-2 and 3)."""
    strategy = c.data_parallel_sharding_strategy
    return sharding_table.weights_are_sharded(strategy), sharding_table.grads_are_sharded(strategy)


def _instances(c: RuleContext) -> str | None:
    instances = c.num_distributed_optimizer_instances
    if instances < 1 or refusal(c.config.grid, RankGridError):
        return None  # has a rule of its own
    return refusal(lambda: check_instances(c.config.grid(), instances), RankGridError)


def _sharding_strategy(c: RuleContext) -> str | None:
    strategy, told = c.data_parallel_sharding_strategy, c.told("data_parallel_sharding_strategy")
    if c.use_custom_fsdp or not c.given("data_parallel_sharding_strategy"):
        return None
    if sharding.is_contradicted(c.config.ddp):
        return f"{told} contradicts --use-distributed-optimizer, which shards the optimizer state"
    if strategy == ("optim" if c.use_distributed_optimizer else "no_shard"):
        return None
    if c.use_distributed_optimizer:
        return f"{told} needs --use-custom-fsdp: --use-distributed-optimizer shards the optimizer state only"
    return f"{told} without --use-custom-fsdp or --use-distributed-optimizer: nothing would be sharded"


def _outer_sharding(c: RuleContext) -> str | None:
    full, outer = c.enable_full_sharding_in_hsdp, c.outer_dp_sharding_strategy
    if full and c.given("outer_dp_sharding_strategy") and outer == "no_shard":
        return "--outer-dp-sharding-strategy no_shard contradicts --enable-full-sharding-in-hsdp"
    if sharding_table.goes_with_outer(c.data_parallel_sharding_strategy, outer):
        return None
    flag = "--enable-full-sharding-in-hsdp" if full else c.told("outer_dp_sharding_strategy")
    inner = c.told("data_parallel_sharding_strategy")
    return f"{flag} with {inner}: the optimizer is cut over instances only with optim_grads_params"


def _outer_instances(c: RuleContext) -> str | None:
    place = c.config.shard_place
    if place is None or not sharding_table.outer_cut_of_nothing(c.outer_dp_sharding_strategy, place):
        return None
    told = c.told("num_distributed_optimizer_instances")
    return f"{told} of one rank each: --outer-dp-sharding-strategy optim needs shards inside of them"


def _reshard_policy(c: RuleContext) -> str | None:
    policy, strategy = c.fsdp_reshard_policy, c.told("data_parallel_sharding_strategy")
    weights, grads = _shards(c)
    if not c.use_custom_fsdp or not keeps_nothing(policy, weights_sharded=weights, grads_sharded=grads):
        return None  # without --use-custom-fsdp a rule of its own tells
    backward = policy == "backward"
    why = (
        "weights are not sharded, so none are gathered"
        if backward
        else "what moves once a step need not be kept"
    )
    return f"--fsdp-reshard-policy {policy} with {strategy}: {why}"


def _memory_budget(c: RuleContext) -> str | None:
    policy, budget = c.fsdp_reshard_policy, c.fsdp_memory_budget
    if not budget_misfits(policy, budget):
        return None
    if budget is None:
        return "--fsdp-reshard-policy budget needs --fsdp-memory-budget"
    return f"--fsdp-memory-budget {budget} does nothing under --fsdp-reshard-policy {policy}"


def _gathers_without_effect(c: RuleContext) -> str | None:
    """What is gathered or reduced otherwise than by default, which takes somebody to share with."""
    lane = (
        "fsdp_reshard_policy fsdp_memory_budget suggested_communication_unit_size fsdp_double_buffer".split()
    )
    given, place = c.differing(lane), c.config.shard_place
    if _shards(c)[1]:
        if not c.use_custom_fsdp or place is None or place.inner_size != 1:
            return None  # the strategy alone has a rule of its own, and so have ranks that do not divide
        why = "one data parallel rank has nobody to share states with"
    elif c.use_custom_fsdp:
        given = [name for name in given if name not in ("fsdp_reshard_policy", "fsdp_memory_budget")]
        why = f"with {c.told('data_parallel_sharding_strategy')} weights and gradients stay whole"
    else:
        why = "without --use-custom-fsdp weights and gradients stay whole"
    return f"{', '.join(map(spelled, given))}: {why}" if given else None


def _weight_hash(c: RuleContext) -> bool:
    asked = c.known("check_weight_hash_across_dp_replicas_interval")
    return asked and _shards(c)[0] and c.num_distributed_optimizer_instances <= 1


def _main_params_dtype(c: RuleContext) -> str | None:
    asked, weights = c.megatron_fsdp_main_params_dtype, c.config.params_flag
    if asked == "auto" or sharding.holds_weights(asked, weights):
        return None
    return f"{c.told('megatron_fsdp_main_params_dtype')} cannot hold the model's {weights} weights"


def _main_grads_dtype(c: RuleContext) -> str | None:
    asked, in_fp32 = c.megatron_fsdp_main_grads_dtype, "accumulate_allreduce_grads_in_fp32"
    told = f"{c.told('megatron_fsdp_main_grads_dtype')} contradicts"
    if c.grad_reduce_in_bf16 and asked not in ("auto", "bf16"):
        return f"{told} --grad-reduce-in-bf16"
    asked_fp32 = c.given(in_fp32) and getattr(c, in_fp32)
    return f"{told} {spelled(in_fp32)}" if asked_fp32 and asked in ("bf16", "fp16") else None


def _grad_comm_dtype(c: RuleContext) -> str | None:
    accumulated = sharding.main_grads_dtype(c.config.params_flag, c.config.ddp)
    if c.megatron_fsdp_grad_comm_dtype in ("auto", accumulated) or _shards(c)[1]:
        return None
    told = f"{c.told('megatron_fsdp_grad_comm_dtype')} with {c.told('data_parallel_sharding_strategy')}"
    return f"{told}: gradients are summed where they are accumulated, in {accumulated}"


BROKEN: dict[str, Predicate] = {
    "heads": lambda c: None if c.given("kv_channels") else c.undivided("hidden_size", "num_attention_heads"),
    "query-groups": lambda c: c.undivided("num_attention_heads", "num_query_groups"),
    "positions": lambda c: (
        c.known("max_position_embeddings", "seq_length") and c.max_position_embeddings < c.seq_length
    ),
    "rotary": _rotary,
    "position-embedding-type": lambda c: (
        c.use_rotary_position_embeddings and c.position_embedding_type != "rope"
    ),
    "no-position-embedding": lambda c: (
        c.position_embedding_type == "learned_absolute"
        and any(used.entry.name == "no_position_embedding" for used in c.used)
    ),
    "activation": lambda c: exclusive(spelled(name) for name in ACTIVATIONS if getattr(c, name)),
    "attention-backend": lambda c: c.use_flash_attn and c.attention_backend not in ("flash", "auto"),
    "transformer-engine": _transformer_engine,
    "recompute": _recompute,
    "recompute-modules": _recompute_modules,
    "heads-tensor-parallel": _heads_tensor_parallel,
    "ffn-tensor-parallel": lambda c: c.undivided("ffn_hidden_size", "tensor_model_parallel_size"),
    "sequence-context-parallel": lambda c: (
        c.known("seq_length")
        and c.context_parallel_size > 1
        and c.seq_length % (2 * c.context_parallel_size) != 0
    ),
    "sequence-tensor-parallel": _sequence_tensor_parallel,
    "vocabulary": _vocabulary,
    "distributed-optimizer-instances": _instances,
    "sharding-strategy": _sharding_strategy,
    "reshard-policy-stages": lambda c: (
        c.use_custom_fsdp and c.fsdp_reshard_policy == "backward" and c.pipeline_model_parallel_size > 1
    ),
    "double-buffer-stages": lambda c: (
        c.fsdp_double_buffer and _shards(c)[1] and c.pipeline_model_parallel_size > 1
    ),
    "sharding-instances": lambda c: (  # without --use-custom-fsdp a warning
        c.use_custom_fsdp
        and c.num_distributed_optimizer_instances > 1
        and c.data_parallel_sharding_strategy == "no_shard"
    ),
    "outer-sharding": _outer_sharding,
    "outer-instances": _outer_instances,
    "fsdp-reshard-policy": _reshard_policy,
    "fsdp-memory-budget": _memory_budget,
    "gathers-without-effect": _gathers_without_effect,
    "fsdp-debug": lambda c: c.use_custom_fsdp and sharding.debug_in_slots(c.config.ddp),
    "weight-hash": _weight_hash,
    "main-params-dtype": _main_params_dtype,
    "main-grads-dtype": _main_grads_dtype,
    "grad-comm-dtype": _grad_comm_dtype,
}
