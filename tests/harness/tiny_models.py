"""Tiny models of every variant: ours, and the reference with the same weights."""

import torch

from megatron.core.models.gpt.generate import GREEDY, Sampling, choose
from megatron.core.models.gpt.gpt import GPTModel
from megatron.core.param_meta import ParamMeta
from megatron.core.tensor_parallel.mappings import TensorParallel
from megatron.core.transformer.layer_table import layer_table
from megatron.core.transformer.model_config import TransformerConfig
from tests.harness.reference_gpt import GATES, ReferenceConfig, ReferenceGPT
from tests.harness.reference_moe import ReferenceExperts

VOCAB = 64
SEQ = 16

SWIGLU = {"swiglu": True, "add_bias_linear": False, "normalization": "RMSNorm"}
ROPE = {"position_embedding_type": "rope"}
GQA = {"group_query_attention": True, "num_query_groups": 2}
LONG_ROPE = {**ROPE, "kv_channels": 16, "rotary_base": 500000, "use_rope_scaling": True}
GEMMA = {
    **{"position_embedding_type": "rope", "normalization": "RMSNorm", "apply_layernorm_1p": True},
    **{
        "geglu_tanh": True,
        "add_bias_linear": False,
        "embedding_multiplier": "sqrt_hidden",
        "kv_channels": 16,
    },
    **{"group_query_attention": True, "num_query_groups": 1},
}

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
    "geglu": {"geglu": True},
    "geglu_tanh": {"geglu_tanh": True, "add_bias_linear": False},
    "attention_bias": {"add_bias_linear": False, "add_qkv_bias": True, "add_attention_output_bias": True},
    "embedding_multiplier": {"embedding_multiplier": 3.5},
    "gemma": GEMMA,
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
    return tiny_stage(tiny_config(**flags), seed=seed, params_dtype=params_dtype)


def tiny_stage(
    config: TransformerConfig,
    *,
    seed: int = 7,
    params_dtype: torch.dtype = torch.float64,
    tp: TensorParallel | None = None,
    **stage,
) -> GPTModel:
    """A part of that model: its weights are those of `tiny_model`'s, wherever they are (stage: see GPTModel)."""
    whole = GPTModel(config, padded_vocab_size=VOCAB, seed=seed, device="meta")
    generator = torch.Generator().manual_seed(seed)
    noise = {
        name: torch.empty(parameter.shape, dtype=torch.float32, device="cpu").normal_(
            0, 0.1, generator=generator
        )
        for name, parameter in whole.named_parameters()
        if parameter.dim() == 1
    }
    model = GPTModel(config, padded_vocab_size=VOCAB, seed=seed, params_dtype=params_dtype, tp=tp, **stage)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            for part in model.param_meta[name].parts if name in noise else ():
                part.view(parameter).add_(noise[name].narrow(0, part.offset[0], part.shape[0]))
    model.bind_new_grads()
    return model


Parts = dict[str, tuple[ParamMeta, torch.Tensor]]  # a rank's tensors, with the facts about them


def parts_of(model: GPTModel, tensors: dict[str, torch.Tensor]) -> Parts:
    """Tensors of the model's local shapes by parameter name, ready to be joined by `join_parts`."""
    return {name: (model.param_meta[name], tensor.detach().clone()) for name, tensor in tensors.items()}


def join_parts(ranks: list[Parts], *, gradients: bool) -> dict[str, torch.Tensor]:
    """The whole tensors from every tensor parallel rank's parts, as an engine would see them.

    Each element is held by exactly as many ranks as its region says. Partial gradients are added, other copies are
    the same bit for bit.
    """
    joined = {}
    for name, (meta, tensor) in ranks[0].items():
        whole = torch.zeros(meta.global_shape, dtype=tensor.dtype)
        holders = torch.zeros(meta.global_shape, dtype=torch.int64)
        copies = torch.zeros(meta.global_shape, dtype=torch.int64)
        for parts in ranks:
            meta, tensor = parts[name]
            assert tuple(tensor.shape) == meta.local_shape, name
            for part in meta.parts:
                place = tuple(slice(at, at + size) for at, size in zip(part.offset, part.shape, strict=True))
                value = part.view(tensor)
                if gradients and part.partial:
                    whole[place] += value
                elif holders[place].any():
                    assert torch.equal(whole[place], value), f"{name}: copies differ"
                else:
                    whole[place] = value
                holders[place] += 1
                copies[place] = part.copies
        assert torch.equal(holders, copies), f"{name}: copies {copies.unique()}, held by {holders.unique()}"
        joined[name] = whole
    return joined


def reference_config(c: TransformerConfig) -> ReferenceConfig:
    activations = (*GATES, "squared_relu")
    activation = next((name for name in activations if getattr(c, name)), "gelu")
    factor = c.embedding_multiplier
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
        attention_output_bias=c.add_attention_output_bias,
        embedding_factor=c.hidden_size**0.5 if factor == "sqrt_hidden" else factor or 1.0,
        tied=not c.untie_embeddings_and_output_weights,
        experts=None if c.num_experts is None else reference_experts(c),
    )


def reference_experts(c: TransformerConfig) -> ReferenceExperts:
    words, coefficients = c.moe_router_load_balancing_type, c.moe_aux_loss_coeff
    losses = dict(zip(words, coefficients, strict=True))
    losses = {word: one for word, one in losses.items() if one and word.endswith("aux_loss")}
    return ReferenceExperts(
        num=c.num_experts,
        topk=c.moe_router_topk,
        width=c.moe_ffn_hidden_size,
        score=c.moe_router_score_function,
        before=c.moe_router_pre_softmax,
        factor=c.moe_router_topk_scaling_factor or 1.0,
        groups=c.moe_router_num_groups or 1,
        group_topk=c.moe_router_group_topk or 1,
        losses=losses | ({"z_loss": c.moe_z_loss_coeff} if c.moe_z_loss_coeff else {}),
        capacity=c.moe_expert_capacity_factor,
        by_position=c.moe_token_drop_policy == "position",
        shared=c.moe_shared_expert_intermediate_size or 0,
        shared_gate=c.moe_shared_expert_gate,
        sinkhorn="sinkhorn" in words,
        biased=c.moe_router_enable_expert_bias,
        pattern=tuple(int(kind.experts is not None) for kind in layer_table(c)),
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


def make_talkative(model: GPTModel) -> GPTModel:
    """Larger matrices: with initial weights a model writes one token again and again, whatever it was given."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(20 if weight.dim() > 1 else 1)
    return model


def written_without_cache(
    model: GPTModel, prompts: list[list[int]], new_tokens: int, sampling: Sampling = GREEDY
) -> list[list[int]]:
    """What the model writes behind each prompt, alone, every step computed from its beginning."""
    model.eval()
    found = []
    for number, prompt in enumerate(prompts):
        ids = list(prompt)
        for step in range(new_tokens):
            with torch.no_grad():
                logits = model(torch.tensor([ids]), torch.arange(len(ids))[None])[:, -1]
            ids.append(int(choose(logits, sampling, [(number, step)])))
        found.append(ids[len(prompt) :])
    return found
