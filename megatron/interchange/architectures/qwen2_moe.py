"""Qwen1.5-MoE and Qwen2-MoE (arXiv 2407.10671): Qwen2's attention, many small experts, and a gated one for all"""

from megatron.interchange.architecture import Architecture
from megatron.interchange.decoder_table import ALWAYS, LLAMA, decoder
from megatron.interchange.expert_table import SOME_LAYERS, routed
from megatron.interchange.fields import Field, flag, head_dim, integer, truth_of
from megatron.interchange.positions import SOME_WINDOWS

ARCHITECTURE = Architecture(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    {**ALWAYS, "moe_shared_expert_gate": True},
    (
        *LLAMA,
        head_dim(fixed=True),
        *SOME_WINDOWS,
        *routed("num_experts"),
        *SOME_LAYERS,
        integer("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
        Field(
            ("qkv_bias",),
            f"{flag('add_qkv_bias')}, true where it is left out",
            lambda json, given: {"add_qkv_bias": truth_of(json, "qkv_bias", True)},
            lambda config: {"qkv_bias": config.add_qkv_bias},
        ),
    ),
    decoder,
)
