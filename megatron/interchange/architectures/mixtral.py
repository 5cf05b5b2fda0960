"""Mixtral 8x7B and 8x22B (arXiv 2401.04088): Mistral's attention, and experts, of which a token meets two"""

import functools

from megatron.interchange.architecture import Architecture
from megatron.interchange.decoder_table import ALWAYS, SILU, SIZES, decoder
from megatron.interchange.expert_table import EXPERT_WIDTH, MlpNames, routed
from megatron.interchange.fields import head_dim, number, only, tied
from megatron.interchange.positions import window

ARCHITECTURE = Architecture(
    "mixtral",
    "MixtralForCausalLM",
    ALWAYS,
    (
        *(field for field in SIZES if field.keys != EXPERT_WIDTH.keys),
        EXPERT_WIDTH,
        *routed("num_local_experts"),
        SILU,
        number("rms_norm_eps", "norm_epsilon", 1e-5),
        tied(False),
        head_dim(),
        window(),
        only("router_jitter_noise", (0.0, 0), "there, noise is on what experts see, too", written=False),
    ),
    functools.partial(decoder, names=MlpNames("block_sparse_moe.", "w1", "w3", "w2")),
)
