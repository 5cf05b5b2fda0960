"""Phi-3 with 4k positions (arXiv 2404.14219): queries, keys and values in one matrix, gate and up in another"""

import functools

from megatron.interchange.architecture import Architecture
from megatron.interchange.decoder_table import ALWAYS, SILU, SIZES, decoder
from megatron.interchange.fields import dropout, head_dim, number, only, tied
from megatron.interchange.positions import ORIGINAL_POSITIONS, window

ARCHITECTURE = Architecture(
    "phi3",
    "Phi3ForCausalLM",
    ALWAYS,
    (
        *SIZES,
        SILU,
        number("rms_norm_eps", "norm_epsilon", 1e-5),
        head_dim(fixed=True),
        tied(False),
        dropout(0.0),
        window(),
        ORIGINAL_POSITIONS,
        only("attention_bias", (False,), "Phi-3 has no biases here", written=False),
    ),
    functools.partial(decoder, fused=True),
)
