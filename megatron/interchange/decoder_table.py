"""Settings and tensors that Llama's architecture shares with most later ones (floor 0, pure)"""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.transformer.layer_table import layer_table
from megatron.core.transformer.model_config import TransformerConfig
from megatron.interchange.expert_table import MLP_NAMES, MlpNames, experts, mlp
from megatron.interchange.fields import KEY_VALUE_HEADS, integer, number, only, tied
from megatron.interchange.moves import Move, all_rows, grouped_qkv, rows_of_one, whole
from megatron.interchange.positions import ROPE

SILU = only("hidden_act", ("silu",), "this architecture's MLP is gated by SiLU here (`--swiglu`)")
SIZES = (
    integer("num_hidden_layers", "num_layers"),
    integer("hidden_size", "hidden_size"),
    integer("intermediate_size", "ffn_hidden_size"),
    integer("num_attention_heads", "num_attention_heads"),
    KEY_VALUE_HEADS,
    integer("max_position_embeddings", "max_position_embeddings"),
    ROPE,
    number("initializer_range", "init_method_std", 0.02),
    number("attention_dropout", "attention_dropout", 0.0),
)
LLAMA = (*SIZES, SILU, number("rms_norm_eps", "norm_epsilon", 1e-6), tied(False))
# Without dropout on residual branches: written models get none, whatever they trained with.
ALWAYS = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
}


def decoder(config: TransformerConfig, *, fused: bool = False, names: MlpNames = MLP_NAMES) -> Iterator[Move]:
    """`model.layers.N.*` and `model.norm`, with what the configuration has of biases, norms of heads and experts.
    fused: queries, keys and values in one matrix of theirs, gate and up in another."""
    hidden, head = config.hidden_size, config.kv_channels
    queries, groups = config.num_attention_heads * head, config.num_query_groups * head
    yield from whole("decoder.final_layernorm.weight", "model.norm.weight", hidden)
    for layer, layer_kind in enumerate(layer_table(config)):
        ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        for mine, yours in (("input", "input"), ("pre_mlp", "post_attention")):
            yield from whole(f"{ours}{mine}_layernorm.weight", f"{theirs}{yours}_layernorm.weight", hidden)
        for kind, columns in (("weight", (hidden,)), ("bias", ())):
            if kind == "bias" and not config.add_qkv_bias:
                continue
            rows = rows_of_one(f"{theirs}self_attn.qkv_proj.{kind}", (queries, groups, groups))
            if not fused:
                rows = [
                    all_rows(f"{theirs}self_attn.{name}_proj.{kind}", part.rows)
                    for name, part in zip("qkv", rows, strict=True)
                ]
            yield from grouped_qkv(config, f"{ours}self_attention.linear_qkv.{kind}", rows, columns)
        output = f"{ours}self_attention.linear_proj."
        yield from whole(f"{output}weight", f"{theirs}self_attn.o_proj.weight", hidden, queries)
        if config.attention_output_bias:
            yield from whole(f"{output}bias", f"{theirs}self_attn.o_proj.bias", hidden)
        for name in "qk" if config.qk_layernorm else "":
            norm = f"{ours}self_attention.{name}_layernorm.weight"
            yield from whole(norm, f"{theirs}self_attn.{name}_norm.weight", head)
        if layer_kind.experts:
            yield from experts(config, f"{ours}mlp.", f"{theirs}{names.block}", names)
        elif fused:
            width, its = layer_kind.mlp_width, f"{theirs}mlp."
            yield from whole(f"{ours}mlp.linear_fc1.weight", f"{its}gate_up_proj.weight", 2 * width, hidden)
            yield from whole(f"{ours}mlp.linear_fc2.weight", f"{its}down_proj.weight", hidden, width)
        else:
            yield from mlp(config, f"{ours}mlp.", f"{theirs}mlp.", names, layer_kind.mlp_width)
