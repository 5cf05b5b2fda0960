"""Bytes held: live, peak, by category and unit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.ledger import PERSISTENT, TRANSIENT, Ledger


def test_live_and_peak_bytes():
    ledger = Ledger()
    ledger.book({"weights": 100, "moments": 50})
    ledger.hold("gathered", "a", 30)
    ledger.hold("gathered", "b", 20)
    ledger.free("gathered", "a", 30)
    ledger.hold("grads", "b", 25)
    assert (ledger.persistent_bytes, ledger.transient_bytes) == (150, 45)
    assert (ledger.live("gathered"), ledger.live("gathered", "a"), ledger.live("gathered", "b")) == (
        20,
        0,
        20,
    )
    assert (ledger.peak("gathered"), ledger.peak("grads"), ledger.peak("weights")) == (50, 25, 100)
    assert ledger.peak_transient_bytes == 50, "the categories' peaks are not at the same time"
    ledger.reset_peaks()
    assert (ledger.peak("gathered"), ledger.peak_transient_bytes) == (20, 45)
    ledger.free("grads", "b", 10)
    assert (ledger.live("grads"), ledger.peak("grads"), ledger.peak_transient_bytes) == (15, 25, 45)


def test_what_was_not_held_cannot_be_given_back():
    ledger = Ledger()
    ledger.hold("gathered", "a", 30)
    with pytest.raises(AssertionError, match="gathered of 'b': 30 bytes given back of 0"):
        ledger.free("gathered", "b", 30)
    with pytest.raises(AssertionError, match="gathered of 'a': 31 bytes given back of 30"):
        ledger.free("gathered", "a", 31)
    with pytest.raises(AssertionError, match=r"category 'wieghts'; known: .*'weights'"):
        ledger.hold("wieghts", "a", 1)


def test_persistent_categories_may_be_released_for_a_while():
    """Sharded gradients have no memory from a step's beginning to their first reduction."""
    ledger = Ledger()
    ledger.hold("main_grads", "a", 40)
    ledger.free("main_grads", "a", 40)
    assert (ledger.persistent_bytes, ledger.peak("main_grads"), ledger.transient_bytes) == (0, 40, 0)


def test_the_table_has_a_row_a_category_and_the_units_that_hold_something():
    ledger = Ledger()
    ledger.book({"weights": 4096, "extra_grads": 0})
    ledger.hold("gathered", "layer 1", 1234567)
    ledger.hold("gathered", "layer 0", 8)
    ledger.free("gathered", "layer 0", 8)
    ledger.overflows = 3
    rows = [line.split() for line in ledger.lines()]
    assert rows == [
        ["category", "live", "bytes", "peak", "bytes"],
        ["weights", "4,096", "4,096"],
        ["gathered", "1,234,567", "1,234,575"],
        ["persistent", "4,096"],
        ["transient", "1,234,567", "1,234,575"],
        ["gathered", "layer", "1:", "1,234,567"],
        ["double", "buffer:", "3", "times", "memory", "beside", "the", "slots"],
    ]


@given(st.lists(st.tuples(st.sampled_from(PERSISTENT + TRANSIENT), st.sampled_from("ab"), st.integers(0, 9))))
def test_sums_are_those_of_what_is_held(held):
    """Everything held and then given back: sums and peaks are those of a plain list."""
    ledger, peak = Ledger(), 0
    for category, unit, num_bytes in held:
        ledger.hold(category, unit, num_bytes)
    peak = sum(size for category, _, size in held if category in TRANSIENT)
    assert ledger.transient_bytes == peak == ledger.peak_transient_bytes
    assert ledger.persistent_bytes == sum(size for category, _, size in held if category in PERSISTENT)
    for category in PERSISTENT + TRANSIENT:
        assert (
            ledger.live(category)
            == sum(ledger.live(category, unit) for unit in "ab")
            == ledger.peak(category)
        )
    for category, unit, num_bytes in held:
        ledger.free(category, unit, num_bytes)
    assert (ledger.transient_bytes, ledger.persistent_bytes, ledger.peak_transient_bytes) == (0, 0, peak)
