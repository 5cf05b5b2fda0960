"""Ours against Hugging Face's GPT-2, Llama and Gemma with the same random weights, in fp64 and fp32."""

import pytest
import torch

from tests.harness.tiny_models import GQA, ROPE, SEQ, SWIGLU, VARIANTS, VOCAB, tiny_batch, tiny_model

transformers = pytest.importorskip("transformers")


def group_qkv(q, k, v, groups, head_dim):
    """Rows in our order: each group's queries, its key, its value."""
    parts = []
    per_group = q.shape[0] // (groups * head_dim)
    for g in range(groups):
        parts += [
            q[g * per_group * head_dim : (g + 1) * per_group * head_dim],
            k[g * head_dim : (g + 1) * head_dim],
            v[g * head_dim : (g + 1) * head_dim],
        ]
    return torch.cat(parts)


def copy_in(model, values):
    with torch.no_grad():
        names = dict(model.named_parameters())
        assert set(values) == set(names)
        for name, value in values.items():
            names[name].copy_(value)


def gpt2_weights(hf):
    values = {
        "embedding.word_embeddings.weight": hf.transformer.wte.weight,
        "embedding.position_embeddings.weight": hf.transformer.wpe.weight,
        "decoder.final_layernorm.weight": hf.transformer.ln_f.weight,
        "decoder.final_layernorm.bias": hf.transformer.ln_f.bias,
    }
    for n, block in enumerate(hf.transformer.h):
        at = f"decoder.layers.{n}."
        for ours, theirs in (("input_layernorm", block.ln_1), ("pre_mlp_layernorm", block.ln_2)):
            values[f"{at}{ours}.weight"], values[f"{at}{ours}.bias"] = theirs.weight, theirs.bias
        q, k, v = block.attn.c_attn.weight.t().chunk(3)
        values[at + "self_attention.linear_qkv.weight"] = group_qkv(q, k, v, 4, 8)
        values[at + "self_attention.linear_qkv.bias"] = group_qkv(*block.attn.c_attn.bias.chunk(3), 4, 8)
        for ours, theirs in (
            ("self_attention.linear_proj", block.attn.c_proj),
            ("mlp.linear_fc1", block.mlp.c_fc),
            ("mlp.linear_fc2", block.mlp.c_proj),
        ):
            values[f"{at}{ours}.weight"], values[f"{at}{ours}.bias"] = theirs.weight.t(), theirs.bias
    return values


def llama_weights(hf, groups, head_dim=8, tied=False):
    values = {
        "embedding.word_embeddings.weight": hf.model.embed_tokens.weight,
        "decoder.final_layernorm.weight": hf.model.norm.weight,
    }
    if not tied:
        values["output_layer.weight"] = hf.lm_head.weight
    for n, block in enumerate(hf.model.layers):
        at = f"decoder.layers.{n}."
        attention = block.self_attn
        values |= {
            at + "input_layernorm.weight": block.input_layernorm.weight,
            at + "pre_mlp_layernorm.weight": block.post_attention_layernorm.weight,
            at + "self_attention.linear_qkv.weight": group_qkv(
                attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight, groups, head_dim
            ),
            at + "self_attention.linear_proj.weight": attention.o_proj.weight,
            at + "mlp.linear_fc1.weight": torch.cat((block.mlp.gate_proj.weight, block.mlp.up_proj.weight)),
            at + "mlp.linear_fc2.weight": block.mlp.down_proj.weight,
        }
        if attention.q_proj.bias is not None:
            biases = (attention.q_proj.bias, attention.k_proj.bias, attention.v_proj.bias)
            values[at + "self_attention.linear_qkv.bias"] = group_qkv(*biases, groups, head_dim)
            values[at + "self_attention.linear_proj.bias"] = attention.o_proj.bias
    return values


def randomise(hf):
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in hf.parameters():
            parameter.normal_(0, 0.2, generator=generator)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 2e-5)])
def test_gpt2(dtype, tolerance):
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=SEQ, n_embd=32, n_layer=2, n_head=4, n_inner=64
    )
    hf = transformers.GPT2LMHeadModel(config).to(dtype).eval()
    randomise(hf)
    model = tiny_model(params_dtype=dtype, openai_gelu=True).eval()
    copy_in(model, gpt2_weights(hf))
    tokens, _, positions = tiny_batch()
    with torch.no_grad():
        assert (model(tokens, positions) - hf(tokens).logits).abs().max() < tolerance


@pytest.mark.parametrize("scaling", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 5e-5)])
def test_llama(dtype, tolerance, scaling):
    """HF's RMSNorm computes in fp32 whatever the dtype, hence 1e-6 in fp64."""
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    if scaling:
        rope = {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16384,
        rms_norm_eps=1e-5,
        rope_parameters=rope,
        tie_word_embeddings=False,
    )
    hf = transformers.LlamaForCausalLM(config).to(dtype).eval()
    randomise(hf)
    flags = {
        **SWIGLU,
        **ROPE,
        **GQA,
        "untie_embeddings_and_output_weights": True,
        "use_rope_scaling": scaling,
    }
    model = tiny_model(params_dtype=dtype, **flags).eval()
    copy_in(model, llama_weights(hf, groups=2))
    tokens, _, positions = tiny_batch()
    with torch.no_grad():
        expected = hf(tokens).logits
        assert (model(tokens, positions) - expected).abs().max() < tolerance * expected.abs().max()


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 5e-5), (torch.bfloat16, 0.1)]
)
def test_gemma(dtype, tolerance, biases):
    """Gated tanh-GELU, norms stored as w - 1, words times the root of the width; biases in attention alone.

    Of width 48, whose root is no number of bf16's: 6.9375, not 6.9282.
    """
    config = transformers.GemmaConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
        hidden_activation="gelu_pytorch_tanh",
        max_position_embeddings=SEQ,
        rms_norm_eps=1e-5,
        attention_bias=biases,
    )
    hf = transformers.GemmaForCausalLM(config).to(dtype).eval()
    randomise(hf)
    more = {"add_qkv_bias": biases, "add_attention_output_bias": biases, "hidden_size": 48}
    model = tiny_model(params_dtype=dtype, **{**VARIANTS["gemma"], **more}).eval()
    copy_in(model, llama_weights(hf, groups=1, head_dim=16, tied=True))
    tokens, _, positions = tiny_batch()
    with torch.no_grad():
        words = model.embedding(tokens, positions).transpose(0, 1)
        rows = hf.model.embed_tokens.weight[tokens]
        assert torch.equal(words, rows * torch.tensor(48**0.5, dtype=dtype))
        expected = hf(tokens).logits
        assert (model(tokens, positions) - expected).abs().max() < tolerance * expected.abs().max()
