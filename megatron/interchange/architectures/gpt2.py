"""GPT-2 (Radford et al., 2019): matrices stored [in, out], queries, keys and values in one of them"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.core.transformer.model_config import TransformerConfig
from megatron.interchange.architecture import Architecture
from megatron.interchange.fields import Field, Json, dropout, flag, integer, integer_of, number, only, tied
from megatron.interchange.moves import Move, all_rows, grouped_qkv, rows_of_one, stacked, whole


def tensors(config: TransformerConfig) -> Iterator[Move]:
    hidden, ffn = config.hidden_size, config.ffn_hidden_size
    positions = "embedding.position_embeddings.weight", "transformer.wpe.weight"
    yield from whole(*positions, config.max_position_embeddings, hidden)
    for kind in ("weight", "bias"):
        yield from whole(f"decoder.final_layernorm.{kind}", f"transformer.ln_f.{kind}", hidden)
    for layer in range(config.num_layers):
        ours, theirs = f"decoder.layers.{layer}.", f"transformer.h.{layer}."
        for kind, matrix in (("weight", True), ("bias", False)):
            yield from whole(f"{ours}input_layernorm.{kind}", f"{theirs}ln_1.{kind}", hidden)
            yield from whole(f"{ours}pre_mlp_layernorm.{kind}", f"{theirs}ln_2.{kind}", hidden)
            inputs = (hidden,) if matrix else ()
            rows = rows_of_one(f"{theirs}attn.c_attn.{kind}", (hidden, hidden, hidden))
            into = f"{ours}self_attention.linear_qkv.{kind}"
            yield from grouped_qkv(config, into, rows, inputs, transposed=True)
            for mine, yours, outputs, inputs in (
                ("self_attention.linear_proj", "attn.c_proj", hidden, (hidden,)),
                ("mlp.linear_fc1", "mlp.c_fc", ffn, (hidden,)),
                ("mlp.linear_fc2", "mlp.c_proj", hidden, (ffn,)),
            ):
                parts = [all_rows(f"{theirs}{yours}.{kind}", outputs)]
                yield from stacked(f"{ours}{mine}.{kind}", parts, inputs if matrix else (), transposed=True)


def _read_inner(json: Json, given: Json) -> dict[str, Any]:
    usual = json.get("n_inner") is None
    return {"ffn_hidden_size": 4 * integer_of(json, "n_embd") if usual else integer_of(json, "n_inner")}


def _write_inner(config: TransformerConfig) -> dict[str, Any]:
    usual = config.ffn_hidden_size == 4 * config.hidden_size
    return {"n_inner": None if usual else config.ffn_hidden_size}


_GELU = only("activation_function", ("gelu_new", "gelu_pytorch_tanh", "gelu"), "not built for GPT-2")

ARCHITECTURE = Architecture(
    "gpt2",
    "GPT2LMHeadModel",
    {"position_embedding_type": "learned_absolute", "normalization": "LayerNorm"},
    (
        integer("n_layer", "num_layers"),
        integer("n_embd", "hidden_size"),
        integer("n_head", "num_attention_heads"),
        integer("n_positions", "max_position_embeddings"),
        Field(("n_inner",), f"{flag('ffn_hidden_size')}, 4 x `n_embd` where null", _read_inner, _write_inner),
        number("layer_norm_epsilon", "norm_epsilon", 1e-5),
        number("initializer_range", "init_method_std", 0.02),
        number("attn_pdrop", "attention_dropout", 0.1),
        dropout(0.1),
        tied(True),
        Field(
            _GELU.keys,
            f"{flag('openai_gelu')}, without it for `gelu`; gelu_new or gelu_pytorch_tanh otherwise",
            lambda json, given: {**_GELU.read(json, given), "openai_gelu": json.get(*_GELU.keys) != "gelu"},
            lambda config: {_GELU.keys[0]: "gelu_new" if config.openai_gelu else "gelu"},
        ),
        only("scale_attn_weights", (True,), "scores are divided by the root of the head dimension here"),
        only("scale_attn_by_inverse_layer_idx", (False,), "scores scaled by layer cannot be expressed"),
        only("reorder_and_upcast_attn", (False, True), "how scores are rounded there"),
    ),
    tensors,
    word="transformer.wte.weight",
    base="transformer.",
    ignored=(r".*\.attn\.(masked_)?bias",),
)
