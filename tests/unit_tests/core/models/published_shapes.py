"""Published model shapes, by name: values for the fields of `TransformerConfig`.

Sources: GPT-3 (arXiv 2005.14165, table 2.1), Llama 2 (arXiv 2307.09288), Llama 3 (arXiv 2407.21783, table 3),
Gemma (arXiv 2403.08295, table 1, whose feedforward dimension counts gate and up together).
"""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.model_config import TransformerConfig

_NO_DROPOUT = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
_ROTARY = {"position_embedding_type": "rope", "normalization": "RMSNorm", "add_bias_linear": False}
_LLAMA = {**_ROTARY, **_NO_DROPOUT, "swiglu": True, "untie_embeddings_and_output_weights": True}
_GEMMA = {
    **_ROTARY,
    **_NO_DROPOUT,
    "norm_epsilon": 1e-6,
    "apply_layernorm_1p": True,
    "geglu_tanh": True,
    "embedding_multiplier": "sqrt_hidden",
    "kv_channels": 256,
}


def _sizes(layers: int, hidden: int, heads: int, seq: int, groups: int | None = None) -> dict[str, Any]:
    grouped = {} if groups is None else {"group_query_attention": True, "num_query_groups": groups}
    shape = {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    return {**shape, "seq_length": seq, "max_position_embeddings": seq, **grouped}


def _gpt3(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    return _sizes(layers, hidden, heads, 2048)


def _llama(
    layers: int, hidden: int, heads: int, ffn: int, seq: int, groups: int | None = None, **more: Any
) -> dict[str, Any]:
    return {**_LLAMA, **_sizes(layers, hidden, heads, seq, groups), "ffn_hidden_size": ffn, **more}


def _gemma(layers: int, hidden: int, heads: int, groups: int, ffn: int) -> dict[str, Any]:
    return {**_GEMMA, **_sizes(layers, hidden, heads, 8192, groups), "ffn_hidden_size": ffn}


SHAPES: dict[str, dict[str, Any]] = {
    "gpt3-125m": _gpt3(12, 768, 12),
    "gpt3-350m": _gpt3(24, 1024, 16),
    "gpt3-1.3b": _gpt3(24, 2048, 16),
    "gpt3-6.7b": _gpt3(32, 4096, 32),
    "gpt3-175b": _gpt3(96, 12288, 96),
    "llama2-7b": _llama(32, 4096, 32, 11008, 4096),
    "llama2-70b": _llama(80, 8192, 64, 28672, 4096, groups=8),
    "llama3-8b": _llama(32, 4096, 32, 14336, 8192, groups=8, rotary_base=500000),
    "llama3-70b": _llama(80, 8192, 64, 28672, 8192, groups=8, rotary_base=500000),
    "llama3.1-8b": _llama(32, 4096, 32, 14336, 131072, groups=8, rotary_base=500000, use_rope_scaling=True),
    "gemma-2b": _gemma(18, 2048, 8, 1, 16384),
    "gemma-7b": _gemma(28, 3072, 16, 16, 24576),
}


def published(name: str) -> TransformerConfig:
    """Sizes filled in."""
    return TransformerConfig(**SHAPES[name]).resolved()
