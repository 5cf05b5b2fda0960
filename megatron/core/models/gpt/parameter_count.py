"""How many parameters a GPT has, in all and on each rank, by formula (floor 0)."""

from __future__ import annotations

import dataclasses

from megatron.core.transformer.transformer_config import TransformerConfig


def padded_vocabulary(vocab_size: int, make_vocab_size_divisible_by: int, tensor_parallel_size: int) -> int:
    """The vocabulary rounded up to a multiple of both arguments' product, in ids."""
    multiple = make_vocab_size_divisible_by * tensor_parallel_size
    return -(-vocab_size // multiple) * multiple


@dataclasses.dataclass(frozen=True)
class ParameterCount:
    """total: every parameter once. per_stage: parameters on one rank of each pipeline stage."""

    total: int
    per_stage: tuple[int, ...]


def count_parameters(
    config: TransformerConfig,
    padded_vocab_size: int,
    *,
    tp: int = 1,
    layers_per_stage: tuple[int, ...] | None = None,
) -> ParameterCount:
    """Count a resolved model over `tp` tensor ranks and one entry of `layers_per_stage` a pipeline stage.

    Tied word embeddings on more than one stage have a copy on the last one, which the total leaves out.
    """
    layers = layers_per_stage or (config.num_layers,)
    assert sum(layers) == config.num_layers, f"stages hold {layers} layers, the model has {config.num_layers}"
    first, last = 0, len(layers) - 1
    per_stage = []
    for stage, num_layers in enumerate(layers):
        here = num_layers * layer_parameters(config, tp)
        if stage == first:
            here += _word_embedding(config, padded_vocab_size, tp) + _position_embedding(config)
        if stage == last:
            here += _norm(config, config.hidden_size)
            if config.untie_embeddings_and_output_weights or last > first:
                here += _word_embedding(config, padded_vocab_size, tp)
        per_stage.append(here)
    copies = 2 if config.untie_embeddings_and_output_weights else 1
    total = (
        config.num_layers * layer_parameters(config, 1)
        + copies * _word_embedding(config, padded_vocab_size, 1)
        + _position_embedding(config)
        + _norm(config, config.hidden_size)
    )
    return ParameterCount(total=total, per_stage=tuple(per_stage))


def layer_parameters(config: TransformerConfig, tp: int = 1) -> int:
    """Parameters of one layer on one of `tp` tensor ranks: matrices are split, norms and output biases are not."""
    h, ffn, head = config.hidden_size, config.ffn_hidden_size, config.kv_channels
    query = config.num_attention_heads * head
    qkv = query + 2 * config.num_query_groups * head
    fc1 = ffn * (2 if config.gated_linear_unit else 1)
    split = h * qkv + query * h + h * fc1 + ffn * h
    whole = 2 * _norm(config, h)
    if config.add_bias_linear or config.add_qkv_bias:
        split += qkv
    if config.add_bias_linear:
        split += fc1
        whole += 2 * h
    if config.qk_layernorm:
        whole += 2 * _norm(config, head)
    return split // tp + whole


def _norm(config: TransformerConfig, width: int) -> int:
    return width if config.normalization == "RMSNorm" else 2 * width


def _word_embedding(config: TransformerConfig, padded_vocab_size: int, tp: int) -> int:
    return padded_vocab_size // tp * config.hidden_size


def _position_embedding(config: TransformerConfig) -> int:
    learned = config.position_embedding_type == "learned_absolute"
    return config.max_position_embeddings * config.hidden_size if learned else 0
