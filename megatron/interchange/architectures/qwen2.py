"""Qwen2 and Qwen2.5 (arXiv 2407.10671, 2412.15115): Llama's tensors with biases on queries, keys and values"""

from megatron.interchange.architecture import Architecture
from megatron.interchange.decoder_table import ALWAYS, LLAMA, decoder
from megatron.interchange.fields import head_dim
from megatron.interchange.positions import SOME_WINDOWS

ARCHITECTURE = Architecture(
    "qwen2",
    "Qwen2ForCausalLM",
    {**ALWAYS, "add_qkv_bias": True},
    (
        *LLAMA,
        head_dim(fixed=True),
        *SOME_WINDOWS,
    ),
    decoder,
)
