"""The parallel walk equals the rule walked step by step."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from megatron.core.datasets import blended_samples
from megatron.core.datasets.blended_samples import Race, exhaustive_race


def all_turns(race):
    """(member, sample) of every turn, and whether the race has counted them."""
    stretches = list(race.stretches())
    member = np.concatenate([one for one, _ in stretches] or [np.empty(0, np.int16)])
    sample = np.concatenate([one for _, one in stretches] or [np.empty(0, np.int64)])
    assert np.bincount(member, minlength=len(race.weights)).tolist() == race.taken.tolist()
    return member, sample


def build_blending_indices(shares, size):
    return all_turns(Race(np.array(shares), None, size))


def build_exhaustive_blending_indices(sizes):
    return all_turns(exhaustive_race(sizes))


_spec = importlib.util.spec_from_file_location(
    "naive_sample_order", Path(__file__).with_name("naive_sample_order.py")
)
naive = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(naive)


@pytest.mark.parametrize("num_members", [1, 2, 3, 5, 11, 40])
@pytest.mark.parametrize("steps", [7, 64])
def test_equal_to_the_rule(monkeypatch, num_members, steps):
    # Short segments, so that few turns already need many of them.
    monkeypatch.setattr(blended_samples, "STEPS_PER_SEGMENT", steps)
    monkeypatch.setattr(blended_samples, "MOST_SEGMENTS", 9)
    rng = np.random.default_rng(num_members)
    for weights in (
        rng.random(num_members) + 1e-6,
        np.ones(num_members),
        rng.random(num_members) ** 8 + 1e-9,
    ):
        shares = naive.normalized(list(weights))
        for size in (0, 1, steps, 1500):
            member, sample = build_blending_indices(shares, size)
            assert member.dtype == np.int16
            assert sample.dtype == np.int64
            assert list(zip(member.tolist(), sample.tolist(), strict=True)) == naive.blend_order(shares, size)


@pytest.mark.parametrize(
    "sizes", [[5], [1, 1], [0, 3], [1, 1000], [300, 500, 200], [1, 1, 1, 700, 2], [97, 89, 83, 79]]
)
def test_exhaustive_equal_to_the_rule(monkeypatch, sizes):
    monkeypatch.setattr(blended_samples, "STEPS_PER_SEGMENT", 16)
    member, sample = build_exhaustive_blending_indices(sizes)
    assert list(zip(member.tolist(), sample.tolist(), strict=True)) == naive.exhaustive_order(sizes)
    assert np.bincount(member, minlength=len(sizes)).tolist() == sizes


def test_default_segments_over_a_long_blend():
    shares = naive.normalized([0.123, 0.456, 0.222, 0.199])
    member, _ = build_blending_indices(shares, 20_000)
    assert member.tolist() == [j for j, _ in naive.blend_order(shares, 20_000)]
