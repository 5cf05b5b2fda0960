"""What layers of experts count in a step, by name: every rank knows it from the table of layers (floor 0)."""

from __future__ import annotations

from typing import NamedTuple

from megatron.core.transformer.layer_table import layer_table
from megatron.core.transformer.model_config import TransformerConfig

TOKENS, DROPPED, Z_LOSS = "tokens", "dropped", "z_loss"
# What upstream's log calls the losses that balance experts, by the word that asks for them.
BALANCING = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}


class Counted(NamedTuple):
    """`size` numbers of a layer, summed over the microbatches of a step."""

    layer: int
    name: str
    size: int


def balancing_losses(config: TransformerConfig) -> dict[str, float]:
    """The coefficient of each loss that balances experts, by the word that asks for it."""
    words, coefficients = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    return {word: one for word, one in zip(words, coefficients, strict=True) if word in BALANCING and one}


def counted(config: TransformerConfig) -> tuple[Counted, ...]:
    """Of all layers, in order: tokens that each expert computed, tokens that it was too full for, and each loss before
    its coefficient."""
    losses = [BALANCING[word] for word in balancing_losses(config)] + [Z_LOSS] * bool(config.moe_z_loss_coeff)
    drops = config.moe_expert_capacity_factor is not None
    return tuple(
        Counted(layer, name, size)
        for layer, kind in enumerate(layer_table(config))
        if kind.experts is not None
        for name, size in (
            (TOKENS, kind.experts.num_experts),
            *[(DROPPED, kind.experts.num_experts)] * drops,
            *((loss, 1) for loss in losses),
        )
    )
