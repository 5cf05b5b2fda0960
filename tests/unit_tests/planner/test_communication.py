"""Against printed figures: the slides' criteria and case study; times by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.planner.communication import (
    Experts,
    Rates,
    WireBytes,
    backward_min_tokens,
    forward_min_tokens,
    layer_hiding,
    tokens_per_rank,
)
from megatron.planner.quantities import CommunicationError

BF16_WIRE = WireBytes(2, 2)


def rates(tp_size=1):
    return Rates.of_node(600e12, 340e9, tp_size)


@pytest.mark.parametrize(
    ("tp_size", "bandwidth", "forward", "backward", "slide_forward", "slide_backward"),
    [
        (1, 340, "1764.71", "2647.06", "1.8K", "2.6K"),
        (2, 170, "3529.41", "5294.12", "3.5K", "5.3K"),
        (4, 85, "7058.82", "10588.24", "7.1K", "10.6K"),
        (8, 42.5, "14117.65", "21176.47", "14.1K", "21.2K"),
    ],
)
def test_dense_minimum_tokens_of_the_slides(
    tp_size, bandwidth, forward, backward, slide_forward, slide_backward
):
    at = rates(tp_size)
    assert at.bandwidth_bytes_per_s == bandwidth * 1e9
    for got, exact, slide in (
        (forward_min_tokens(at), forward, slide_forward),
        (backward_min_tokens(at), backward, slide_backward),
    ):
        assert f"{got:.2f}" == exact
        assert f"{got / 1000:.1f}K" == slide


@pytest.mark.parametrize(
    ("ep_size", "tokens"), [(8, 10588), (16, 5294), (32, 2647), (64, 1324), (128, 662), (256, 331)]
)
def test_expert_minimum_tokens_of_the_slides(ep_size, tokens):
    experts = Experts(256, 8, ep_size)
    assert round(backward_min_tokens(rates(), experts=experts)) == tokens
    assert forward_min_tokens(rates(), experts=experts) == pytest.approx(256 / (ep_size * 8) * 600e12 / 340e9)


def test_criteria_with_other_dtypes_and_recompute():
    """bf16 gradients, or recompute with fp32 ones: 1.0 F/BW; fp8 weights halve the forward's."""
    one = pytest.approx(rates().flop_per_byte)
    assert backward_min_tokens(rates(), BF16_WIRE) == one
    assert backward_min_tokens(rates(), recompute=True) == one
    assert forward_min_tokens(rates(), WireBytes(1, 4)) * 2 == one
    assert forward_min_tokens(rates(), WireBytes(4, 4)) / 2 == one


@pytest.mark.parametrize(
    ("cp_size", "recompute", "tokens", "forward", "backward", "useful"),
    [
        (2, True, 4096, "0.43", "0.43", "0.750"),
        (4, False, 2048, "0.86", "1.29", "0.837"),
        (8, False, 1024, "1.72", "2.59", "0.435"),
    ],
)
def test_case_study(cp_size, recompute, tokens, forward, backward, useful):
    assert tokens_per_rank(8192, 1, cp_size) == tokens
    layer = layer_hiding(8192, tokens, rates(), recompute=recompute)
    assert [f"{phase.ratio:.2f}" for phase in layer.phases] == [forward, backward]
    assert [phase.hidden for phase in layer.phases] == [float(forward) < 1, float(backward) < 1]
    assert f"{layer.useful_fraction:.3f}" == useful
    if not recompute:
        assert layer.exposed_fraction == pytest.approx(1 - layer.useful_fraction)


def test_case_study_predicts_1_92_between_cp4_and_cp8():
    useful = [layer_hiding(8192, tokens, rates()).useful_fraction for tokens in (2048, 1024)]
    assert f"{useful[0] / useful[1]:.2f}" == "1.92"


def test_layer_times_by_hand():
    """h 8192 at TP 2: 11 h^2 / 2 parameters, 4 FLOP a token and 6 bytes each backward."""
    _, backward = layer_hiding(8192, 4096, rates(2), tp_size=2).phases
    params = 11 * 8192**2 / 2
    assert backward.compute_s == pytest.approx(4 * params * 4096 / 600e12)
    assert backward.communication_s == pytest.approx(6 * params / 170e9)
    assert backward.exposed_s == pytest.approx(backward.communication_s - backward.compute_s)
    assert backward.wall_s == backward.communication_s


def test_expert_layer_by_hand():
    """DeepSeek-like: attention 3 h^2, 256 experts of 8 h^2, 8 a token, 32 a rank at EP 8."""
    layer = layer_hiding(1024, 5000, rates(), experts=Experts(256, 8, 8))
    assert [(phase.part, phase.phase) for phase in layer.phases] == [
        ("attention", "forward"),
        ("attention", "backward"),
        ("experts", "forward"),
        ("experts", "backward"),
    ]
    experts = layer.phases[3]
    assert experts.compute_s == pytest.approx(4 * 8 * 1024**2 * 5000 * 8 / 600e12)
    assert experts.communication_s == pytest.approx(6 * 8 * 1024**2 * 32 / 340e9)
    assert layer.phases[0].compute_s == pytest.approx(2 * 3 * 1024**2 * 5000 / 600e12)
    assert [phase.hidden for phase in layer.phases] == [True, True, False, False]


@settings(max_examples=30, derandomize=True, deadline=None)
@given(
    tokens=st.floats(1, 1e5),
    flop=st.floats(1e12, 1e16),
    bandwidth=st.floats(1e8, 1e13),
    param_bytes=st.sampled_from([1, 2, 4]),
    grad_bytes=st.sampled_from([2, 4]),
    ep_size=st.sampled_from([0, 1, 2, 8]),
    tp_size=st.sampled_from([1, 2, 8]),
    recompute=st.booleans(),
)
def test_minimum_tokens_are_where_times_cross(
    tokens, flop, bandwidth, param_bytes, grad_bytes, ep_size, tp_size, recompute
):
    layer = layer_hiding(
        512,
        tokens,
        Rates(flop, bandwidth),
        wire=WireBytes(param_bytes, grad_bytes),
        experts=Experts(16, 2, ep_size) if ep_size else None,
        tp_size=tp_size,
        recompute=recompute,
    )
    for phase in layer.phases:
        assert phase.ratio == pytest.approx(phase.communication_s / phase.compute_s)
        assert phase.wall_s == pytest.approx(phase.compute_s + phase.exposed_s)
    assert 0 < layer.useful_fraction <= 1 - layer.exposed_fraction + 1e-12


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: Rates(0, 1), "flop_per_s"),
        (lambda: Rates(1, float("inf")), "bandwidth_bytes_per_s"),
        (lambda: Rates.of_node(1, 1, 0), "tp_size"),
        (lambda: Rates.of_node(1, float("nan"), 1), "node_bandwidth_bytes_per_s"),
        (lambda: WireBytes(2, 0), "grad_bytes"),
        (lambda: Experts(8, 9), "top_k"),
        (lambda: Experts(8, 2, 3), "ep_size"),
        (lambda: tokens_per_rank(0), "seq_length"),
        (lambda: layer_hiding(0, 1, rates()), "hidden_size"),
        (lambda: layer_hiding(1, 0, rates()), "tokens"),
    ],
)
def test_impossible_quantities_are_named(call, field):
    with pytest.raises(CommunicationError) as caught:
        call()
    assert caught.value.field == field
    assert str(caught.value).startswith(field)
