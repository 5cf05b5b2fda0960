"""Qwen3, dense (arXiv 2505.09388): Llama's tensors with norms of each head's queries and keys"""

from megatron.interchange.architecture import Architecture
from megatron.interchange.decoder_table import ALWAYS, SILU, SIZES, decoder
from megatron.interchange.fields import AttentionBias, HeadDim, NoDropout, Number, Tied
from megatron.interchange.positions import FullAttention, Window

ARCHITECTURE = Architecture(
    "qwen3",
    "Qwen3ForCausalLM",
    {**ALWAYS, "qk_layernorm": True},
    (
        *SIZES,
        SILU,
        Number("rms_norm_eps", "norm_epsilon", 1e-6),
        HeadDim(default=128),
        Tied(False),
        AttentionBias(),
        NoDropout(),
        Window(enabled_by="use_sliding_window"),
        FullAttention(),
    ),
    decoder,
)
