"""Megatron's count of floating point operations (floor 0)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core.transformer.transformer_config import TransformerConfig

if TYPE_CHECKING:
    from megatron.training.config.config import Config


def flops_per_token(model: TransformerConfig, padded_vocab_size: int, seq_length: int) -> float:
    """Forward and backward of one token: 3 passes x 2 operations x (GEMMs + causal half of attention + logits).

    A gated MLP counts 1.5 times, recompute is not counted, nor is anything that is no matrix product.
    """
    h, query = model.hidden_size, model.num_attention_heads * model.kv_channels
    key_value = 2 * model.num_query_groups * model.kv_channels
    projections = h * (query + key_value) + query * h
    mlp = 2 * h * model.ffn_hidden_size * (1.5 if model.gated_linear_unit else 1.0)
    attention = seq_length * query  # scores and weighted sum, s * query each, half of them masked
    return 3.0 * 2.0 * (model.num_layers * (projections + mlp + attention) + h * padded_vocab_size)


def train_step_flops(config: Config, batch_size: int) -> float:
    """Operations of one optimizer step over `batch_size` samples. The padded vocabulary must be known."""
    model = config.model
    assert model.padded_vocab_size is not None, "padded_vocab_size is unknown before the tokenizer is built"
    return batch_size * model.seq_length * flops_per_token(model, model.padded_vocab_size, model.seq_length)
