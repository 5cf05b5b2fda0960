"""A bijection of any range, another for each key, that mixes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.datasets.permutation import Permutation


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.integers(1, 600), st.integers(0, 2**31 - 1))
def test_each_number_once(size, seed):
    shuffle = Permutation(size, seed)
    assert sorted(map(shuffle, range(size))) == list(range(size))


@pytest.mark.parametrize("size", [2**20 - 1, 2**20, 2**20 + 1, 10**12, 2**62 + 5])
def test_large_ranges_have_no_two_places_alike(size):
    shuffle, numbers = (
        Permutation(size, 7),
        [*range(500), *range(size - 500, size), *range(0, size, size // 499)],
    )
    places = {i: shuffle(i) for i in numbers}
    assert len(set(places.values())) == len(places)
    assert all(0 <= place < size for place in places.values())


def test_it_is_a_function_of_size_and_key_alone():
    assert [Permutation(10**9, 5, 1)(i) for i in range(3)] == [739955876, 850434749, 102365790]
    first, *others = (
        tuple(map(Permutation(1000, *key), range(1000))) for key in [(5, 0), (5, 1), (6, 0), (5,), (5, 0, 0)]
    )
    assert first not in others
    assert len(set(others)) == 4


def test_neighbours_go_far_apart():
    """As those of a random order: places and distances spread evenly, and no place is like the one before."""
    size, count = 10**10, 20_000
    shuffle = Permutation(size, 1234)
    places = np.array([shuffle(i) for i in range(count)], dtype=np.float64) / size
    for values in (places, np.diff(places) % 1.0, places[2:] - 2 * places[1:-1] % 1.0):
        shares = np.histogram(values % 1.0, bins=50, range=(0, 1))[0]
        chi2 = ((shares - len(values) / 50) ** 2).sum() / (len(values) / 50)
        assert chi2 < 95, chi2  # of 49 degrees of freedom: less than 1 of 10,000 random orders has more
    for lag in (1, 2, 3, 64):
        assert abs(np.corrcoef(places[:-lag], places[lag:])[0, 1]) < 4 / count**0.5
