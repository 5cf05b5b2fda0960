"""The formula against the model itself."""

import math

import pytest

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.gpt.parameter_count import count_parameters, padded_vocabulary
from megatron.core.transformer.transformer_config import TransformerConfig

VARIANTS = [
    {},
    {"untie_embeddings_and_output_weights": True},
    {"position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True, "add_bias_linear": False},
    {"add_bias_linear": False, "add_qkv_bias": True, "qk_layernorm": True},
    {"group_query_attention": True, "num_query_groups": 2, "kv_channels": 24, "quick_geglu": True},
    {
        "position_embedding_type": "none",
        "squared_relu": True,
        "qk_layernorm": True,
        "normalization": "RMSNorm",
    },
]


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_formula_counts_what_the_model_has(variant):
    shape = {
        "num_layers": 3,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "seq_length": 16,
        "max_position_embeddings": 24,
    }
    config = TransformerConfig(**(shape | variant)).resolved()
    model = GPTModel(config, padded_vocab_size=96, seed=1)
    held = {name: math.prod(meta.global_shape) for name, meta in model.param_meta.items()}
    assert count_parameters(config, 96).total == sum(held.values())
    assert count_parameters(config, 96).per_stage == (sum(held.values()),)


def test_tensor_ranks_together_hold_everything_once_and_norms_each():
    config = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, max_position_embeddings=32, seq_length=32
    ).resolved()
    whole, split = count_parameters(config, 128), count_parameters(config, 128, tp=4)
    replicated = 2 * (2 * 2 * 64 + 2 * 64) + 2 * 64 + 32 * 64  # norms, output biases, final norm, positions
    assert 4 * split.per_stage[0] == whole.total + 3 * replicated


def test_padding():
    assert padded_vocabulary(50257, 128, 1) == 50304
    assert padded_vocabulary(50257, 128, 8) == 51200
    assert padded_vocabulary(1024, 128, 8) == 1024
