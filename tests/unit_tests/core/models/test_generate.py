"""Generation: the cache changes nothing, filters keep what they should."""

import pytest
import torch

from megatron.core.models.gpt.generate import Sampling, choose, generate
from tests.harness.tiny_models import GQA, ROPE, VOCAB, tiny_batch, tiny_model


@pytest.mark.parametrize(
    "flags", [{}, {**ROPE, **GQA}, {"attention_backend": "unfused"}], ids=["gpt", "rope", "exact"]
)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.9, top_k=20, top_p=0.9, seed=5)])
def test_cache_equals_full_recomputation(flags, sampling):
    model = tiny_model(**flags)
    prompt = tiny_batch()[0][:, :4]
    fast = generate(model, prompt, 10, sampling=sampling)
    slow = generate(model, prompt, 10, sampling=sampling, use_cache=False)
    assert fast.shape == (3, 14)
    assert torch.equal(fast, slow)
    assert torch.equal(fast[:, :4], prompt)
    assert model.training


def test_greedy_is_the_argmax_of_the_model():
    model = tiny_model()
    out = generate(model, tiny_batch()[0][:, :4], 3)
    with torch.no_grad():
        positions = torch.arange(6).expand(3, 6)
        assert torch.equal(model.eval()(out[:, :6], positions)[:, -1].argmax(-1), out[:, 6])


def test_padding_of_the_vocabulary_is_never_chosen():
    model = tiny_model()
    out = generate(model, tiny_batch()[0][:, :2] % 3, 10, sampling=Sampling(temperature=5.0), vocab_size=3)
    assert out.max() < 3
    assert VOCAB > 3


def test_stops_at_end_of_document():
    model = tiny_model()
    prompt = tiny_batch(batch=1)[0][:, :4]
    free = generate(model, prompt, 8)
    eod = int(free[0, 6])
    stopped = generate(model, prompt, 8, eod=eod)
    first = (free[0, 4:] == eod).nonzero()[0].item()
    assert torch.equal(stopped[0], free[0, : 4 + first + 1])


def test_top_k_and_top_p():
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0]])
    for sampling, allowed in (
        (Sampling(temperature=3.0, top_k=2), {1, 2}),
        (Sampling(temperature=1.0, top_p=0.5), {1}),
        (Sampling(temperature=3.0), {0, 1, 2, 3}),
    ):
        seen = {int(choose(logits, sampling, step)) for step in range(200)}
        assert seen == allowed


def test_seed_decides():
    logits = torch.zeros(1, 50)
    draws = [[int(choose(logits, Sampling(1.0, seed=s), i)) for i in range(10)] for s in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]


def test_too_long_is_refused():
    with pytest.raises(ValueError, match="exceed the model's 16 learned positions"):
        generate(tiny_model(), tiny_batch()[0], 1)
    with pytest.raises(ValueError, match="--top-p"):
        Sampling(top_p=0.0)
