"""The double buffer: neighbours never share a slot."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.distributed.custom_fsdp.transient_memory import plan_slots


def test_units_take_turns():
    assert plan_slots(5) == (0, 1, 0, 1, 0)
    assert plan_slots(0) == ()


def test_lasting_units_have_memory_of_their_own_and_the_others_take_turns_without_them():
    assert plan_slots(5, lasting={3, 0}) == (None, 0, 1, None, 0)


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.integers(0, 20), st.data())
def test_slots_of_any_units(num_units, data):
    lasting = data.draw(st.sets(st.sampled_from(range(num_units)))) if num_units else set()
    slots = plan_slots(num_units, lasting=lasting)
    assert {unit for unit, slot in enumerate(slots) if slot is None} == lasting
    turns = [slot for slot in slots if slot is not None]
    for order in (turns, turns[::-1]):
        assert all(earlier != later for earlier, later in itertools.pairwise(order))
    assert set(turns) == set(range(min(2, num_units - len(lasting))))
