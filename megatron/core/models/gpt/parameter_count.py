"""How many parameters a GPT has, in all and on each rank, by formula (floor 0)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from megatron.core.models.gpt.stage_layers import StageSpec
from megatron.core.models.gpt.unit_order import ONE_MATRIX, layer_name
from megatron.core.pipeline_parallel.plan.placement import LINEAR, Placement
from megatron.core.rectangles import even_share
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
    """total: every parameter once. per_rank: parameters on a tensor rank of each pipeline rank, its chunks together."""

    total: int
    per_rank: tuple[int, ...]


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
    of_ranks: list[dict[str, tuple[int, int]]] = [{} for _ in range(where.num_ranks)]
    for spec, rank in zip(specs, where.ranks(), strict=True):
        of_ranks[rank] |= unit_parameters(config, padded_vocab_size, tp, spec, where)
    everything = unit_parameters(config, padded_vocab_size, 1, whole, Placement(LINEAR, 1))
    total, *per_rank = (sum(map(sum, units.values())) for units in (everything, *of_ranks))
    return ParameterCount(total, tuple(per_rank))


def unit_parameters(
    config: TransformerConfig, padded_vocab_size: int, tp: int, spec: StageSpec, placement: Placement
) -> dict[str, tuple[int, int]]:
    """Of each unit of a stage, in the order of the forward: its parameters on one of `tp` tensor ranks, without those
    that another pipeline rank has too (a tied matrix), and these."""
    positions, norm = position_embedding_parameters(config), norm_parameters(config, config.hidden_size)
    words = word_parameters(config, padded_vocab_size, tp)
    tied, here = not config.untie_embeddings_and_output_weights, placement.has_both_ends_on_one_rank
    one_matrix = spec.embedding and spec.loss and tied
    units: dict[str, tuple[int, int]] = {}
    if one_matrix:
        units[ONE_MATRIX] = (words + positions + norm, 0)
    elif spec.embedding:
        units["embedding"] = (positions, words) if tied and not here else (words + positions, 0)
    units |= {layer_name(number): (layer_parameters(config, tp), 0) for number in spec.layers}
    if spec.loss and tied and here:
        units |= {"head": (norm, 0), "embedding": (words + positions, 0)}
    elif spec.loss and not one_matrix:
        units["head"] = (norm, words) if tied else (norm + words, 0)
    return units


def layer_matrices(config: TransformerConfig, tp: int = 1) -> tuple[tuple[int, int], ...]:
    """(inputs, outputs) of a layer's QKV, attention output, FC1 and FC2 on one of `tp` tensor ranks.

    A key and value head is on one rank at least: with fewer query groups than ranks, several hold the same one.
    """
    h, head, ffn = config.hidden_size, config.kv_channels, config.ffn_hidden_size // tp
    query = config.num_attention_heads // tp * head
    qkv = query + 2 * max(config.num_query_groups // tp, 1) * head
    return (h, qkv), (query, h), (h, ffn * (2 if config.gated_linear_unit else 1)), (ffn, h)


def layer_parameters(config: TransformerConfig, tp: int = 1) -> int:
    """Parameters of one layer on one of `tp` tensor ranks: matrices are split, norms and output biases are not."""
    (h, qkv), _, (_, fc1), _ = matrices = layer_matrices(config, tp)
    here = sum(into * out for into, out in matrices) + 2 * norm_parameters(config, h)
    if config.add_bias_linear or config.add_qkv_bias:
        here += qkv
    here += h * config.attention_output_bias + (fc1 + h) * config.add_bias_linear
    if config.qk_layernorm:
        here += 2 * norm_parameters(config, config.kv_channels)
    return here


def norm_parameters(config: TransformerConfig, width: int) -> int:
    return width if config.normalization == "RMSNorm" else 2 * width


def word_parameters(config: TransformerConfig, padded_vocab_size: int, tp: int) -> int:
    return even_share(padded_vocab_size, tp) * config.hidden_size


def position_embedding_parameters(config: TransformerConfig) -> int:
    learned = config.position_embedding_type == "learned_absolute"
    return config.max_position_embeddings * config.hidden_size if learned else 0
