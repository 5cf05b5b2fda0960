"""Backward from the input alone equals autograd's."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from megatron.core.transformer.activations import mlp_activation
from tests.harness.tiny_models import tiny_config


def gated(function):
    return lambda x: function(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]


EXPECTED = {
    "gelu": ({}, F.gelu),
    "openai_gelu": ({"openai_gelu": True}, lambda x: F.gelu(x, approximate="tanh")),
    "squared_relu": ({"squared_relu": True}, lambda x: F.relu(x) ** 2),
    "swiglu": ({"swiglu": True}, gated(F.silu)),
    "geglu": ({"geglu": True}, gated(F.gelu)),
    "geglu_tanh": ({"geglu_tanh": True}, gated(lambda g: F.gelu(g, approximate="tanh"))),
    "quick_geglu": ({"quick_geglu": True}, gated(lambda g: g * torch.sigmoid(1.702 * g))),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_against_autograd(name):
    flags, function = EXPECTED[name]
    activation = mlp_activation(tiny_config(**flags))
    torch.manual_seed(0)
    x = torch.randn(6, 3, 16, dtype=torch.float64, requires_grad=True)
    expected = function(x)
    dy = torch.randn_like(expected)
    expected.backward(dy)
    before = x.detach().clone()
    torch.testing.assert_close(activation.forward(x.detach()), expected, rtol=0, atol=1e-13)
    torch.testing.assert_close(activation.backward(x.detach(), dy), x.grad, rtol=0, atol=1e-13)
    assert torch.equal(x, before), "the kept input was overwritten"
