"""What rules ask of the model's shape, of how tensor parallel ranks cut it, and of what data parallel ranks shard
(floor 0)."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core import sharding_table
from megatron.core.distributed.custom_fsdp import sharding
from megatron.core.models.gpt.vocabulary_size import leaves_ranks_empty
from megatron.core.transformer.layer_table import expert_pattern
from megatron.core.transformer.model_config import ACTIVATIONS
from megatron.training.config.resolve import grads_sharded, known_vocabulary, weights_sharded
from megatron.training.config.rule_table import RuleContext, refusal, spelled


def rotated_channels(c: RuleContext) -> int | None:
    """Dimensions of a head that rotary positions turn."""
    return None if c.kv_channels is None else int(c.kv_channels * c.rotary_percent)


def several_activations(c: RuleContext) -> str | None:
    return c.exclusive(*ACTIVATIONS)


def groups_apart(c: RuleContext) -> bool:
    """Whether neither of query groups and tensor parallel size divides the other."""
    groups, tp = c.num_query_groups, c.tensor_model_parallel_size
    return tp >= 1 and bool(groups % tp and tp % groups)


def vocabulary_fault(c: RuleContext) -> str | None:
    padded, tp = c.padded_vocab_size, c.tensor_model_parallel_size
    known = known_vocabulary(c.tokenizer_type, c.vocab_size) or c.vocab_size
    if padded is None or tp < 1:
        return None
    saved = c.config.origin.get("padded_vocab_size") == "checkpoint"
    told = f"the checkpoint's padded vocabulary of {padded}" if saved else f"--padded-vocab-size {padded}"
    if leaves_ranks_empty(padded, tp):
        return f"{told} leaves the last of --tensor-model-parallel-size {tp} ranks without a row"
    less = known is not None and padded < known
    return f"{told} is smaller than the tokenizer's vocabulary of {known}" if less else None


# What data parallel ranks shard


def contradicts_optimizer(c: RuleContext) -> bool:
    return sharding.is_contradicted(c.config.ddp)


def debug_in_slots(c: RuleContext) -> bool:
    return sharding.debug_in_slots(c.config.ddp)


def goes_with_outer(c: RuleContext) -> bool:
    return sharding_table.goes_with_outer(c.data_parallel_sharding_strategy, c.outer_dp_sharding_strategy)


def outer_cut_of_nothing(c: RuleContext) -> bool:
    place = c.config.shard_place
    return place is not None and sharding_table.outer_cut_of_nothing(c.outer_dp_sharding_strategy, place)


def policy_keeps_nothing(c: RuleContext) -> bool:
    weights, grads = weights_sharded(c), grads_sharded(c)
    return sharding.keeps_nothing(c.fsdp_reshard_policy, weights_sharded=weights, grads_sharded=grads)


def budget_misfits(c: RuleContext) -> bool:
    return sharding.budget_misfits(c.fsdp_reshard_policy, c.fsdp_memory_budget)


def idle_gathers(c: RuleContext) -> str | None:
    """What is gathered or reduced otherwise than by default, which takes somebody to share with."""
    names, place = ["suggested_communication_unit_size", "fsdp_double_buffer"], c.config.shard_place
    if grads_sharded(c) or not c.use_custom_fsdp:
        names = ["fsdp_reshard_policy", "fsdp_memory_budget", *names]
    if not grads_sharded(c):
        which = f"with {c.told('data_parallel_sharding_strategy')}"
        why = (
            f"{which if c.use_custom_fsdp else 'without --use-custom-fsdp'} weights and gradients stay whole"
        )
    elif not c.use_custom_fsdp or place is None or place.inner_size != 1:
        return None  # the strategy alone has a rule of its own, and so have ranks that do not divide
    else:
        why = "one data parallel rank has nobody to share states with"
    given = ", ".join(spelled(name) for name in names if c.differs(name))
    return f"{given}: {why}" if given else None


def holds_weights(c: RuleContext) -> bool:
    """Whether main weights are no coarser than the model's."""
    asked = c.megatron_fsdp_main_params_dtype
    return asked == "auto" or sharding.holds_weights(asked, c.config.params_flag)


def params_dtype(c: RuleContext) -> str:
    return c.config.params_flag


# A mixture of experts


def pattern_fault(c: RuleContext) -> str | None:
    """Why --moe-layer-freq fits no layers."""
    if c.num_experts is None or c.num_layers is None:
        return None
    return refusal(lambda: expert_pattern(c.config.model), ValueError)


def layers_without_experts(c: RuleContext) -> bool:
    known = c.num_experts is not None and c.num_layers is not None and pattern_fault(c) is None
    return known and not any(expert_pattern(c.config.model))


def weight_is_one(c: RuleContext) -> bool:
    """Whether the softmax over what is chosen is of one number."""
    after = c.moe_router_score_function == "softmax" and not c.moe_router_pre_softmax
    scaled = "sinkhorn" in c.moe_router_load_balancing_type
    return c.num_experts is not None and c.moe_router_topk == 1 and after and not scaled


def groups_fault(c: RuleContext) -> str | None:
    groups, chosen, experts, topk = (
        c.moe_router_num_groups, c.moe_router_group_topk, c.num_experts, c.moe_router_topk
    )  # fmt: skip
    if experts is None or (not groups and not chosen):
        return None
    if not groups or not chosen:
        return "--moe-router-num-groups and --moe-router-group-topk belong together"
    if experts % groups:
        return f"--moe-router-num-groups {groups} does not divide --num-experts {experts}"
    if chosen > groups:
        return f"--moe-router-group-topk {chosen} is above --moe-router-num-groups {groups}"
    if not chosen <= topk <= chosen * (experts // groups):
        held = f"{chosen} groups of {experts // groups} experts"
        return f"--moe-router-topk {topk}: at least one expert of each of {held} is chosen, and no more than these have"
    return None


def sinkhorn_fault(c: RuleContext) -> str | None:
    """What sinkhorn does not do."""
    if c.num_experts is None or "sinkhorn" not in c.moe_router_load_balancing_type:
        return None
    others = (
        "moe_expert_capacity_factor", "moe_router_pre_softmax", "moe_router_topk_scaling_factor",
        "moe_router_num_groups", "moe_router_enable_expert_bias", "moe_router_score_function",
    )  # fmt: skip
    given = ", ".join(spelled(name) for name in others if c.differs(name))
    return f"--moe-router-load-balancing-type sinkhorn with {given}" if given else None


def balancing_fault(c: RuleContext) -> str | None:
    """Of what balances experts, several at once, and their coefficients."""
    words: Sequence[str] = c.moe_router_load_balancing_type
    told, coefficients = " ".join(words), c.moe_aux_loss_coeff
    if c.num_experts is None:
        return None
    if len(set(words)) < len(words):
        return f"--moe-router-load-balancing-type {told}: each once"
    alone = [word for word in words if word in ("none", "sinkhorn")]
    if alone and len(words) > 1:
        return f"--moe-router-load-balancing-type {told}: {alone[0]} goes with no other"
    given = c.differs("moe_aux_loss_coeff")
    if len(coefficients) != len(words) and (given or len(words) > 1):
        return (
            f"{len(coefficients)} of --moe-aux-loss-coeff, {len(words)} of --moe-router-load-balancing-type"
        )
    if alone and any(coefficients):
        return f"--moe-router-load-balancing-type {told} has no loss, and so no --moe-aux-loss-coeff"
    return None
