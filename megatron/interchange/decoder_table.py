"""Settings and tensors that Llama's architecture shares with most later ones (floor 0, pure)"""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.transformer.model_config import TransformerConfig
from megatron.interchange.fields import Inner, KeyValueHeads, Number, Only, Size, Vocabulary
from megatron.interchange.moves import Move, all_rows, grouped_qkv, stacked, whole
from megatron.interchange.positions import Rope

SILU = Only("hidden_act", ("silu",), "this architecture's MLP is gated by SiLU here (--swiglu)")
SIZES = (
    Size("num_hidden_layers", "num_layers"),
    Size("hidden_size", "hidden_size"),
    Size("num_attention_heads", "num_attention_heads"),
    Size("max_position_embeddings", "max_position_embeddings"),
    Inner("intermediate_size"),
    KeyValueHeads(),
    Vocabulary(),
    Number("initializer_range", "init_method_std", 0.02),
    Number("attention_dropout", "attention_dropout", 0.0),
    Rope(),
)
ALWAYS = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
}


def decoder(config: TransformerConfig) -> Iterator[Move]:
    """`model.layers.N.*` and `model.norm`, with what the configuration has of biases and norms of heads."""
    hidden, head = config.hidden_size, config.kv_channels
    queries, groups = config.num_attention_heads * head, config.num_query_groups * head
    yield from whole("decoder.final_layernorm.weight", "model.norm.weight", hidden)
    for layer in range(config.num_layers):
        ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        yield from whole(f"{ours}input_layernorm.weight", f"{theirs}input_layernorm.weight", hidden)
        after = f"{theirs}post_attention_layernorm.weight"
        yield from whole(f"{ours}pre_mlp_layernorm.weight", after, hidden)
        for kind, columns, there in (
            ("weight", (hidden,), True),
            ("bias", (), config.add_qkv_bias),
        ):
            rows = [
                all_rows(f"{theirs}self_attn.{name}_proj.{kind}", count)
                for name, count in (("q", queries), ("k", groups), ("v", groups))
            ]
            if there:
                yield from grouped_qkv(config, f"{ours}self_attention.linear_qkv.{kind}", rows, columns)
        output = f"{ours}self_attention.linear_proj."
        yield from whole(f"{output}weight", f"{theirs}self_attn.o_proj.weight", hidden, queries)
        if config.attention_output_bias:
            yield from whole(f"{output}bias", f"{theirs}self_attn.o_proj.bias", hidden)
        for name in ("q", "k") if config.qk_layernorm else ():
            ours_norm = f"{ours}self_attention.{name}_layernorm.weight"
            yield from whole(ours_norm, f"{theirs}self_attn.{name}_norm.weight", head)
        ffn = config.ffn_hidden_size
        gate_up = [all_rows(f"{theirs}mlp.{name}_proj.weight", ffn) for name in ("gate", "up")]
        yield from stacked(f"{ours}mlp.linear_fc1.weight", gate_up, (hidden,))
        yield from whole(f"{ours}mlp.linear_fc2.weight", f"{theirs}mlp.down_proj.weight", hidden, ffn)
