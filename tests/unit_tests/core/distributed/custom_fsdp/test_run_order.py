"""The order of demands: recorded once, replayed, recorded again where it changes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.distributed.custom_fsdp.run_order import RunOrder

# embedding 0 (its backward reads nothing), layers 1-3, head 4
MICROBATCH = (0, 1, 2, 3, 4, 4, 3, 2, 1)
RECORD = (0, 1, 2, 3, 4, 3, 2, 1)
demand_lists = st.lists(st.integers(0, 6), max_size=14)


def run(order: RunOrder, demands: Sequence[int], *, repeats: bool) -> list[list[int]]:
    """A microbatch; what was upcoming after each demand."""
    order.begin(repeats=repeats)
    ahead = []
    for unit in demands:
        order.need(unit)
        ahead.append(list(order.upcoming()))
    return ahead


def collapsed(demands: Sequence[int]) -> tuple[int, ...]:
    return tuple(unit for unit, _ in itertools.groupby(demands))


def test_the_first_microbatch_knows_nothing_and_the_second_all():
    order = RunOrder()
    assert run(order, MICROBATCH, repeats=True) == [[]] * len(MICROBATCH)
    assert order.recorded == ()
    order.begin(repeats=False)
    assert order.recorded == RECORD
    # Before the first demand all of the forward, until a unit comes again.
    assert list(order.upcoming()) == [0, 1, 2, 3, 4]
    order.need(0)
    assert list(order.upcoming()) == [1, 2, 3, 4]
    order.need(1)
    assert list(order.upcoming()) == [2, 3, 4]


def test_backward_is_ahead_of_the_turn_and_the_next_microbatch_ahead_of_the_end():
    order = RunOrder()
    run(order, MICROBATCH, repeats=True)
    ahead = run(order, MICROBATCH, repeats=True)
    assert ahead[3:] == [[4], [3, 2, 1, 0], [3, 2, 1, 0], [2, 1, 0], [1, 0], [0]]
    last = run(order, MICROBATCH, repeats=False)
    assert last[3:] == [[4], [3, 2, 1], [3, 2, 1], [2, 1], [1], []]


def test_the_last_of_the_forward_is_known_to_be_next_again():
    order = RunOrder()
    run(order, MICROBATCH, repeats=True)
    assert not order.next_is_same(1)
    order.begin(repeats=True)
    known = []
    for unit in MICROBATCH:
        order.need(unit)
        known.append(order.next_is_same(unit))
    assert known == [False, False, False, False, True, False, False, False, False]
    assert not order.next_is_same(4)  # not the current one


def test_a_beginning_that_equals_the_end_is_not_next_again():
    order = RunOrder()
    run(order, (0, 1, 1, 0), repeats=True)
    run(order, (0, 1, 1, 0), repeats=True)
    assert not order.next_is_same(0)


def test_a_departure_loses_the_rest_and_is_recorded():
    order = RunOrder()
    run(order, MICROBATCH, repeats=True)
    ahead = run(order, (0, 1, 3, 4, 4, 3, 1), repeats=True)
    assert ahead == [[1, 2, 3, 4], [2, 3, 4], [], [], [], [], []]
    assert not order.follows
    assert order.recorded == RECORD  # the last complete one
    again = run(order, (0, 1, 3, 4, 4, 3, 1), repeats=False)
    assert order.follows
    assert order.recorded == (0, 1, 3, 4, 3, 1)
    assert again[1] == [3, 4]
    assert again[-1] == []


def test_longer_shorter_and_empty_microbatches():
    order = RunOrder()
    run(order, (0, 1, 2), repeats=True)
    # Longer than the record: at its end the beginning was expected.
    assert run(order, (0, 1, 2, 5), repeats=True)[-2:] == [[0, 1], []]
    order.begin(repeats=True)
    assert order.recorded == (0, 1, 2, 5)
    order.need(0)
    order.begin(repeats=True)  # ended early
    assert order.recorded == (0,)
    order.begin(repeats=True)  # without any demand
    assert order.recorded == (0,)


def test_more_demands_in_a_row_than_recorded_are_no_departure():
    order = RunOrder()
    run(order, (0, 1), repeats=True)
    run(order, (0, 0, 1), repeats=True)
    assert order.follows
    order.begin(repeats=False)
    order.need(0)
    assert order.next_is_same(0)
    order.need(1)  # fewer than recorded
    assert order.follows


def test_a_demand_before_any_microbatch_is_a_mistake():
    with pytest.raises(AssertionError, match="before a microbatch"):
        RunOrder().need(0)


@settings(derandomize=True, max_examples=300, deadline=None)
@given(demand_lists, st.booleans())
def test_a_replay_foretells_exactly_what_is_demanded(demands, repeats):
    order = RunOrder()
    run(order, demands, repeats=True)
    ahead = run(order, demands, repeats=repeats)
    order.begin(repeats=False)
    assert order.recorded == collapsed(demands)
    for place, (unit, upcoming) in enumerate(zip(demands, ahead, strict=True)):
        future = list(collapsed([unit, *demands[place + 1 :]]))[1:]
        if repeats:
            future += collapsed(demands)
        # A prefix of the future, as long as it can be with each unit once and without the current one.
        assert upcoming == future[: len(upcoming)]
        assert len({unit, *upcoming}) == 1 + len(upcoming)
        rest = future[len(upcoming) :]
        assert not rest or rest[0] in {unit, *upcoming}


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.lists(st.tuples(demand_lists, st.booleans()), min_size=1, max_size=5))
def test_equal_demands_foretell_equally_and_the_last_microbatch_is_the_record(microbatches):
    here, there = RunOrder(), RunOrder()
    for demands, repeats in microbatches:
        assert run(here, demands, repeats=repeats) == run(there, demands, repeats=repeats)
    here.begin(repeats=False)
    demanded = [collapsed(demands) for demands, _ in microbatches if demands]
    assert here.recorded == (demanded[-1] if demanded else ())
