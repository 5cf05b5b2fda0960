"""Qwen3, dense (arXiv 2505.09388): Llama's tensors with norms of each head's queries and keys"""

from megatron.interchange.architecture import Architecture
from megatron.interchange.decoder_table import ALWAYS, SILU, SIZES, decoder
from megatron.interchange.fields import ATTENTION_BIAS, head_dim, number, tied
from megatron.interchange.positions import FULL_ATTENTION, window

ARCHITECTURE = Architecture(
    "qwen3",
    "Qwen3ForCausalLM",
    {**ALWAYS, "qk_layernorm": True},
    (
        *SIZES,
        SILU,
        number("rms_norm_eps", "norm_epsilon", 1e-6),
        head_dim(128),
        tied(False),
        ATTENTION_BIAS,
        window(enabled_by="use_sliding_window"),
        FULL_ATTENTION,
    ),
    decoder,
)
