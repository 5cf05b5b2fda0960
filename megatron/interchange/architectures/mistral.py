"""Mistral 7B and Nemo 12B (arXiv 2310.06825): Llama's tensors, and a window, which few positions do not meet"""

from megatron.interchange.architecture import Architecture
from megatron.interchange.decoder_table import ALWAYS, LLAMA, decoder
from megatron.interchange.fields import head_dim
from megatron.interchange.positions import window

ARCHITECTURE = Architecture(
    "mistral",
    "MistralForCausalLM",
    ALWAYS,
    (
        *LLAMA,
        head_dim(),
        window(),
    ),
    decoder,
)
