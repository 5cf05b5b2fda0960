"""Qwen3-MoE (arXiv 2505.09388): Qwen3's attention, and many small experts"""

from megatron.interchange.architecture import Architecture
from megatron.interchange.decoder_table import ALWAYS, LLAMA, decoder
from megatron.interchange.expert_table import SOME_LAYERS, routed
from megatron.interchange.fields import ATTENTION_BIAS, head_dim
from megatron.interchange.positions import SOME_WINDOWS

ARCHITECTURE = Architecture(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    {**ALWAYS, "qk_layernorm": True},
    (
        *LLAMA,
        head_dim(),
        ATTENTION_BIAS,
        *SOME_WINDOWS,
        *routed("num_experts"),
        *SOME_LAYERS,
    ),
    decoder,
)
