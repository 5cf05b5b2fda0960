"""What rules ask of a mixture of experts (floor 0)."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.transformer.layer_table import expert_pattern
from megatron.training.config.rule_table import RuleContext, refusal, spelled


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
