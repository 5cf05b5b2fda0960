"""Mistral 7B and Nemo 12B (arXiv 2310.06825): Llama's tensors, and a window, which few positions do not meet"""

from megatron.interchange.architecture import Architecture
from megatron.interchange.decoder_table import ALWAYS, SILU, SIZES, decoder
from megatron.interchange.fields import head_dim, number, tied
from megatron.interchange.positions import window

ARCHITECTURE = Architecture(
    "mistral",
    "MistralForCausalLM",
    ALWAYS,
    (
        *SIZES,
        SILU,
        number("rms_norm_eps", "norm_epsilon", 1e-6),
        head_dim(),
        tied(False),
        window(),
    ),
    decoder,
)
