"""Published shapes have the published number of parameters."""

import pytest
import torch

from megatron.core.models.gpt.gpt import GPTModel
from tests.unit_tests.core.models.published_shapes import SHAPES, published

BILLIONS = {  # name: (vocabulary, parameters in the source, relative tolerance)
    "gpt3-175b": (50257, 175.0, 0.01),
    "llama2-7b": (32000, 6.738, 0.001),
    "llama2-70b": (32000, 68.977, 0.001),
    "llama3-8b": (128256, 8.030, 0.001),
    "llama3-70b": (128256, 70.554, 0.001),
    "llama3.1-8b": (128256, 8.030, 0.001),
    "gpt3-125m": (50257, 0.125, 0.01),
    "gemma-2b": (256128, 0.524550144 + 1.981884416, 1e-12),  # embedding and the rest (table 2)
    "gemma-7b": (256128, 0.786825216 + 7.751248896, 1e-12),
}


@pytest.mark.parametrize("name", BILLIONS)
def test_parameter_counts(name):
    vocabulary, billions, tolerance = BILLIONS[name]
    model = GPTModel(
        published(name), padded_vocab_size=vocabulary, seed=1, device="meta", params_dtype=torch.bfloat16
    )
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, rel=tolerance)


def test_every_shape_resolves():
    for name in SHAPES:
        assert published(name).ffn_hidden_size > 0
