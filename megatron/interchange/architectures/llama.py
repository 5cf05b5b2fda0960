"""Llama 2, 3, 3.1 and 3.2 (arXiv 2307.09288, 2407.21783)"""

from megatron.interchange.architecture import Architecture
from megatron.interchange.decoder_table import ALWAYS, SILU, SIZES, decoder
from megatron.interchange.fields import ATTENTION_BIAS, head_dim, number, only, tied

ARCHITECTURE = Architecture(
    "llama",
    "LlamaForCausalLM",
    ALWAYS,
    (
        *SIZES,
        SILU,
        number("rms_norm_eps", "norm_epsilon", 1e-6),
        head_dim(),
        tied(False),
        ATTENTION_BIAS,
        only("mlp_bias", (False,), "biases in the MLP alone have no flag (--disable-bias-linear is for all)"),
    ),
    decoder,
)
