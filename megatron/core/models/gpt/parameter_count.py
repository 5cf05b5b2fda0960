"""How many parameters a GPT has, in all and on each rank, by formula (floor 0)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from megatron.core.models.gpt.stage_layers import StageSpec
from megatron.core.models.gpt.unit_order import ONE_MATRIX, layer_units
from megatron.core.pipeline_parallel.plan.placement import LINEAR, Placement
from megatron.core.rectangles import even_share
from megatron.core.transformer.layer_table import LayerKind, layer_table
from megatron.core.transformer.model_config import TransformerConfig


def padded_vocabulary(vocab_size: int, make_vocab_size_divisible_by: int, tensor_parallel_size: int) -> int:
    """The vocabulary rounded up to a multiple of both arguments' product, in ids."""
    multiple = make_vocab_size_divisible_by * tensor_parallel_size
    return -(-vocab_size // multiple) * multiple


def leaves_ranks_empty(padded_vocab_size: int, tp: int) -> bool:
    """Whether there are too few ids for the last of `tp` ranks to hold any."""
    return even_share(padded_vocab_size, tp) * (tp - 1) >= padded_vocab_size


@dataclasses.dataclass(frozen=True)
class ParameterCount:
    """total: every parameter once. experts: of these, in experts that tokens are routed to; active: all but those of
    experts that a token does not meet. per_rank: parameters on a tensor rank of each pipeline rank, its chunks
    together."""

    total: int
    experts: int
    active: int
    per_rank: tuple[int, ...]


class UnitParameters(NamedTuple):
    """Of a unit, by the flat buffers that they lie in. shared: another pipeline rank has them too (a tied matrix)."""

    own: int = 0
    shared: int = 0
    experts: int = 0


def count_parameters(
    config: TransformerConfig,
    padded_vocab_size: int,
    *,
    tp: int = 1,
    stages: Sequence[StageSpec] | None = None,
    placement: Placement | None = None,
) -> ParameterCount:
    """Count a resolved model over `tp` tensor ranks and the stages of `split_stages`, by default one of everything.

    placement: which pipeline rank holds which stage, by default one stage a rank. Tied word embeddings have a copy on
    the stage of the loss where that is another rank; the total leaves it out, and what tensor ranks hold several times
    (norms, output biases, learned positions, key and value heads where TP exceeds the query groups).
    """
    whole = StageSpec(tuple(range(config.num_layers)), embedding=True, loss=True)
    specs = stages or (whole,)
    where = placement or Placement(LINEAR, len(specs))
    assert len(specs) == where.num_stages, f"{len(specs)} stages, {where} has {where.num_stages}"
    held = sum(len(spec.layers) for spec in specs)
    assert held == config.num_layers, f"stages hold {held} layers, the model has {config.num_layers}"
    of_ranks: list[dict[str, UnitParameters]] = [{} for _ in range(where.num_ranks)]
    for spec, rank in zip(specs, where.ranks(), strict=True):
        of_ranks[rank] |= unit_parameters(config, padded_vocab_size, tp, spec, where)
    everything = unit_parameters(config, padded_vocab_size, 1, whole, Placement(LINEAR, 1))
    total, *per_rank = (sum(map(sum, units.values())) for units in (everything, *of_ranks))
    routed = [(kind.experts, expert_parameters(config, kind)) for kind in layer_table(config)]
    unmet = sum(numel * (one.num_experts - one.topk) // one.num_experts for one, numel in routed if one)
    experts = sum(numel for _, numel in routed)
    return ParameterCount(total, experts, total - unmet, tuple(per_rank))


def unit_parameters(
    config: TransformerConfig, padded_vocab_size: int, tp: int, spec: StageSpec, placement: Placement
) -> dict[str, UnitParameters]:
    """Of each unit of a stage, in the order of the forward: its parameters on one of `tp` tensor ranks."""
    positions, norm = position_embedding_parameters(config), norm_parameters(config, config.hidden_size)
    words = word_parameters(config, padded_vocab_size, tp)
    tied, here = not config.untie_embeddings_and_output_weights, placement.has_both_ends_on_one_rank
    one_matrix = spec.embedding and spec.loss and tied
    units: dict[str, UnitParameters] = {}
    if one_matrix:
        units[ONE_MATRIX] = UnitParameters(words + positions + norm)
    elif spec.embedding:
        copied = tied and not here
        units["embedding"] = UnitParameters(positions, words) if copied else UnitParameters(words + positions)
    table = layer_table(config)
    for number in spec.layers:
        kind = table[number]
        numel = (
            UnitParameters(layer_parameters(config, tp, kind)),
            UnitParameters(experts=expert_parameters(config, kind, tp)),
        )
        units |= zip(layer_units(number, kind), numel, strict=False)
    if spec.loss and tied and here:
        units |= {"head": UnitParameters(norm), "embedding": UnitParameters(words + positions)}
    elif spec.loss and not one_matrix:
        units["head"] = UnitParameters(norm, words) if tied else UnitParameters(norm + words)
    return units


def layer_matrices(
    config: TransformerConfig, tp: int = 1, width: int | None = None
) -> tuple[tuple[int, int], ...]:
    """(inputs, outputs) of a layer's QKV, attention output, FC1 and FC2 on one of `tp` tensor ranks. width: of its MLP;
    None: --ffn-hidden-size.

    A key and value head is on one rank at least: with fewer query groups than ranks, several hold the same one.
    """
    h, head, ffn = config.hidden_size, config.kv_channels, (width or config.ffn_hidden_size) // tp
    query = config.num_attention_heads // tp * head
    qkv = query + 2 * max(config.num_query_groups // tp, 1) * head
    return (h, qkv), (query, h), (h, ffn * (2 if config.gated_linear_unit else 1)), (ffn, h)


def layer_parameters(config: TransformerConfig, tp: int = 1, kind: LayerKind | None = None) -> int:
    """Parameters of one layer on one of `tp` tensor ranks, without its routed experts: matrices are split, norms,
    output biases and routers are not. kind: that of the first layer if not given."""
    kind = layer_table(config)[0] if kind is None else kind
    (h, qkv), proj, *mlp = layer_matrices(config, tp, kind.mlp_width)
    here = h * qkv + math.prod(proj) + 2 * norm_parameters(config, h)
    if config.add_bias_linear or config.add_qkv_bias:
        here += qkv
    here += h * config.attention_output_bias
    if config.qk_layernorm:
        here += 2 * norm_parameters(config, config.kv_channels)
    if kind.experts is None:
        return here + _mlp_parameters(config, mlp)
    here += kind.experts.num_experts * (h + config.add_bias_linear)
    if width := kind.experts.shared_width:
        shared = layer_matrices(config, tp, width)[2:]
        here += _mlp_parameters(config, shared) + h * config.moe_shared_expert_gate
    return here


def expert_parameters(config: TransformerConfig, kind: LayerKind, tp: int = 1) -> int:
    """Those of a layer's routed experts on one of `tp` tensor ranks."""
    if kind.experts is None:
        return 0
    mlp = layer_matrices(config, tp, kind.experts.width)[2:]
    return kind.experts.num_experts * _mlp_parameters(config, mlp)


def _mlp_parameters(config: TransformerConfig, matrices: Sequence[tuple[int, int]]) -> int:
    return sum(into * out + out * config.add_bias_linear for into, out in matrices)


def norm_parameters(config: TransformerConfig, width: int) -> int:
    return width if config.normalization == "RMSNorm" else 2 * width


def word_parameters(config: TransformerConfig, padded_vocab_size: int, tp: int) -> int:
    return even_share(padded_vocab_size, tp) * config.hidden_size


def position_embedding_parameters(config: TransformerConfig) -> int:
    learned = config.position_embedding_type == "learned_absolute"
    return config.max_position_embeddings * config.hidden_size if learned else 0
