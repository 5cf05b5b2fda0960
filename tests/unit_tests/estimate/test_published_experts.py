"""Parameters in all, in experts and active of published models, exactly, from the model's own description."""

import pytest

from megatron.core.pipeline_parallel.plan.placement import LINEAR, Placement
from megatron.core.transformer.model_config import TransformerConfig
from tests.harness.described import costs_of_model, whole

COMMON = {
    "swiglu": True,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
    "group_query_attention": True,
    "seq_length": 64,
    "max_position_embeddings": 64,
    "kv_channels": 128,
}
QWEN3 = {"num_experts": 128, "moe_router_topk": 8, "qk_layernorm": True, "num_query_groups": 4}
# (vocabulary, sizes, in all, in experts, active)
MODELS = {
    "Mixtral-8x7B": (
        32000,
        {"num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_query_groups": 8,
         "num_experts": 8, "ffn_hidden_size": 14336},
        (46_702_792_704, 45_097_156_608, 12_879_925_248),
    ),
    "Mixtral-8x22B": (
        32000,
        {"num_layers": 56, "hidden_size": 6144, "num_attention_heads": 48, "num_query_groups": 8,
         "num_experts": 8, "ffn_hidden_size": 16384},
        (140_620_634_112, 135_291_469_824, 39_152_031_744),
    ),
    "Qwen3-30B-A3B": (
        151936,
        {"num_layers": 48, "hidden_size": 2048, "num_attention_heads": 32, "ffn_hidden_size": 768, **QWEN3},
        (30_532_122_624, 28_991_029_248, 3_353_032_704),
    ),
    "Qwen3-235B-A22B": (
        151936,
        {"num_layers": 94, "hidden_size": 4096, "num_attention_heads": 64, "ffn_hidden_size": 1536, **QWEN3},
        (235_093_634_560, 227_096_395_776, 22_190_763_520),
    ),
}  # fmt: skip


@pytest.mark.grid
@pytest.mark.parametrize("name", MODELS)
def test_exact_counts(name):
    vocabulary, sizes, expected = MODELS[name]
    config = TransformerConfig(**COMMON, **sizes).resolved()
    count = costs_of_model(config, vocabulary).count([whole(config)], Placement(LINEAR, 1))
    assert (count.total, count.experts, count.active) == expected
