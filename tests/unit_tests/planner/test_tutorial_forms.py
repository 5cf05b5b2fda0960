"""Against the anchors that the paper prints."""

import pytest

from megatron.planner.quantities import CommunicationError
from megatron.planner.tutorial_forms import (
    bandwidth_for,
    checkpoint_bytes,
    checkpoint_intensity,
    efficiency,
    optimizer_intensity,
    param_grad_intensity,
    transformer_params,
    working_activation_bytes,
    working_state_bytes,
)


def test_anchors_of_zero_infinity():
    peak = 70e12
    assert efficiency(param_grad_intensity(1024, 1), 70e9, peak) == pytest.approx(0.506, abs=1e-3)
    assert efficiency(optimizer_intensity(1024, 1), 4 * 70e9, peak) == pytest.approx(0.506, abs=1e-3)
    assert efficiency(optimizer_intensity(1024, 2), 1.5e12, peak) > 0.9
    assert bandwidth_for(0.9, optimizer_intensity(1024, 2), peak) < 1.5e12
    assert 1e9 < bandwidth_for(0.5, checkpoint_intensity(2048), peak) < 2e9
    assert bandwidth_for(0.5, checkpoint_intensity(8192), peak) < 1e9
    assert efficiency(100, bandwidth_for(0.8, 100, peak), peak) == pytest.approx(0.8)


def test_closed_forms_of_the_tutorial():
    assert transformer_params(80, 10 * 1024) == 100_663_296_000  # the 0.1T model of ZeRO-Infinity's table
    assert checkpoint_bytes(80, 10 * 1024, 1024, 32) == 2 * 32 * 1024 * 10240 * 80
    assert checkpoint_bytes(80, 10 * 1024, 1024, 32, 4) * 4 == checkpoint_bytes(80, 10 * 1024, 1024, 32)
    assert working_state_bytes(10 * 1024) == 16 * 10240**2
    assert working_activation_bytes(10 * 1024, 128, 1024, 4, 2) == 4 * 1024 * 2 * (163840 + 262144)


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: bandwidth_for(1, 1, 1), "wanted_efficiency"),
        (lambda: efficiency(1, 0, 1), "bandwidth_bytes_per_s"),
        (lambda: transformer_params(0, 8), "num_layers"),
        (lambda: checkpoint_bytes(1, 1, 1, 1, 0), "checkpoint_interval"),
        (lambda: param_grad_intensity(0, 1), "seq_length"),
    ],
)
def test_impossible_quantities_are_named(call, field):
    with pytest.raises(CommunicationError) as caught:
        call()
    assert caught.value.field == field
    assert str(caught.value).startswith(field)
