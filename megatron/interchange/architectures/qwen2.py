"""Qwen2 and Qwen2.5 (arXiv 2407.10671, 2412.15115): Llama's tensors with biases on queries, keys and values"""

from megatron.interchange.architecture import Architecture
from megatron.interchange.decoder_table import ALWAYS, SILU, SIZES, decoder
from megatron.interchange.fields import HeadDim, NoDropout, Number, Tied
from megatron.interchange.positions import FullAttention, Window

ARCHITECTURE = Architecture(
    "qwen2",
    "Qwen2ForCausalLM",
    {**ALWAYS, "add_qkv_bias": True},
    (
        *SIZES,
        SILU,
        Number("rms_norm_eps", "norm_epsilon", 1e-6),
        HeadDim(fixed=True),
        Tied(False),
        NoDropout(),
        Window(enabled_by="use_sliding_window"),
        FullAttention(),
    ),
    decoder,
)
