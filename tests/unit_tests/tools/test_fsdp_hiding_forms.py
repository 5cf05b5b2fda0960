"""Against printed figures: the slides' tables, Llama3-70B's bytes, the anchors of ZeRO-Infinity; times by hand."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools import fsdp_hiding as forms
from tools.fsdp_hiding import checked, parser

PUBLISHED = json.loads((Path(__file__).parent / "data" / "fsdp_published.json").read_text())
RATIO = 600e3 / 340  # F/BW of the slides


def asked(*words):
    return checked(parser().parse_args([str(word) for word in words]))


@pytest.fixture(scope="module")
def tables():
    return forms.published_tables(asked())


def model(*words):
    """12 * 80 * 8192^2 = 64.4e9 parameters."""
    words = ("--num-layers", 80, "--hidden-size", 8192, "--seq-length", 2048, *words)
    return forms.model_tables(asked(*words))


def test_states_and_tokens_of_the_slides(tables):
    for row in tables["zero"]:
        exact, slide = PUBLISHED["states_gb"][row["strategy"]]
        assert f"{row['gb']:.3f}" == exact
        assert f"{row['gb']:.{len(slide.partition('.')[2])}f}" == slide
    for row in tables["dense"]:
        bandwidth, *digits = PUBLISHED["dense_tokens"][str(row["tp"])]
        assert row["bandwidth_gb_per_s"] == bandwidth
        tokens = row["forward_min_tokens"], row["backward_min_tokens"]
        assert [word for one in tokens for word in (f"{one:.2f}", f"{one / 1000:.1f}K")] == digits
    for row in tables["moe"]:
        assert round(row["backward_min_tokens"]) == PUBLISHED["expert_tokens"][str(row["ep"])]
        assert row["forward_min_tokens"] == pytest.approx(256 / (row["ep"] * 8) * RATIO)


def test_case_study(tables):
    useful = []
    for row in tables["case_study"]:
        tokens, *digits = PUBLISHED["case_study"][row["setting"]]
        ratios = row["forward_ratio"], row["backward_ratio"]
        assert row["tokens_per_gpu"] == tokens
        assert [*(f"{one:.2f}" for one in ratios), f"{row['useful_fraction']:.3f}"] == digits
        useful.append(row["useful_fraction"])
    assert f"{useful[1] / useful[2]:.2f}" == "1.92"


def test_criteria_by_gradient_dtype_and_recompute(tables):
    """(2 + g) / 4, or / 6 with recompute, times F/BW; experts at EP 8 need 256 / (8 * 8) times as many."""
    rows = tables["criteria"]
    assert [row["backward"] / RATIO for row in rows] == pytest.approx([1.5, 1, 1, 2 / 3])
    assert [row["forward"] / RATIO for row in rows] == pytest.approx([1] * 4)
    for row in rows:
        assert row["moe_backward"] == pytest.approx(4 * row["backward"])
        assert row["moe_forward"] == pytest.approx(4 * row["forward"])


def test_half_the_rates_give_the_same_tokens(tables):
    half = forms.published_tables(asked("--tflops", 300, "--bandwidth-gb-per-s", 170))
    for name in ("moe", "criteria", "case_study"):
        for first, second in zip(tables[name], half[name], strict=True):
            assert first == pytest.approx(second)


def test_bandwidths_of_zero_infinity(tables):
    """At 1 sample a rank 70 GB/s feed half of a V100; at 2 samples optimizer states take 1.5 TB/s for nine tenths,
    and checkpoints at hidden size 8K less than 1 GB/s for half."""
    weights, optimizer, checkpoints = tables["intensity"]
    assert 2 * weights["gb_per_s_at_50%"] == pytest.approx(68.4, abs=0.1)
    assert optimizer["gb_per_s_at_50%"] == pytest.approx(4 * weights["gb_per_s_at_50%"])
    assert 1000 < optimizer["gb_per_s_at_90%"] < 1500
    assert checkpoints["gb_per_s_at_50%"] < 1


@pytest.mark.parametrize("n", [1, 2, 8, 64])
def test_bytes_a_parameter(n):
    def kept(*wire):
        return [forms.bytes_per_param(one, n, wire) for one in forms.STRATEGIES]

    assert kept(2, 4) == pytest.approx([18, 6 + 12 / n, 2 + 16 / n, 18 / n])
    assert kept(2, 2) == pytest.approx([16, 4 + 12 / n, 2 + 14 / n, 16 / n])
    assert kept(4, 4)[0] == 16  # fp32 weights are main weights themselves


def test_llama3_70b():
    said = PUBLISHED["llama3_70b_gb"]
    for wire, form, digits in (((2, 4), ".3f", said["fp32_grads"]), ((2, 2), ".2f", said["bf16_grads"])):
        kept = said["params"] * forms.bytes_per_param("optim_grads_params", said["ranks"], wire)
        assert format(kept / 1e9, form) == digits


def test_strategies_send_what_a_plan_of_one_stage_sends():
    """ZeRO-3 gathers GA (2 n - 2) + 1 times: a microbatch's last unit stays for its backward, whose last one stays
    for the next microbatch's forward."""
    rows = {row["strategy"]: row for row in model("--num-microbatches", 4)["strategies"]}
    calls = {
        name: (row["all_gathers"], row["reduce_scatters"], row["all_reduces"]) for name, row in rows.items()
    }
    assert calls == {
        "no_shard": (0, 0, 80),
        "optim": (80, 80, 0),
        "optim_grads": (80, 320, 0),
        "optim_grads_params": (4 * (2 * 80 - 2) + 1, 320, 0),
    }
    params = 12 * 80 * 8192**2
    sent = {"no_shard": 8, "optim": 6, "optim_grads": 2 + 16, "optim_grads_params": 2 * 633 / 80 + 16}
    assert {name: row["sent_gb"] for name, row in rows.items()} == pytest.approx(
        {name: params * each * 63 / 64 / 1e9 for name, each in sent.items()}
    )
    alone = model("--data-parallel-size", 1)["strategies"]
    assert {row["sent_gb"] for row in alone} == {0.0}


