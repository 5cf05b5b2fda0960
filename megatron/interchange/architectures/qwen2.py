"""Qwen2 and Qwen2.5 (arXiv 2407.10671, 2412.15115): Llama's tensors with biases on queries, keys and values"""

from megatron.interchange.architecture import Architecture
from megatron.interchange.decoder_table import ALWAYS, SILU, SIZES, decoder
from megatron.interchange.fields import head_dim, number, tied
from megatron.interchange.positions import FULL_ATTENTION, window

ARCHITECTURE = Architecture(
    "qwen2",
    "Qwen2ForCausalLM",
    {**ALWAYS, "add_qkv_bias": True},
    (
        *SIZES,
        SILU,
        number("rms_norm_eps", "norm_epsilon", 1e-6),
        head_dim(fixed=True),
        tied(False),
        window(enabled_by="use_sliding_window"),
        FULL_ATTENTION,
    ),
    decoder,
)
