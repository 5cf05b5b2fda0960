"""Schedules against a table written independently from the prose, and their life across checkpoints."""

from __future__ import annotations

import itertools
import math
from math import cos, pi, sqrt

import pytest

from megatron.core.optimizer.optimization_config import OptimizerConfig
from megatron.core.optimizer.optimizer_param_scheduler import (
    OptimizerParamScheduler,
    ScheduleError,
    build_schedule,
    build_scheduler,
    idle_scheduler,
    learning_rate,
    weight_decay,
)

GBS = 4


def schedule(train_iters=100, **flags):
    config = OptimizerConfig(**{"lr": 1e-3, "min_lr": 1e-5, **flags})
    return build_schedule(config, train_iters=train_iters, train_samples=None, global_batch_size=GBS)


def groups():
    def one(wd_mult, decoupled, max_lr, min_lr):
        return {
            "params": [],
            "name": "",
            "lr": 0.0,
            "weight_decay": 0.0,
            "wd_mult": wd_mult,
            "max_lr": max_lr,
            "min_lr": min_lr,
            "decoupled": decoupled,
        }

    return [one(1.0, False, 1e-3, 1e-5), one(0.0, False, 1e-3, 1e-5), one(1.0, True, 5e-4, 2e-6)]


PEAK, FLOOR, W, D = 1e-3, 1e-5, 40, 400  # samples: 10 of 100 iterations at batch 4
SPAN = PEAK - FLOOR
# Iteration -> rate. 55 is the middle between the end of the warm-up (10) and the end (100), 75 that of a WSD
# tail of 50 iterations; 101 is past the end.
TABLE = {
    "constant": ({}, {55: PEAK, 100: PEAK, 101: PEAK}),
    "linear": ({}, {55: FLOOR + 0.5 * SPAN, 100: FLOOR, 101: FLOOR}),
    "cosine": (
        {},
        {55: FLOOR + 0.5 * SPAN, 32.5: FLOOR + SPAN * (1 + cos(pi / 4)) / 2, 100: FLOOR, 101: FLOOR},
    ),
    "inverse-square-root": ({}, {55: PEAK * sqrt(40 / 220), 100: PEAK * sqrt(40 / 400), 101: FLOOR}),
    "WSD": (
        {"lr_wsd_decay_iters": 50, "lr_wsd_decay_style": "linear"},
        {40: PEAK, 50: PEAK, 75: FLOOR + SPAN / 2, 100: FLOOR, 101: FLOOR},
    ),
    "WSD cosine": (
        {"lr_wsd_decay_iters": 50, "lr_wsd_decay_style": "cosine"},
        {50: PEAK, 62.5: FLOOR + SPAN * (1 + cos(pi / 4)) / 2, 100: FLOOR},
    ),
    "WSD exponential": (
        {"lr_wsd_decay_iters": 50},
        {50: PEAK, 75: FLOOR + SPAN * (2 / sqrt(2) - 1), 100: FLOOR, 101: FLOOR},
    ),
    "WSD minus_sqrt": (
        {"lr_wsd_decay_iters": 50, "lr_wsd_decay_style": "minus_sqrt"},
        {50: PEAK, 62.5: FLOOR + SPAN * 0.5, 100: FLOOR},
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_values(name):
    flags, values = TABLE[name]
    s = schedule(lr_decay_style=name.split()[0], lr_warmup_iters=10, **flags)
    assert (s.warmup_samples, s.decay_samples) == (W, D)
    for iteration, expected in {0: 0.0, 5: PEAK / 2, 10: PEAK, **values}.items():
        got = learning_rate(s, int(iteration * GBS), s.max_lr, s.min_lr)
        assert got == pytest.approx(expected, rel=1e-12, abs=1e-18), iteration


@pytest.mark.parametrize("style", ["constant", "linear", "cosine", "inverse-square-root", "WSD"])
def test_rates_never_leave_peak_and_floor_and_never_rise_after_warmup(style):
    s = schedule(lr_decay_style=style, lr_warmup_iters=7, lr_wsd_decay_iters=30, lr_decay_iters=80)
    rates = [learning_rate(s, t, s.max_lr, s.min_lr) for t in range(450)]
    assert max(rates) == rates[28] == PEAK
    assert all(a >= b for a, b in itertools.pairwise(rates[28:]))
    assert min(rates[28:]) >= FLOOR * (1 - 1e-12)


def test_inverse_square_root_respects_the_floor_and_no_warmup():
    s = schedule(lr_decay_style="inverse-square-root", min_lr=5e-4)
    assert learning_rate(s, 0, 1e-3, 5e-4) == 1e-3
    assert learning_rate(s, 1, 1e-3, 5e-4) == 1e-3
    assert learning_rate(s, 3, 1e-3, 5e-4) == pytest.approx(1e-3 / sqrt(3))
    assert learning_rate(s, 300, 1e-3, 5e-4) == 5e-4


def test_warmup_starts_at_its_init():
    s = schedule(lr_warmup_iters=10, lr_warmup_init=2e-4)
    assert learning_rate(s, 0, PEAK, FLOOR) == 2e-4
    assert learning_rate(s, 20, PEAK, FLOOR) == pytest.approx(6e-4)


def test_lengths_come_from_iterations_fraction_or_samples():
    assert schedule(lr_warmup_fraction=0.25).warmup_samples == 100
    assert schedule(lr_warmup_fraction=0.25, lr_decay_iters=50).warmup_samples == 50
    config = OptimizerConfig(
        lr=1.0, lr_decay_samples=900, lr_warmup_samples=30, lr_wsd_decay_samples=100, lr_decay_style="WSD"
    )
    s = build_schedule(config, train_iters=None, train_samples=1000, global_batch_size=GBS)
    assert (s.warmup_samples, s.decay_samples, s.wsd_samples, s.weight_decay_samples) == (30, 900, 100, 1000)
    plain = OptimizerConfig(lr=1.0)
    s = build_schedule(plain, train_iters=None, train_samples=1000, global_batch_size=GBS)
    assert s.decay_samples == 1000


def test_weight_decay_ramps():
    constant = schedule(weight_decay=0.1)
    assert {weight_decay(constant, t) for t in (0, 100, 900)} == {0.1}
    linear = schedule(start_weight_decay=0.0, end_weight_decay=0.4, weight_decay_incr_style="linear")
    assert [weight_decay(linear, t) for t in (0, 100, 200, 400, 900)] == pytest.approx(
        [0, 0.1, 0.2, 0.4, 0.4]
    )
    cosine = schedule(start_weight_decay=0.0, end_weight_decay=0.4, weight_decay_incr_style="cosine")
    values = [weight_decay(cosine, t) for t in (0, 100, 200, 300, 400)]
    assert values == pytest.approx([0.4 * (1 - cos(pi * r)) / 2 for r in (0, 0.25, 0.5, 0.75, 1)])


def make(**flags):
    config = OptimizerConfig(
        **{"lr": 1e-3, "min_lr": 1e-5, "weight_decay": 0.1, "lr_warmup_iters": 10, **flags}
    )
    return build_scheduler(config, groups(), train_iters=100, train_samples=None, global_batch_size=GBS)


def test_first_update_uses_the_rate_at_zero_and_every_group_its_own():
    scheduler = make(decoupled_lr=5e-4, decoupled_min_lr=2e-6, lr_decay_style="linear")
    assert [g["lr"] for g in scheduler.param_groups] == [0.0, 0.0, 0.0]
    scheduler.step(GBS)
    assert scheduler.lr == pytest.approx(1e-4)
    assert scheduler.decoupled_lr == pytest.approx(5e-5)
    assert [g["lr"] for g in scheduler.param_groups] == pytest.approx([1e-4, 1e-4, 5e-5])
    assert [g["weight_decay"] for g in scheduler.param_groups] == pytest.approx([0.1, 0.0, 0.1])
    for _ in range(54):
        scheduler.step(GBS)
    assert [g["lr"] for g in scheduler.param_groups] == pytest.approx([5.05e-4, 5.05e-4, 2.51e-4])
    assert make().decoupled_lr is None


def test_resume_continues_the_clock():
    straight, first = make(), make()
    for _ in range(30):
        straight.step(GBS)
    for _ in range(20):
        first.step(GBS)
    second = make()
    second.load_state(first.state())
    assert second.lr == first.lr
    assert second.param_groups[0]["lr"] == first.param_groups[0]["lr"]
    for _ in range(10):
        second.step(GBS)
    assert second.lr == straight.lr
    assert second.samples == 120


def test_a_changed_schedule_must_be_decided():
    saved = make(lr=2e-3)
    saved.step(40 * GBS)
    with pytest.raises(
        ScheduleError, match=r"max_lr: checkpoint 0.002, flags 0.001.*--override.*--use-checkpoint"
    ):
        make().load_state(saved.state())
    override = make(override_opt_param_scheduler=True)
    override.load_state(saved.state())
    assert (override.samples, override.schedule.max_lr) == (160, 1e-3)
    theirs = make(use_checkpoint_opt_param_scheduler=True)
    theirs.load_state(saved.state())
    assert theirs.lr == saved.lr == theirs.param_groups[0]["lr"]
    with pytest.raises(ScheduleError, match="contradict"):
        make(override_opt_param_scheduler=True, use_checkpoint_opt_param_scheduler=True)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"lr_warmup_iters": 100}, r"--lr-warmup-\* is 400 samples, the whole schedule 400"),
        ({"train_iters": 0}, "the learning rate schedule is 0 samples long: set --lr-decay-iters"),
        ({"lr_decay_iters": 0}, "the learning rate schedule is 0 samples long"),
        ({"lr_decay_style": "WSD"}, r"--lr-wsd-decay-\* is 0 samples"),
        ({"lr_decay_style": "WSD", "lr_wsd_decay_iters": 101}, r"404 samples of a schedule of 400"),
        ({"start_weight_decay": 0.0, "end_weight_decay": 0.1}, "--weight-decay-incr-style linear or cosine"),
    ],
)
def test_impossible_schedules_name_the_flags(flags, message):
    with pytest.raises(ScheduleError, match=message):
        schedule(**flags)


def test_an_idle_scheduler_needs_no_flags():
    scheduler = idle_scheduler(groups())
    assert scheduler.decoupled_lr is None
    assert {group["weight_decay"] for group in scheduler.param_groups} == {0.0}


def test_rates_are_finite_for_degenerate_lengths():
    s = schedule(train_iters=1, lr_warmup_fraction=0.5)
    assert all(math.isfinite(learning_rate(s, t, PEAK, FLOOR)) for t in range(10))
    assert isinstance(OptimizerParamScheduler([], s).lr, float)
