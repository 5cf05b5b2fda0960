"""Which experts a token meets and with what weight: functions of the logits of a whole microbatch.

Logits are [tokens, experts] of all tokens of the microbatch, in the order (position, sequence), on every tensor
parallel rank alike; so what is routed and dropped does not depend on who computes it. Ties go to the lowest expert and
the earliest token: `torch.topk` promises neither.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.core.transformer.model_config import TransformerConfig

_TINY = 1e-20  # of what sigmoids are divided by, as upstream has it
_CHANGE = 1e-4  # of sinkhorn's factors, on average, below which they stay as they are
_GUARD = 1e-8  # beside what sinkhorn divides by


class Choices(NamedTuple):
    """Of the tokens of a microbatch. experts, weights [tokens, k]: whom each meets, in rising order, and what that
    counts. kept bool [tokens, k]: who has room for it; None: all. of_experts [experts]: tokens that
    each has. even_rows: of all experts, where nothing but shapes is known.
    """

    experts: Tensor
    weights: Tensor
    kept: Tensor | None
    of_experts: Tensor
    even_rows: int


class Routes(NamedTuple):
    """The rows of the experts' input, ordered by (expert, token).

    tokens [rows]: whose input each is. weights [rows]: what its output counts. ends: where each expert's rows end.
    by_token [rows]: the rows in the order (token, expert); begins [tokens]: where each token's begin in it.
    """

    tokens: Tensor
    weights: Tensor
    ends: tuple[int, ...]
    by_token: Tensor
    begins: Tensor


def largest(scores: Tensor, count: int) -> Tensor:
    """The places [..., count] of the largest scores along the last dim, of equal ones the first, in rising order."""
    best = torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :count]
    return best.sort(-1).values


def by_sinkhorn(config: TransformerConfig, logits: Tensor, training: bool) -> tuple[Tensor, Tensor]:
    """`chosen_experts` of logits that are scaled until all experts are equally busy: in training, and only to choose.
    Source: arXiv 2202.01169, B.2.1."""
    k = config.moe_router_topk
    scores = logits.sigmoid() if k == 1 else logits.softmax(-1)
    experts = largest(_doubly_scaled(logits.detach()) if training else scores.detach(), k)
    return experts, scores.gather(1, experts)


def _doubly_scaled(logits: Tensor) -> Tensor:
    cost = logits.exp()
    columns, change = torch.ones_like(cost[0]), math.inf
    while change > _CHANGE:
        rows = 1.0 / (len(cost) * (cost @ columns + _GUARD))
        before, columns = columns, 1.0 / (cost.shape[1] * (rows @ cost + _GUARD))
        # sync: whether to go on; without values, once
        change = 0.0 if cost.is_meta else (columns - before).abs().mean().item()
    return cost * columns * rows.unsqueeze(1)


def chosen_experts(config: TransformerConfig, logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """(experts [tokens, k] in rising order, combine weights [tokens, k]) of logits in fp32 or fp64.

    bias [experts]: is added to scores where experts are chosen, not where they are weighed. Sources: softmax over the
    chosen, arXiv 2401.04088; sigmoid, groups and bias, arXiv 2412.19437.
    """
    k, before = config.moe_router_topk, config.moe_router_pre_softmax
    sigmoid = config.moe_router_score_function == "sigmoid"
    scores = logits.sigmoid() if sigmoid else logits.softmax(-1) if before else logits
    choosing = scores.detach()
    if bias is not None:
        choosing = choosing + bias.to(choosing.dtype)
    if config.moe_router_num_groups is not None:
        choosing = _within_groups(
            choosing, config.moe_router_num_groups, config.moe_router_group_topk or 1, k
        )
    experts = largest(choosing, k)
    weights = scores.gather(1, experts)
    if sigmoid and k > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
    elif not sigmoid and not before:
        weights = weights.softmax(-1)
    factor = config.moe_router_topk_scaling_factor
    return experts, weights * factor if factor else weights


def _within_groups(scores: Tensor, num_groups: int, group_topk: int, k: int) -> Tensor:
    """Scores of experts outside of the best `group_topk` groups are -inf. A group is as good as its k // group_topk
    best experts together."""
    of_groups = scores.unflatten(-1, (num_groups, -1))
    values = of_groups.sort(-1, descending=True).values[..., : k // group_topk].sum(-1)
    kept = torch.zeros_like(values, dtype=torch.bool).scatter(1, largest(values, group_topk), True)
    return of_groups.masked_fill(~kept.unsqueeze(-1), -math.inf).flatten(-2)


def capacity_of(config: TransformerConfig, tokens: int, num_experts: int) -> int:
    """How many of a microbatch's tokens an expert takes: `--moe-expert-capacity-factor` times its even share."""
    factor = config.moe_expert_capacity_factor
    if factor is None:
        return tokens
    return min(tokens, math.ceil(tokens * config.moe_router_topk / num_experts * factor))


def within_capacity(
    config: TransformerConfig, experts: Tensor, weights: Tensor, num_experts: int
) -> Tensor | None:
    """bool [tokens, k]: which of a token's experts have room for it, for those that weigh most, or for the earliest;
    None where all have."""
    tokens = len(experts)
    capacity = capacity_of(config, tokens, num_experts)
    if capacity == tokens:
        return None
    scores = weights.new_full((tokens, num_experts), -math.inf)
    if config.moe_token_drop_policy == "probs":  # noqa: S105
        scores.scatter_(1, experts, weights.detach())
    else:
        scores.scatter_(1, experts, 0.0)  # all alike: of equal ones the earliest go first
    order = torch.sort(scores, dim=0, descending=True, stable=True).indices
    ranks = torch.empty_like(order)
    places = torch.arange(tokens, device=order.device).unsqueeze(1).expand_as(order)
    ranks.scatter_(0, order, places)
    return ranks.gather(1, experts) < capacity


def tokens_by_expert(experts: Tensor, kept: Tensor | None, num_experts: int) -> Tensor:
    """[num_experts] int64."""
    if experts.is_meta:
        return experts.new_empty(num_experts)
    flat = experts.flatten() if kept is None else experts[kept]
    return torch.bincount(flat, minlength=num_experts)


def balanced_counts(total: int, num_experts: int) -> list[int]:
    """What each expert gets where nothing but shapes is known: its even share."""
    return [total // num_experts + (expert < total % num_experts) for expert in range(num_experts)]


def routes_of(experts: Tensor, weights: Tensor, kept: Tensor | None, counts: list[int]) -> Routes:
    """experts, weights, kept [tokens, k]: as above. counts: `tokens_by_expert`, on the host."""
    k, ends = experts.shape[1], tuple(itertools.accumulate(counts))
    # What is dropped goes behind the last expert, and is cut off.
    flat = (experts if kept is None else experts.masked_fill(~kept, len(counts))).flatten()
    order = torch.sort(flat, stable=True).indices
    by_token = torch.empty_like(order)
    by_token[order] = torch.arange(len(order), device=order.device)
    begins = torch.arange(0, len(order), k, device=order.device)
    if kept is None:
        by_token = by_token[: ends[-1]]  # all of them, where there are values
    else:
        by_token = by_token[kept.flatten()]
        of_token = kept.sum(-1)
        begins = of_token.cumsum(0) - of_token
    rows = order[: ends[-1]]
    return Routes(rows // k, weights.flatten().index_select(0, rows), ends, by_token, begins)
