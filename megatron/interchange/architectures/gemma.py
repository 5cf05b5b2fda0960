"""Gemma 1 (arXiv 2403.08295): Llama's tensors, norms around 1, scaled word embeddings, an MLP gated by tanh GELU"""

from megatron.interchange.architecture import Architecture
from megatron.interchange.decoder_table import SIZES, decoder
from megatron.interchange.fields import ATTENTION_BIAS, head_dim, number, only, tied

_WHY = "Gemma's MLP is gated by the tanh approximation of GELU (--geglu-tanh)"

ARCHITECTURE = Architecture(
    "gemma",
    "GemmaForCausalLM",
    {
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "apply_layernorm_1p": True,
        "geglu_tanh": True,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "embedding_multiplier": "sqrt_hidden",
    },
    (
        *SIZES,
        # Older files say "gelu" in the first field, and mean tanh unless the second says otherwise.
        only("hidden_act", ("gelu_pytorch_tanh", "gelu"), _WHY),
        only("hidden_activation", ("gelu_pytorch_tanh", None), _WHY),
        only("use_bidirectional_attention", (None, False), "attention is causal here", written=False),
        number("rms_norm_eps", "norm_epsilon", 1e-6),
        head_dim(256),
        tied(True),
        ATTENTION_BIAS,
    ),
    decoder,
)
