"""Qwen3, dense (arXiv 2505.09388): Llama's tensors with norms of each head's queries and keys"""

from megatron.interchange.architecture import Architecture
from megatron.interchange.decoder_table import ALWAYS, LLAMA, decoder
from megatron.interchange.fields import ATTENTION_BIAS, head_dim
from megatron.interchange.positions import SOME_WINDOWS

ARCHITECTURE = Architecture(
    "qwen3",
    "Qwen3ForCausalLM",
    {**ALWAYS, "qk_layernorm": True},
    (
        *LLAMA,
        head_dim(128),
        ATTENTION_BIAS,
        *SOME_WINDOWS,
    ),
    decoder,
)
