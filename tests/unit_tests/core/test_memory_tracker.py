"""Bytes held: live, peak, by category and unit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.memory_tracker import PERSISTENT, TRANSIENT, MemoryTracker


def test_live_and_peak_bytes():
    tracker = MemoryTracker()
    tracker.book({"weights": 100, "moments": 50})
    tracker.hold("gathered", "a", 30)
    tracker.hold("gathered", "b", 20)
    tracker.free("gathered", "a", 30)
    tracker.hold("grads", "b", 25)
    assert (tracker.persistent_bytes, tracker.transient_bytes) == (150, 45)
    assert (
        tracker.live("gathered"),
        tracker.live("gathered", "a"),
        tracker.live("gathered", "b"),
    ) == (
        20,
        0,
        20,
    )
    assert (
        tracker.peak("gathered"),
        tracker.peak("grads"),
        tracker.peak("weights"),
    ) == (50, 25, 100)
    assert tracker.peak_transient_bytes == 50, "the categories' peaks are not at the same time"
    tracker.reset_peaks()
    assert (tracker.peak("gathered"), tracker.peak_transient_bytes) == (20, 45)
    tracker.free("grads", "b", 10)
    assert (
        tracker.live("grads"),
        tracker.peak("grads"),
        tracker.peak_transient_bytes,
    ) == (15, 25, 45)


def test_what_was_not_held_cannot_be_given_back():
    tracker = MemoryTracker()
    tracker.hold("gathered", "a", 30)
    with pytest.raises(AssertionError, match="gathered of 'b': 30 bytes given back of 0"):
        tracker.free("gathered", "b", 30)
    with pytest.raises(AssertionError, match="gathered of 'a': 31 bytes given back of 30"):
        tracker.free("gathered", "a", 31)
    with pytest.raises(AssertionError, match=r"category 'wieghts'; known: .*'weights'"):
        tracker.hold("wieghts", "a", 1)


def test_persistent_categories_may_be_released_for_a_while():
    """Sharded gradients have no memory from a step's beginning to their first reduction."""
    tracker = MemoryTracker()
    tracker.hold("main_grads", "a", 40)
    tracker.free("main_grads", "a", 40)
    assert (
        tracker.persistent_bytes,
        tracker.peak("main_grads"),
        tracker.transient_bytes,
    ) == (0, 40, 0)


def test_the_table_has_a_row_a_category_and_the_units_that_hold_something():
    tracker = MemoryTracker()
    tracker.book({"weights": 4096, "extra_grads": 0})
    tracker.hold("gathered", "layer 1", 1234567)
    tracker.hold("gathered", "layer 0", 8)
    tracker.free("gathered", "layer 0", 8)
    tracker.overflows = 3
    rows = [line.split() for line in tracker.lines()]
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
    tracker, peak = MemoryTracker(), 0
    for category, unit, num_bytes in held:
        tracker.hold(category, unit, num_bytes)
    peak = sum(size for category, _, size in held if category in TRANSIENT)
    assert tracker.transient_bytes == peak == tracker.peak_transient_bytes
    assert tracker.persistent_bytes == sum(size for category, _, size in held if category in PERSISTENT)
    for category in PERSISTENT + TRANSIENT:
        assert (
            tracker.live(category)
            == sum(tracker.live(category, unit) for unit in "ab")
            == tracker.peak(category)
        )
    for category, unit, num_bytes in held:
        tracker.free(category, unit, num_bytes)
    assert (
        tracker.transient_bytes,
        tracker.persistent_bytes,
        tracker.peak_transient_bytes,
    ) == (0, 0, peak)
