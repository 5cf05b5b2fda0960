"""What each layer of the model is made of, by its number (floor 0): the one table that models are built from and
described by."""

from __future__ import annotations

import functools
from typing import NamedTuple

from megatron.core.list_expression import parse_list_expression
from megatron.core.transformer.model_config import TransformerConfig


class ExpertSizes(NamedTuple):
    """Of one layer. topk: experts that a token meets. width: of each expert; shared_width: of those that every token
    meets, all together, 0 for none."""

    num_experts: int
    topk: int
    width: int
    shared_width: int


class LayerKind(NamedTuple):
    """mlp_width: of a dense MLP; 0 where experts take its place."""

    attention: str
    mlp_width: int
    experts: ExpertSizes | None = None

    @property
    def active_width(self) -> int:
        """Of all the MLPs that a token meets."""
        of = self.experts
        return self.mlp_width if of is None else of.topk * of.width + of.shared_width


@functools.lru_cache
def layer_table(config: TransformerConfig) -> tuple[LayerKind, ...]:
    """The kind of each layer of a resolved configuration. Raises ValueError where --moe-layer-freq fits no layers."""
    dense, count = LayerKind("self_attention", config.ffn_hidden_size), config.num_layers
    if config.num_experts is None:
        return (dense,) * count
    sparse = LayerKind(
        dense.attention,
        0,
        ExpertSizes(
            config.num_experts,
            config.moe_router_topk,
            config.moe_ffn_hidden_size or config.ffn_hidden_size,
            config.moe_shared_expert_intermediate_size or 0,
        ),
    )
    return tuple(sparse if has_experts else dense for has_experts in expert_pattern(config))


def expert_pattern(config: TransformerConfig) -> tuple[int, ...]:
    """1 for each layer with experts, else 0: every N-th, the first among them, or as a list says. Raises ValueError."""
    text, count = config.moe_layer_freq, config.num_layers
    pattern = parse_list_expression(text)
    if isinstance(pattern, int):
        if pattern < 1:
            raise ValueError(f"--moe-layer-freq {text}: every N-th layer has experts, with N at least 1")
        return tuple(int(layer % pattern == 0) for layer in range(count))
    if len(pattern) != count or not set(pattern) <= {0, 1}:
        raise ValueError(
            f"--moe-layer-freq {text}: a list of 0 and 1, one for each of --num-layers {count}, not of {len(pattern)}"
        )
    return pattern


def expert_layers(config: TransformerConfig) -> tuple[int, ...]:
    """The numbers of the layers that have experts."""
    return tuple(number for number, kind in enumerate(layer_table(config)) if kind.experts is not None)
