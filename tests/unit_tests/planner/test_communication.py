"""Against printed figures: the slides' tables, Llama3-70B's bytes, counted collectives, the papers' anchors."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.planner.communication import (
    Buckets,
    CommunicationError,
    Experts,
    Rates,
    StateBytes,
    Strategy,
    WireBytes,
    backward_min_tokens,
    bandwidth_for,
    checkpoint_bytes,
    checkpoint_intensity,
    collectives_in_words,
    efficiency,
    forward_min_tokens,
    layer_hiding,
    optimizer_intensity,
    outer_collectives,
    param_grad_intensity,
    persistent_bytes,
    persistent_bytes_per_param,
    step_collectives,
    tokens_per_rank,
    transformer_params,
    transient_unit_bytes,
    working_activation_bytes,
    working_state_bytes,
    zero_volume_elements,
)

NO_SHARD, OPTIM, OPTIM_GRADS, OPTIM_GRADS_PARAMS = Strategy
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
    ("strategy", "exact", "slide", "words"),
    [
        (NO_SHARD, "120.000", "120", "1 AR"),
        (OPTIM, "31.406", "31.4", "1 AR (= RS + AG)"),
        (OPTIM_GRADS, "16.641", "16.6", "1 AG + GA RS"),
        (OPTIM_GRADS_PARAMS, "1.875", "1.9", "2 GA AG + GA RS"),
    ],
)
def test_zero_table_of_the_slides(strategy, exact, slide, words):
    gigabytes = persistent_bytes(7.5e9, strategy, 64, StateBytes(grad_bytes=2)) / 1e9
    assert f"{gigabytes:.3f}" == exact
    assert f"{gigabytes:.{len(slide.partition('.')[2])}f}" == slide
    assert collectives_in_words(strategy) == words


@pytest.mark.parametrize("shard_size", [1, 2, 8, 64])
def test_persistent_bytes_per_param(shard_size):
    n = shard_size
    fp32_grads = [18, 6 + 12 / n, 2 + 16 / n, 18 / n]
    bf16_grads = [16, 4 + 12 / n, 2 + 14 / n, 16 / n]
    assert [persistent_bytes_per_param(one, n) for one in Strategy] == pytest.approx(fp32_grads)
    got = [persistent_bytes_per_param(one, n, StateBytes(grad_bytes=2)) for one in Strategy]
    assert got == pytest.approx(bf16_grads)


def test_persistent_bytes_without_adam_at_dp_2():
    """What was measured at DP 2 in bf16: model, main, gradient bytes a parameter (2, 2, 2; 2, 2, 1; 1, 2, 1)."""
    states = StateBytes(grad_bytes=2, moment_bytes=0)
    got = [persistent_bytes_per_param(one, 2, states) for one in Strategy]
    assert got == [2 + 4 + 2, 2 + 2 + 2, 2 + 2 + 1, 1 + 2 + 1]
    fp32 = StateBytes(4, 4, main_weight_bytes=0)
    assert persistent_bytes_per_param(NO_SHARD, 2, fp32) == 16


def test_llama3_70b():
    hidden, layers, vocab = 8192, 80, 128256
    unit = hidden * (2 * hidden + 2 * 1024) + 3 * hidden * 28672 + 2 * hidden
    others = 2 * vocab * hidden
    params = layers * unit + others + hidden
    assert f"{unit / 1e6:.1f}" == "855.7"
    assert f"{others * 2 / 1e9:.2f}" == "4.20"
    assert f"{params / 1e9:.2f}" == "70.55"
    gigabytes = persistent_bytes(70.56e9, OPTIM_GRADS_PARAMS, 64) / 1e9
    assert f"{gigabytes:.3f}" == "19.845"
    gigabytes = persistent_bytes(70.56e9, OPTIM_GRADS_PARAMS, 64, StateBytes(grad_bytes=2)) / 1e9
    assert f"{gigabytes:.2f}" == "17.64"
    assert f"{transient_unit_bytes(855.7e6) / 1e9:.2f}" == "10.27"
    hfsdp = persistent_bytes(70.56e9, OPTIM_GRADS_PARAMS, 8, outer_size=8, outer_optim=True)
    hsdp = persistent_bytes(70.56e9, OPTIM_GRADS_PARAMS, 8, outer_size=8)
    assert hfsdp / 1e9 == pytest.approx(66.15)  # printed as 66.1
    assert f"{hsdp / 1e9:.1f}" == "158.8"


# 4-layer GPT, fp32, DP 2, 2 microbatches: counted, (n, m) = (4, 1).
COUNTED = Buckets(4, 1, unit_params=3_421_696 * 0.9245, other_params=3_421_696 * 0.0755)


@pytest.mark.parametrize(
    ("strategy", "microbatches", "calls", "bytes_per_param"),
    [
        (NO_SHARD, 2, (0, 0, 5), (0, 0, 4.000)),
        (OPTIM, 2, (5, 5, 0), (4.004, 4.004, 0)),
        (OPTIM_GRADS, 2, (5, 10, 0), (4.004, 8.007, 0)),
        (OPTIM_GRADS_PARAMS, 2, (17, 10, 0), (15.093, 8.007, 0)),
        (OPTIM_GRADS_PARAMS, 1, (9, 5, 0), None),
        (OPTIM_GRADS_PARAMS, 4, (33, 20, 0), None),
    ],
)
def test_collectives_that_were_counted(strategy, microbatches, calls, bytes_per_param):
    step = step_collectives(strategy, COUNTED, microbatches, WireBytes(4, 4))
    assert (step.all_gather_calls, step.reduce_scatter_calls, step.all_reduce_calls) == calls
    if bytes_per_param is not None:
        payloads = (step.all_gather_bytes, step.reduce_scatter_bytes, step.all_reduce_bytes)
        # what was counted has up to 0.1 % of padding
        assert [one / COUNTED.num_params for one in payloads] == pytest.approx(bytes_per_param, rel=1.1e-3)


@pytest.mark.parametrize(
    ("strategy", "gigabytes"),
    [
        (NO_SHARD, ["56.2", "56.2", "56.2"]),
        (OPTIM, ["42.2", "42.2", "42.2"]),
        (OPTIM_GRADS, ["42.2", "126.5", "463.7"]),
        (OPTIM_GRADS_PARAMS, ["56.2", "224.8", "899.4"]),
    ],
)
def test_bytes_sent_by_an_8b_model_over_8_ranks(strategy, gigabytes):
    buckets = Buckets(34, 0, 8.03e9, 0)
    steps = [step_collectives(strategy, buckets, count, shard_size=8) for count in (1, 4, 16)]
    assert [f"{step.sent_bytes_per_rank(8) / 1e9:.1f}" for step in steps] == gigabytes


def test_collectives_of_other_policies():
    kept = step_collectives(OPTIM_GRADS_PARAMS, COUNTED, 3, reshard_after_forward=False)
    assert (kept.all_gather_calls, kept.reduce_scatter_calls) == (3 * 4 + 1, 3 * 5)
    alone = [step_collectives(one, COUNTED, 3, shard_size=1) for one in Strategy]
    assert {step.payload_bytes for step in alone} == {0.0}
    hsdp = outer_collectives(8e9, 8, outer_size=4, outer_optim=False)
    assert (hsdp.all_reduce_calls, hsdp.all_reduce_bytes, hsdp.all_gather_calls) == (1, 4e9, 0)
    hfsdp = outer_collectives(8e9, 8, outer_size=4, outer_optim=True)
    assert (hfsdp.all_gather_calls, hfsdp.reduce_scatter_calls, hfsdp.all_reduce_calls) == (1, 1, 0)
    assert (hfsdp.all_gather_bytes, hfsdp.reduce_scatter_bytes) == (2e9, 4e9)
    assert outer_collectives(8e9, 8, outer_size=1, outer_optim=True).payload_bytes == 0


def test_volumes_of_the_paper():
    assert [zero_volume_elements(one, 10) for one in Strategy] == [20, 20, 20, 30]
    # the same from the collectives of one microbatch
    buckets = Buckets(1, 0, 10, 0)
    elements = [step_collectives(one, buckets, 1, WireBytes(1, 1)).payload_bytes for one in Strategy]
    assert elements == [20, 20, 20, 30]


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
        (lambda: Rates(0, 1), "flop_per_s"),
        (lambda: Rates(1, float("inf")), "bandwidth_bytes_per_s"),
        (lambda: Rates.of_node(1, 1, 0), "tp_size"),
        (lambda: Rates.of_node(1, float("nan"), 1), "node_bandwidth_bytes_per_s"),
        (lambda: WireBytes(2, 0), "grad_bytes"),
        (lambda: StateBytes(moment_bytes=-1), "moment_bytes"),
        (lambda: Experts(8, 9), "top_k"),
        (lambda: Experts(8, 2, 3), "ep_size"),
        (lambda: tokens_per_rank(0), "seq_length"),
        (lambda: layer_hiding(0, 1, rates()), "hidden_size"),
        (lambda: layer_hiding(1, 0, rates()), "tokens"),
        (lambda: persistent_bytes(1, OPTIM, 2, outer_size=2, outer_optim=True), "outer_optim"),
        (lambda: persistent_bytes(1, OPTIM, 0), "shard_size"),
        (lambda: Buckets(0, 1, 5, 5), "unit_params"),
        (lambda: step_collectives(OPTIM, COUNTED, 0), "num_microbatches"),
        (lambda: bandwidth_for(1, 1, 1), "wanted_efficiency"),
    ],
)
def test_impossible_quantities_are_named(call, field):
    with pytest.raises(CommunicationError) as caught:
        call()
    assert caught.value.field == field
    assert str(caught.value).startswith(field)
