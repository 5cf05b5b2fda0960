"""Rotary positions: relative by construction, exact backward, tables grown on demand."""

import pytest
import torch

from megatron.core.transformer.rotary import RotaryEmbedding, apply_rope, inverse_frequencies
from tests.harness.tiny_models import LONG_ROPE, tiny_config


def make(**flags):
    return RotaryEmbedding(tiny_config(position_embedding_type="rope", **flags))


@pytest.mark.parametrize("interleaved", [False, True])
def test_products_depend_on_distance_only(interleaved):
    rotary = make()
    torch.manual_seed(0)
    q, k = (torch.randn(1, 1, 1, 8, dtype=torch.float64) for _ in range(2))

    def product(at, distance):
        a = apply_rope(q, *rotary(32, q, torch.tensor([[at]])), interleaved)
        b = apply_rope(k, *rotary(32, k, torch.tensor([[at + distance]])), interleaved)
        return (a * b).sum().item()

    assert product(0, 3) == pytest.approx(product(11, 3), abs=1e-5)  # angles are fp32
    assert product(0, 3) != pytest.approx(product(0, 4), abs=1e-3)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("percent", [1.0, 0.5])
def test_gradient(interleaved, percent):
    rotary = make(rotary_percent=percent)
    t = torch.randn(4, 2, 3, 8, dtype=torch.float64, requires_grad=True)
    cos, sin = rotary(6, t, torch.tensor([[2, 3, 4, 5], [0, 1, 4, 2]]))
    assert torch.autograd.gradcheck(lambda u: apply_rope(u, cos, sin, interleaved), (t,))
    rest = int(8 * percent)
    assert torch.equal(apply_rope(t, cos, sin, interleaved)[..., rest:], t[..., rest:])


def test_table_grows_and_slices():
    rotary = make()
    like = torch.zeros(1)
    cos, _ = rotary(4, like)
    longer, _ = rotary(32, like)
    assert longer.shape == (32, 1, 1, 4)
    assert torch.equal(longer[:4], cos)
    own, _ = rotary(9, like, torch.tensor([[0, 8], [3, 2], [1, 1]]))
    assert own.shape == (2, 3, 1, 4)
    assert torch.equal(own[1, 0], longer[8, 0])
    assert torch.equal(own[:, 1], longer[[3, 2], 0])


def test_interpolation_divides_positions():
    like = torch.zeros(1)
    assert torch.equal(make(rotary_seq_len_interpolation_factor=4)(9, like)[0][8], make()(3, like)[0][2])


def test_llama31_scaling_bands():
    plain = inverse_frequencies(tiny_config(**{**LONG_ROPE, "use_rope_scaling": False}))
    scaled = inverse_frequencies(tiny_config(**LONG_ROPE))
    ratio = plain / scaled
    assert ratio[0].item() == 1.0  # short waves stay
    assert ratio[-1].item() == pytest.approx(8.0)  # long ones are stretched
    assert ((ratio > 1.0) & (ratio < 8.0)).any()  # and some are between
