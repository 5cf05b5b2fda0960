"""The loss scale's state machine, by hand-written histories and against a second implementation."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.optimizer.grad_scaler import (
    GradScaler,
    GradScalerStateError,
    build_grad_scaler,
)
from megatron.core.optimizer.optimization_config import OptimizerConfig


def run(scaler, history):
    """history: '.' a clean step, 'x' a non-finite one; returns the scale after each."""
    scales = []
    for step in history:
        scaler.update(step == "x")
        scales.append(scaler.scale)
    return scales


def test_histories():
    def make():
        return GradScaler(dynamic=True, scale=64.0, min_scale=8.0, window=3, hysteresis=2)

    assert run(make(), "...") == [64, 64, 128]
    assert run(make(), "x") == [64]  # the first one spends hysteresis
    assert run(make(), "xx") == [64, 32]
    assert run(make(), "x.x") == [64, 64, 32]  # clean steps alone give no budget back
    assert run(make(), "xxxxxx") == [64, 32, 16, 8, 8, 8]  # not below min_scale
    assert run(make(), "xx...xx") == [64, 32, 32, 32, 64, 64, 32]  # a doubling does
    assert run(make(), "..x...") == [64, 64, 64, 64, 64, 128]  # the window starts again


def naive(history, scale, floor, window, hysteresis):
    """Second implementation, from the prose: recomputes everything from the history so far."""
    scales = []
    for end in range(1, len(history) + 1):
        value, left, run_length = scale, hysteresis, 0
        for step in history[:end]:
            if step == "x":
                run_length, left = 0, left - 1
                value = max(value / 2, floor) if left < 1 else value
            else:
                run_length += 1
                if run_length == window:
                    value, left, run_length = value * 2, hysteresis, 0
        scales.append(value)
    return scales


@settings(derandomize=True, max_examples=100, deadline=None)
@given(st.text("..x", max_size=40), st.integers(1, 4), st.integers(1, 3))
def test_agrees_with_the_naive_one_and_resumes_anywhere(history, window, hysteresis):
    def make():
        return GradScaler(dynamic=True, scale=2.0**10, min_scale=1.0, window=window, hysteresis=hysteresis)

    expected = naive(history, 2.0**10, 1.0, window, hysteresis)
    assert run(make(), history) == expected
    half = len(history) // 2
    first, second = make(), make()
    run(first, history[:half])
    second.load_state(first.state())
    assert run(second, history[half:]) == expected[half:]


def test_at_minimum_says_that_skipping_would_not_help():
    scaler = GradScaler(dynamic=True, scale=4.0, min_scale=2.0, hysteresis=1)
    assert not scaler.at_minimum
    scaler.update(True)
    assert scaler.at_minimum
    assert GradScaler(8.0).at_minimum


def test_defaults_are_megatrons():
    scaler = build_grad_scaler(OptimizerConfig(lr=1.0, fp16=True))
    assert scaler.dynamic
    assert scaler == GradScaler(2.0**32, 1.0, 1000, 2, dynamic=True)


def test_constant_scales():
    none = build_grad_scaler(OptimizerConfig(lr=1.0, bf16=True))
    assert (none.scale, none.dynamic) == (1.0, False)
    constant = build_grad_scaler(OptimizerConfig(lr=1.0, fp16=True, loss_scale=128.0))
    constant.update(True)
    assert (constant.scale, constant.dynamic) == (128.0, False)
    constant.load_state({"scale": 7.0})
    assert constant.scale == 128.0  # the flag wins


def test_dynamic_from_a_constant_checkpoint_starts_afresh_and_from_a_broken_one_refuses():
    scaler = GradScaler(2.0**32, dynamic=True)
    scaler.load_state(GradScaler(5.0).state())
    assert scaler.scale == 2.0**32
    with pytest.raises(GradScalerStateError, match=r"lacks \['budget'\]"):
        scaler.load_state({"scale": 1.0, "clean_steps": 1})
