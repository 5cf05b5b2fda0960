"""Attention: fused against written out, dropout inside, the cache."""

import pytest
import torch

from megatron.core import device
from megatron.core.module import ModelContext
from megatron.core.transformer.self_attention import CoreAttention, InferenceCache
from tests.harness.tiny_models import GQA, ROPE, SEQ, backward_microbatch, tiny_batch, tiny_config, tiny_model


def heads(n, length=12, dtype=torch.float32):
    return torch.randn(length, 2, n, 8, dtype=dtype)


@pytest.mark.parametrize("flags", [{}, GQA])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
def test_fused_equals_written_out(flags, masked, dtype, tolerance):
    torch.manual_seed(0)
    q, k, v = heads(4), heads(2 if flags else 4), heads(2 if flags else 4)
    mask = None
    if masked:
        mask = torch.rand(2, 1, 12, 12) < 0.5
        mask |= torch.ones(12, 12, dtype=torch.bool).triu(1)
        mask &= ~torch.eye(12, dtype=torch.bool)
    fused = CoreAttention(tiny_config(**flags), ModelContext(seed=1), 3)
    exact = CoreAttention(tiny_config(attention_backend="unfused", **flags), ModelContext(seed=1), 3)
    out = fused(q.to(dtype), k.to(dtype), v.to(dtype), mask)
    expected = exact(q.double(), k.double(), v.double(), mask)
    assert out.shape == (12, 2, 32)
    assert (out.double() - expected).abs().max() < tolerance


@pytest.mark.parametrize("backend", ["auto", "unfused"])
def test_attention_dropout_follows_the_clock_and_leaves_global_state(backend):
    context = ModelContext(seed=1)
    core = CoreAttention(tiny_config(attention_dropout=0.5, attention_backend=backend), context, 0)
    q, k, v = heads(4), heads(4), heads(4)
    state = torch.get_rng_state()
    first = core(q, k, v)
    context.begin_microbatch(0, 1, 1)
    other = core(q, k, v)
    context.begin_microbatch(0, 0, 0)
    assert torch.equal(core(q, k, v), first)
    assert not torch.equal(other, first)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(core.eval()(q, k, v), first)


def test_dropped_probabilities_keep_their_mean():
    core = CoreAttention(tiny_config(attention_dropout=0.3), ModelContext(seed=1), 0)
    q, k = torch.zeros(64, 2, 4, 8), torch.zeros(64, 2, 4, 8)
    out = core(q, k, torch.ones(64, 2, 4, 8))
    assert out.mean().item() == pytest.approx(1.0, abs=0.05)
    assert out.std() > 0.05


def test_qkv_rows_are_grouped():
    """Changing the value rows of group 1 changes only what its query heads send to the projection."""
    model = tiny_model(params_dtype=torch.float32, **GQA)
    attention = model.decoder.layers["0"].self_attention
    x = torch.randn(SEQ, 1, 32)
    seen = []
    attention.linear_proj.register_forward_pre_hook(lambda _m, args: seen.append(args[0].detach().clone()))
    attention(x)
    rows = attention.linear_qkv.weight.view(2, 2 + 2, 8, 32)  # groups, q q k v, head dim, h
    with torch.no_grad():
        rows[1, 3] += 1.0
    attention(x)
    changed = (seen[0] - seen[1]).abs().amax(dim=(0, 1)).view(4, 8).amax(1) > 0
    assert changed.tolist() == [False, False, True, True]


def test_cache_equals_one_pass():
    """Behind the newest token of each forward, whatever their lengths."""
    for flags in ({}, {**ROPE, **GQA}):
        model = tiny_model(**flags).eval()
        tokens, _, positions = tiny_batch()
        with torch.no_grad():
            whole = model(tokens, positions)
            for ends in ((5, 6, 10, 16), range(1, 17)):
                cache, first = InferenceCache(SEQ), 0
                for end in ends:
                    cache.begin([end - first] * 3, tokens.device)
                    assert torch.equal(cache.positions, positions[:, first:end])
                    logits = model(tokens[:, first:end], positions[:, first:end], inference_cache=cache)
                    torch.testing.assert_close(logits, whole[:, end - 1 : end], rtol=0, atol=1e-12)
                    first = end


@pytest.mark.parametrize("flags", [{}, {**ROPE, **GQA}, {"attention_backend": "unfused"}])
def test_cache_of_unequal_sequences(flags):
    """Each has the logits that it has alone: what fills a forward up changes nothing, and sequences may leave."""
    model = tiny_model(**flags).eval()
    tokens, lengths = tiny_batch()[0], [3, 9, 5]
    cache = InferenceCache(SEQ)

    def forward(rows, news, wholes):
        cache.begin(news, tokens.device)
        filled = torch.full((len(rows), max(news)), 63)
        for place, (row, new, length) in enumerate(zip(rows, news, wholes, strict=True)):
            filled[place, :new] = tokens[row, length - new : length]
        logits = model(filled, cache.positions, inference_cache=cache)
        assert logits.shape == (len(rows), 1, 64)
        for place, (row, length) in enumerate(zip(rows, wholes, strict=True)):
            alone = model(tokens[row : row + 1, :length], torch.arange(length)[None])
            torch.testing.assert_close(logits[place, 0], alone[0, -1], rtol=0, atol=1e-12)

    with torch.no_grad():
        forward([0, 1, 2], lengths, lengths)
        for more in (1, 2):
            forward([0, 1, 2], [1, 1, 1], [length + more for length in lengths])
        cache.keep([2, 0])
        forward([2, 0], [2, 1], [9, 6])
        forward([2, 0], [1, 1], [10, 7])


def test_cache_too_short_is_refused():
    with pytest.raises(AssertionError, match="cache of 3 tokens, asked for 16"):
        InferenceCache(3).begin([16, 2], torch.device("cpu"))


def test_bf16_trains():
    model = tiny_model(params_dtype=torch.bfloat16)
    model.bind_new_grads(torch.float32)
    loss = backward_microbatch(model, tiny_batch())
    assert loss.dtype == torch.float32
    assert all(
        grad.abs().max() > 0 for name, grad in model.summed_grads().items() if "k_layernorm" not in name
    )


def test_the_backward_where_16_bits_are_emulated(monkeypatch):
    """In fp32 inside, with and without autograd around it: gradients are rounded once."""
    monkeypatch.setitem(device.SHORT, torch.bfloat16, None)
    torch.manual_seed(0)
    core = CoreAttention(tiny_config(), ModelContext(seed=1), 0)
    narrow = [torch.randn(3, 4, 12, 8).bfloat16().requires_grad_() for _ in range(3)]
    exact = [one.detach().double().requires_grad_() for one in narrow]
    dy = torch.randn(3, 4, 12, 8).bfloat16()
    out = core.attend(*narrow)
    grads = torch.autograd.grad(out, narrow, dy)
    expected = torch.autograd.grad(core.attend(*exact), exact, dy.double())
    for grad, of_exact in zip(grads, expected, strict=True):
        assert grad.dtype == torch.bfloat16
        assert (grad.double() - of_exact).abs().max() < 0.02
    with torch.no_grad():
        alone, kept = core.kernel_forward(*narrow)
        assert torch.equal(alone, out)
        assert all(map(torch.equal, core.kernel_backward(kept, dy), grads))
