"""GPT-2 (Radford et al., 2019): matrices stored [in, out], queries, keys and values in one of them"""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.transformer.model_config import TransformerConfig
from megatron.interchange.architecture import Architecture
from megatron.interchange.fields import Dropout, Inner, Number, Only, Size, Tied, Vocabulary
from megatron.interchange.moves import Move, Rows, all_rows, grouped_qkv, stacked, whole


def tensors(config: TransformerConfig) -> Iterator[Move]:
    hidden, ffn = config.hidden_size, config.ffn_hidden_size
    positions = "embedding.position_embeddings.weight", "transformer.wpe.weight"
    yield from whole(*positions, config.max_position_embeddings, hidden)
    yield from _norm("decoder.final_layernorm", "transformer.ln_f", hidden)
    for layer in range(config.num_layers):
        ours, theirs = f"decoder.layers.{layer}.", f"transformer.h.{layer}."
        yield from _norm(f"{ours}input_layernorm", f"{theirs}ln_1", hidden)
        yield from _norm(f"{ours}pre_mlp_layernorm", f"{theirs}ln_2", hidden)
        for kind, columns in (("weight", (hidden,)), ("bias", ())):
            fused = f"{theirs}attn.c_attn.{kind}"
            rows = [Rows(fused, 3 * hidden, part * hidden, hidden) for part in range(3)]
            into = f"{ours}self_attention.linear_qkv.{kind}"
            yield from grouped_qkv(config, into, rows, columns, transposed=True)
        for mine, yours, rows_out, inputs in (
            ("self_attention.linear_proj", "attn.c_proj", hidden, hidden),
            ("mlp.linear_fc1", "mlp.c_fc", ffn, hidden),
            ("mlp.linear_fc2", "mlp.c_proj", hidden, ffn),
        ):
            for kind, columns in (("weight", (inputs,)), ("bias", ())):
                part = all_rows(f"{theirs}{yours}.{kind}", rows_out)
                yield from stacked(f"{ours}{mine}.{kind}", [part], columns, transposed=True)


def _norm(ours: str, theirs: str, hidden: int) -> Iterator[Move]:
    for kind in ("weight", "bias"):
        yield from whole(f"{ours}.{kind}", f"{theirs}.{kind}", hidden)


ARCHITECTURE = Architecture(
    "gpt2",
    "GPT2LMHeadModel",
    {"position_embedding_type": "learned_absolute", "normalization": "LayerNorm", "openai_gelu": True},
    (
        Size("n_layer", "num_layers"),
        Size("n_embd", "hidden_size"),
        Size("n_head", "num_attention_heads"),
        Size("n_positions", "max_position_embeddings"),
        Inner("n_inner", factor=4),
        Vocabulary(),
        Number("layer_norm_epsilon", "norm_epsilon", 1e-5),
        Number("initializer_range", "init_method_std", 0.02),
        Number("attn_pdrop", "attention_dropout", 0.1),
        Dropout(("resid_pdrop", "embd_pdrop"), default=0.1),
        Tied(True),
        Only("activation_function", ("gelu_new", "gelu_pytorch_tanh"), "GPT-2's GELU is the tanh one here"),
        Only("scale_attn_weights", (True,), "scores are divided by the root of the head dimension here"),
        Only("scale_attn_by_inverse_layer_idx", (False,), "scores scaled by layer cannot be expressed"),
        Only("reorder_and_upcast_attn", (False, True), "true or false"),
    ),
    tensors,
    word="transformer.wte.weight",
    base="transformer.",
    ignored=(r".*\.attn\.(masked_)?bias",),
)
