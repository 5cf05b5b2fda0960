"""Mistral 7B and Nemo 12B (arXiv 2310.06825): Llama's tensors, and a window, which few positions do not meet"""

from megatron.interchange.architecture import Architecture
from megatron.interchange.decoder_table import ALWAYS, SILU, SIZES, decoder
from megatron.interchange.fields import HeadDim, NoDropout, Number, Tied
from megatron.interchange.positions import Window

ARCHITECTURE = Architecture(
    "mistral",
    "MistralForCausalLM",
    ALWAYS,
    (
        *SIZES,
        SILU,
        Number("rms_norm_eps", "norm_epsilon", 1e-6),
        HeadDim(),
        Tied(False),
        NoDropout(),
        Window(),
    ),
    decoder,
)
