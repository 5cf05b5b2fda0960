"""Lengths of schedules, counted by hand."""

import pytest

from megatron.core.optimizer.optimization_config import OptimizerConfig
from megatron.core.optimizer.schedule_lengths import schedule_faults, schedule_lengths


def lengths(train_iters=None, train_samples=None, **flags):
    return schedule_lengths(
        OptimizerConfig(lr=1.0, **flags),
        train_iters=train_iters,
        train_samples=train_samples,
        global_batch_size=4,
    )


def faults(style="linear", warmup=0, decay=8, tail=0):
    found = schedule_faults(style, warmup_samples=warmup, decay_samples=decay, wsd_samples=tail)
    return [fault.which for fault in found]


def test_iterations_are_full_batches():
    found = lengths(train_iters=10, lr_decay_iters=8, lr_warmup_iters=2, lr_wsd_decay_iters=3)
    counted = (found.warmup_samples, found.decay_samples, found.wsd_samples, found.total_samples)
    assert counted == (8, 32, 12, 40)
    assert found.samples_per_step == 4


def test_samples_are_samples():
    found = lengths(train_samples=90, lr_warmup_samples=7)
    counted = (found.warmup_samples, found.decay_samples, found.wsd_samples, found.total_samples)
    assert counted == (7, 90, 0, 90)
    assert found.samples_per_step is None


def test_a_fraction_is_of_the_schedule():
    assert lengths(train_iters=10, lr_decay_iters=5, lr_warmup_fraction=0.25).warmup_samples == 5


def test_a_length_of_zero_is_not_an_unset_one():
    assert lengths(train_iters=10, lr_decay_iters=0).decay_samples == 0
    assert lengths(train_samples=10, lr_decay_samples=0).decay_samples == 0


def test_faults():
    assert faults() == faults(warmup=7) == faults("WSD", tail=1) == faults("WSD", tail=8) == []
    assert faults(decay=0, warmup=3) == ["decay"]
    assert faults(warmup=8) == ["warmup"]
    assert faults("WSD") == faults("WSD", tail=9) == ["tail"]
    assert faults("WSD", warmup=9, tail=9) == ["warmup", "tail"]


def test_one_length_of_the_run_counts():
    with pytest.raises(AssertionError, match="3 iterations, 4 samples"):
        lengths(train_iters=3, train_samples=4)
