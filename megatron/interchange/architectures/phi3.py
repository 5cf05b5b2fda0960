"""Phi-3 with 4k positions (arXiv 2404.14219): queries, keys and values in one matrix, gate and up in another"""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.transformer.model_config import TransformerConfig
from megatron.interchange.architecture import Architecture
from megatron.interchange.decoder_table import ALWAYS, SILU, SIZES
from megatron.interchange.fields import Dropout, HeadDim, Number, Only, Tied
from megatron.interchange.moves import Move, Rows, grouped_qkv, whole
from megatron.interchange.positions import Original, Window


def tensors(config: TransformerConfig) -> Iterator[Move]:
    hidden, head, ffn = config.hidden_size, config.kv_channels, config.ffn_hidden_size
    queries, groups = config.num_attention_heads * head, config.num_query_groups * head
    total = queries + 2 * groups
    yield from whole("decoder.final_layernorm.weight", "model.norm.weight", hidden)
    for layer in range(config.num_layers):
        ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        yield from whole(f"{ours}input_layernorm.weight", f"{theirs}input_layernorm.weight", hidden)
        after = f"{theirs}post_attention_layernorm.weight"
        yield from whole(f"{ours}pre_mlp_layernorm.weight", after, hidden)
        fused = f"{theirs}self_attn.qkv_proj.weight"
        query = Rows(fused, total, 0, queries)
        key, value = (Rows(fused, total, queries + part * groups, groups) for part in range(2))
        yield from grouped_qkv(
            config, f"{ours}self_attention.linear_qkv.weight", (query, key, value), (hidden,)
        )
        output = f"{ours}self_attention.linear_proj.weight"
        yield from whole(output, f"{theirs}self_attn.o_proj.weight", hidden, queries)
        gate_up = f"{theirs}mlp.gate_up_proj.weight"
        yield from whole(f"{ours}mlp.linear_fc1.weight", gate_up, 2 * ffn, hidden)
        yield from whole(f"{ours}mlp.linear_fc2.weight", f"{theirs}mlp.down_proj.weight", hidden, ffn)


ARCHITECTURE = Architecture(
    "phi3",
    "Phi3ForCausalLM",
    ALWAYS,
    (
        *SIZES,
        SILU,
        Number("rms_norm_eps", "norm_epsilon", 1e-5),
        HeadDim(fixed=True),
        Tied(False),
        Dropout(("resid_pdrop", "embd_pdrop")),
        Window(),
        Original(),
        Only("attention_bias", (False,), "Phi-3 has no biases here", written=False),
    ),
    tensors,
)
