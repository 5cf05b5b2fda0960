"""Llama 2, 3, 3.1 and 3.2 (arXiv 2307.09288, 2407.21783)"""

from megatron.interchange.architecture import Architecture
from megatron.interchange.decoder_table import ALWAYS, LLAMA, decoder
from megatron.interchange.fields import ATTENTION_BIAS, head_dim, only

ARCHITECTURE = Architecture(
    "llama",
    "LlamaForCausalLM",
    ALWAYS,
    (
        *LLAMA,
        head_dim(),
        ATTENTION_BIAS,
        only("mlp_bias", (False,), "biases in the MLP alone have no flag (--disable-bias-linear is for all)"),
    ),
    decoder,
)