def test_bytes_sent_by_an_8b_model_over_8_ranks():
    """Printed for 34 equal units; here of 12 h^2 each."""
    said = PUBLISHED["sent_gb_of_8.03e9_params_in_34_units_over_8_ranks"]
    for at, microbatches in enumerate(said["microbatches"]):
        words = ("--num-layers", 34, "--hidden-size", 4096, "--seq-length", 8, "--data-parallel-size", 8)
        rows = forms.model_tables(asked(*words, "--num-microbatches", microbatches))["strategies"]
        for row in rows[:3]:
            gigabytes = row["sent_gb"] * 8.03e9 / (12 * 34 * 4096**2)
            assert f"{gigabytes:.1f}" == said[row["strategy"]][at]


def test_working_sets_by_hand():
    words = ("--micro-batch-size", 2, "--checkpoint-interval", 4)
    checkpoints, activations, layer, units = (row["gb"] * 1e9 for row in model(*words)["working_sets"])
    assert checkpoints == pytest.approx(2 * 2 * 2048 * 8192 * 80 / 4)
    assert activations == pytest.approx(2 * 2048 * 4 * (16 * 8192 + 2 * 64 * 2048))
    assert layer == pytest.approx(16 * 8192**2)
    assert units == pytest.approx(2 * 12 * 8192**2 * (2 + 4))


def test_efficiency_is_half_where_feeding_equals_computing():
    words = ("--tflops", 70, "--bandwidth-gb-per-s", 70e3 / 2048)
    assert [row["efficiency"] for row in model(*words)["efficiency"]][:2] == pytest.approx([1 / 2, 1 / 5])


def test_layer_times_by_hand():
    """h 8192 at TP 2: 11 h^2 / 2 parameters, 4 FLOP a token and 6 bytes each backward."""
    words = ("--hidden-size", 8192, "--tokens-per-gpu", 4096, "--tensor-model-parallel-size", 2)
    backward = forms.phases_of(asked(*words))[0][1]
    params = 11 * 8192**2 / 2
    assert backward["compute_s"] == pytest.approx(4 * params * 4096 / 600e12)
    assert backward["communication_s"] == pytest.approx(6 * params / 170e9)


def test_expert_layer_by_hand():
    """DeepSeek-like: attention 3 h^2, 256 experts of 8 h^2, 8 a token, 32 a rank at EP 8."""
    words = ("--num-experts", 256, "--moe-router-topk", 8, "--expert-model-parallel-size", 8)
    rows, *_ = forms.phases_of(asked("--hidden-size", 1024, "--tokens-per-gpu", 5000, *words))
    assert rows[3]["compute_s"] == pytest.approx(4 * 8 * 1024**2 * 5000 * 8 / 600e12)
    assert rows[3]["communication_s"] == pytest.approx(6 * 8 * 1024**2 * 32 / 340e9)
    assert rows[0]["compute_s"] == pytest.approx(2 * 3 * 1024**2 * 5000 / 600e12)
    assert [row["hidden"] for row in rows] == [True, True, False, False]


@settings(max_examples=30, derandomize=True, deadline=None)
@given(
    tokens=st.floats(1, 1e5),
    flop=st.floats(1, 1e4),
    bandwidth=st.floats(0.1, 1e4),
    param=st.sampled_from(["fp8", "bf16", "fp32"]),
    grad=st.sampled_from(["bf16", "fp32"]),
    ep=st.sampled_from([0, 1, 2, 8]),
    tp=st.sampled_from([1, 2, 8]),
    recompute=st.booleans(),
)
def test_minimum_tokens_are_where_times_cross(tokens, flop, bandwidth, param, grad, ep, tp, recompute):
    words = ["--hidden-size", 512, "--tokens-per-gpu", tokens, "--tflops", flop, "--param-dtype", param]
    words += ["--bandwidth-gb-per-s", bandwidth, "--grad-dtype", grad, "--tensor-model-parallel-size", tp]
    words += ["--num-experts", 16, "--expert-model-parallel-size", ep] if ep else []
    rows, exposed, useful = forms.phases_of(asked(*words, *(["--recompute"] if recompute else [])))
    for row in rows:
        assert row["ratio"] == pytest.approx(row["communication_s"] / row["compute_s"])
        assert row["exposed_s"] == max(0.0, row["communication_s"] - row["compute_s"])
    assert 0 < useful <= 1 - exposed + 1e-12
