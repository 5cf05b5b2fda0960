"""The double buffer: neighbours never share a slot, and a slot holds whatever is put there."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.distributed.custom_fsdp.slots import SlotPlan, conflicts, plan_slots

sizes_lists = st.lists(st.integers(0, 10**9), max_size=20)


def test_units_take_turns_and_slots_are_as_large_as_their_largest():
    plan = plan_slots([7, 3, 4, 3, 9])
    assert plan == SlotPlan((0, 1, 0, 1, 0), (9, 3), ())


def test_lasting_units_have_memory_of_their_own_and_the_others_take_turns_without_them():
    plan = plan_slots([50, 3, 4, 60, 5], lasting={3, 0})
    assert plan == SlotPlan((None, 0, 1, None, 0), (5, 4), (0, 3))
    # A tied unit 0, used first and last in the forward.
    assert conflicts(plan, [0, 1, 2, 4, 0, 0, 4, 2, 1, 0], repeats=True) == []


def test_only_the_step_to_the_next_microbatch_can_conflict():
    plan = plan_slots([1] * 5)
    # Backward reads neither unit 0 nor 1: it ends with 2, whose slot is that of 0.
    order = [0, 1, 2, 3, 4, 4, 3, 2]
    assert conflicts(plan, order) == []
    assert conflicts(plan, order, repeats=True) == [(2, 0)]
    assert conflicts(plan, [0, 1, 2, 3, 4, 4, 3, 2, 1], repeats=True) == []


def test_an_order_that_is_not_the_planned_one_conflicts():
    plan = plan_slots([1] * 4)
    assert conflicts(plan, [0, 2, 1, 3]) == [(0, 2), (1, 3)]


@settings(derandomize=True, max_examples=200, deadline=None)
@given(sizes_lists, st.data())
def test_slots_of_any_units(sizes, data):
    lasting = data.draw(st.sets(st.sampled_from(range(len(sizes))))) if sizes else set()
    plan = plan_slots(sizes, lasting=lasting)
    turns = [slot for slot in plan.slot_of if slot is not None]
    assert all(a != b for a, b in itertools.pairwise(turns))
    assert plan.overflow == tuple(i for i, slot in enumerate(plan.slot_of) if slot is None)
    assert set(plan.overflow) == lasting
    for slot in (0, 1):
        its = [size for size, where in zip(sizes, plan.slot_of, strict=True) if where == slot]
        assert plan.slot_bytes[slot] == max(its, default=0)
    forward = list(range(len(sizes)))
    assert conflicts(plan, forward + forward[::-1], repeats=True) == []
