"""Ours against Hugging Face's GPT-2, Llama and Gemma with the same random weights, in fp64 and fp32."""

import pytest
import torch

from tests.harness.hugging_face import copy_weights
from tests.harness.tiny_models import GQA, ROPE, SEQ, SWIGLU, VARIANTS, VOCAB, tiny_batch, tiny_model

transformers = pytest.importorskip("transformers")


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
    copy_weights(hf, model)
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
    copy_weights(hf, model)
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
    copy_weights(hf, model)
    tokens, _, positions = tiny_batch()
    with torch.no_grad():
        words = model.embedding(tokens, positions).transpose(0, 1)
        rows = hf.model.embed_tokens.weight[tokens]
        assert torch.equal(words, rows * torch.tensor(48**0.5, dtype=dtype))
        expected = hf(tokens).logits
        assert (model(tokens, positions) - expected).abs().max() < tolerance * expected.abs().max()
