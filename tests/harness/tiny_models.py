"""Tiny models of every variant: ours, and the reference with the same weights."""

import torch

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.harness.reference_gpt import ReferenceConfig, ReferenceGPT

VOCAB = 64
SEQ = 16

SWIGLU = {"swiglu": True, "add_bias_linear": False, "normalization": "RMSNorm"}
ROPE = {"position_embedding_type": "rope"}
GQA = {"group_query_attention": True, "num_query_groups": 2}
LONG_ROPE = {**ROPE, "kv_channels": 16, "rotary_base": 500000, "use_rope_scaling": True}

# Flags that differ from the smallest GPT.
VARIANTS = {
    "gpt": {},
    "no_positions": {"position_embedding_type": "none"},
    "rope": ROPE,
    "rope_percent": {**ROPE, "rotary_percent": 0.5},
    "rope_interleaved": {**ROPE, "rotary_interleaved": True},
    "rope_interleaved_percent": {**ROPE, "rotary_interleaved": True, "rotary_percent": 0.5},
    "rope_interpolation": {**ROPE, "rotary_seq_len_interpolation_factor": 4},
    "rope_llama31": {**LONG_ROPE, "rope_scaling_factor": 8.0},
    "gqa": GQA,
    "mqa_rope": {**ROPE, "group_query_attention": True, "num_query_groups": 1},
    "kv_channels": {"kv_channels": 12},
    "rmsnorm": {"normalization": "RMSNorm"},
    "layernorm_1p": {"apply_layernorm_1p": True},
    "rmsnorm_1p": {"normalization": "RMSNorm", "apply_layernorm_1p": True},
    "qk_layernorm": {"qk_layernorm": True},
    "qk_rmsnorm_gqa_rope": {**ROPE, **GQA, "qk_layernorm": True, "normalization": "RMSNorm"},
    "swiglu": {"swiglu": True},
    "squared_relu": {"squared_relu": True},
    "openai_gelu": {"openai_gelu": True},
    "quick_geglu": {"quick_geglu": True},
    "no_bias": {"add_bias_linear": False},
    "qkv_bias": {"add_bias_linear": False, "add_qkv_bias": True},
    "untied": {"untie_embeddings_and_output_weights": True},
    "exact_attention": {"attention_backend": "unfused"},
    "exact_attention_layer_scaling": {
        **GQA,
        "attention_backend": "unfused",
        "apply_query_key_layer_scaling": True,
        "attention_softmax_in_fp32": True,
    },
    "llama": {**SWIGLU, **ROPE, **GQA, "untie_embeddings_and_output_weights": True},
}


def tiny_config(**flags) -> TransformerConfig:
    """Two layers of width 32, dropout off unless asked for."""
    base = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "ffn_hidden_size": 64,
        "seq_length": SEQ,
        "max_position_embeddings": SEQ,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }
    return TransformerConfig(**{**base, **flags}).resolved()


def tiny_model(*, seed: int = 7, params_dtype: torch.dtype = torch.float64, **flags) -> GPTModel:
    """Our model with gradient buffers of its own, biases and norms moved off their symmetric start."""
    model = GPTModel(tiny_config(**flags), padded_vocab_size=VOCAB, seed=seed, params_dtype=params_dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                noise = torch.empty(parameter.shape, dtype=torch.float32).normal_(0, 0.1, generator=generator)
                parameter.add_(noise)
    model.bind_new_grads()
    return model


def reference_config(c: TransformerConfig) -> ReferenceConfig:
    activations = ("swiglu", "quick_geglu", "squared_relu")
    activation = next((name for name in activations if getattr(c, name)), "gelu")
    return ReferenceConfig(
        num_layers=c.num_layers,
        hidden=c.hidden_size,
        heads=c.num_attention_heads,
        groups=c.num_query_groups,
        head_dim=c.kv_channels,
        ffn=c.ffn_hidden_size,
        vocab=VOCAB,
        max_positions=c.max_position_embeddings,
        positions=c.position_embedding_type,
        rotary_base=c.rotary_base,
        rotary_percent=c.rotary_percent,
        rotary_interleaved=c.rotary_interleaved,
        rotary_interpolation=c.rotary_seq_len_interpolation_factor or 1,
        llama31_factor=c.rope_scaling_factor if c.use_rope_scaling else None,
        norm=c.normalization,
        norm_1p=c.apply_layernorm_1p,
        eps=c.norm_epsilon,
        qk_norm=c.qk_layernorm,
        activation="gelu_tanh" if c.openai_gelu else activation,
        bias=c.add_bias_linear,
        qkv_bias=c.add_qkv_bias,
        tied=not c.untie_embeddings_and_output_weights,
    )


def reference_of(model: GPTModel) -> ReferenceGPT:
    """The reference with this model's weights."""
    reference = ReferenceGPT(reference_config(model.config)).to(next(model.parameters()).dtype)
    reference.load_state_dict(model.state_dict())
    return reference


def tiny_batch(
    seed: int = 0, batch: int = 3, seq: int = SEQ
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """tokens, labels, position ids [b, s]."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(VOCAB, (batch, seq + 1), generator=generator)
    positions = torch.arange(seq).expand(batch, seq)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous(), positions


def backward_microbatch(
    model: GPTModel, batch, *, iteration: int = 0, index: int = 0, mask=None
) -> torch.Tensor:
    """Mean loss of one microbatch; gradients are added to the model's buffers."""
    tokens, labels, positions = batch
    model.context.begin_microbatch(iteration, index, index)
    loss = model(tokens, positions, mask, labels=labels).mean()
    loss.backward()
    return loss.detach()
