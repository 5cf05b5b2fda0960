"""The most valuable subset, against all subsets."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.distributed.custom_fsdp import knapsack
from megatron.core.distributed.custom_fsdp.knapsack import Item, best_subset

items_lists = st.lists(st.builds(Item, st.integers(0, 40), st.integers(-2, 60)), max_size=10)
# Few kinds, many of each: what bundles are for.
alike_lists = st.lists(st.sampled_from([Item(3, 7), Item(5, 12), Item(8, 8), Item(4, 0)]), max_size=10)


def total(items: list[Item], chosen: tuple[bool, ...]) -> tuple[int, int]:
    taken = [item for item, its in zip(items, chosen, strict=True) if its]
    return sum(item.weight for item in taken), sum(item.value for item in taken)


@settings(derandomize=True, max_examples=400, deadline=None)
@given(items_lists | alike_lists, st.integers(0, 120))
def test_no_subset_is_worth_more(items, budget):
    chosen = best_subset(items, budget)
    weight, value = total(items, chosen)
    assert weight <= budget
    sums = (total(items, subset) for subset in itertools.product([False, True], repeat=len(items)))
    assert value == max(v for w, v in sums if w <= budget)
    assert all(item.value > 0 for item, its in zip(items, chosen, strict=True) if its)


@settings(derandomize=True, max_examples=100, deadline=None)
@given(alike_lists, st.integers(0, 60))
def test_of_equal_items_the_earlier_are_taken(items, budget):
    chosen = best_subset(items, budget)
    for item in set(items):
        its = [taken for other, taken in zip(items, chosen, strict=True) if other == item]
        assert its == sorted(its, reverse=True)


def test_many_different_items_of_equal_worth_stay_near_the_best(monkeypatch):
    """Value = weight is the hardest kind; with states merged, the budget is still filled but for a sliver."""
    monkeypatch.setattr(knapsack, "MAX_STATES", 30)
    items = [Item(10_007 + 131 * i * i % 99_991, 10_007 + 131 * i * i % 99_991) for i in range(120)]
    budget = sum(item.weight for item in items) // 3
    weight, value = total(items, best_subset(items, budget))
    assert weight <= budget
    assert value >= 0.999 * budget
