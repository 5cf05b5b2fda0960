"""The most valuable subset of items within a weight (floor 0, pure).

0/1 knapsack by undominated states (Nemhauser and Ullmann 1969) with the bound of the divisible problem. Made for few
kinds of items that come many times each, as the layers of a model do: equal items are taken in bundles of 1, 2, 4, ...
Weights and values are whole numbers of any size; nothing is rounded.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from fractions import Fraction

MAX_STATES = 400


@dataclasses.dataclass(frozen=True)
class Item:
    """weight: what it takes of the budget; value: what it is worth."""

    weight: int
    value: int


@dataclasses.dataclass(frozen=True)
class _Bundle:
    """So many items of one kind, taken together or not at all."""

    kind: Item
    count: int

    @property
    def weight(self) -> int:
        return self.kind.weight * self.count

    @property
    def value(self) -> int:
        return self.kind.value * self.count


@dataclasses.dataclass(frozen=True)
class _Chain:
    """The bundles taken, the latest first."""

    bundle: int
    before: _Chain | None


# Weight, value, and what was taken for it.
_State = tuple[int, int, _Chain | None]


class _Search:
    """Bundles by falling value per weight, and the best subset found so far."""

    def __init__(self, bundles: Sequence[_Bundle], budget: int) -> None:
        self.bundles = bundles
        self.budget = budget
        self.weights, self.values = [0], [0]  # of the first so many bundles together
        for bundle in bundles:
            self.weights.append(self.weights[-1] + bundle.weight)
            self.values.append(self.values[-1] + bundle.value)
        self.best: _State = (0, 0, None)

    def bound(self, state: _State, place: int) -> int:
        """No completion of the state by bundles from this place on is worth more: that of divisible items."""
        room = self.weights[place] + self.budget - state[0]
        end = bisect_right(self.weights, room) - 1
        value = state[1] + self.values[end] - self.values[place]
        if end == len(self.bundles):
            return value
        broken = self.bundles[end]
        return value + (room - self.weights[end]) * broken.value // broken.weight

    def complete(self, state: _State, place: int) -> None:
        """Take whatever still fits, the best first; remember it where nothing better is known."""
        weight, value, chain = state
        for index in range(place, len(self.bundles)):
            bundle = self.bundles[index]
            if weight + bundle.weight <= self.budget:
                weight, value, chain = weight + bundle.weight, value + bundle.value, _Chain(index, chain)
        if value > self.best[1]:
            self.best = (weight, value, chain)

    def run(self) -> _State:
        states: list[_State] = [(0, 0, None)]
        for place, bundle in enumerate(self.bundles):
            self.complete(max(states, key=lambda s: self.bound(s, place)), place)
            taken: list[_State] = [
                (w + bundle.weight, v + bundle.value, _Chain(place, chain))
                for w, v, chain in states
                if w + bundle.weight <= self.budget
            ]
            undominated = _undominated(sorted(states + taken, key=lambda s: (s[0], -s[1])))
            # What cannot become worth more than the best known is given up.
            states = [s for s in undominated if self.bound(s, place + 1) > self.best[1]]
            if not states:
                break
            states = _thinned(states)
        for state in states:
            self.complete(state, len(self.bundles))
        return self.best


def _undominated(states: Sequence[_State]) -> Iterator[_State]:
    """Of states by rising weight, those worth more than every lighter one."""
    value = -1
    for state in states:
        if state[1] > value:
            value = state[1]
            yield state


def _thinned(states: list[_State]) -> list[_State]:
    """Not more than MAX_STATES: of those within a MAX_STATES-th of the range of values, the lightest stands for all."""
    if len(states) <= MAX_STATES:
        return states
    low, high = states[0][1], states[-1][1]
    lightest: dict[int, _State] = {}
    for state in states:
        lightest.setdefault((state[1] - low) * (MAX_STATES - 1) // (high - low), state)
    return list(lightest.values())


def _bundles_of(kinds: dict[Item, list[int]]) -> list[_Bundle]:
    """Equal items as 1, 2, 4, ... and a rest, the larger first: every number of them can be put together."""
    bundles = []
    for kind in sorted(kinds, key=lambda k: (-Fraction(k.value, k.weight), -k.weight)):
        left = len(kinds[kind])
        sizes: list[int] = []
        while left:
            sizes.append(min(1 << len(sizes), left))
            left -= sizes[-1]
        bundles += [_Bundle(kind, size) for size in sorted(sizes, reverse=True)]
    return bundles


def best_subset(items: Sequence[Item], budget: int) -> tuple[bool, ...]:
    """Which items to take so that their value is the greatest with a weight of at most the budget.

    Exact as long as MAX_STATES states suffice (they do for the units of a model, whose kinds are few); beyond that each
    bundle may lose one MAX_STATES-th of the range of values still open. Items worth nothing are never taken; of equal
    items the earlier ones are; the same items give the same answer everywhere.
    """
    assert budget >= 0, budget
    assert all(item.weight >= 0 for item in items), items
    chosen = [item.value > 0 and item.weight == 0 for item in items]
    kinds: dict[Item, list[int]] = {}
    for index, item in enumerate(items):
        if item.value > 0 and 0 < item.weight <= budget:
            kinds.setdefault(item, []).append(index)
    bundles = _bundles_of(kinds)
    chain = _Search(bundles, budget).run()[2]
    taken = dict.fromkeys(kinds, 0)
    while chain is not None:
        taken[bundles[chain.bundle].kind] += bundles[chain.bundle].count
        chain = chain.before
    for kind, count in taken.items():
        for index in kinds[kind][:count]:
            chosen[index] = True
    return tuple(chosen)
