"""In which order the members of a blend take turns: no randomness, exact float64 arithmetic, fast without a compiler.

The rule, for i = 0, 1, 2, ...: e_j = w_j * max(i, 1) - taken_j; the member with the largest e_j (the lowest j
of equals) gives its next sample. Each step needs the one before, which would make it a slow Python loop.

[Note: parallel in time] The range of i is cut into segments that are walked side by side, one numpy operation
advancing all of them one step. A segment starts from a guess of `taken`: w_j * i rounded so that it adds up
to i. When all are through, a segment is right if it started from the counts that its predecessor, being
right, ended with. Segments that did not are walked again from those counts. Nearly always the guess heals
within a few steps of the segment before it and one more round settles all; at worst every round settles one
segment more. The arithmetic of each step is the rule's own, so the result is the rule's, bit for bit.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

STEPS_PER_SEGMENT = 1 << 11
MOST_SEGMENTS = 1 << 10
LARGEST_BLEND = 2**15 - 1

Indices = tuple[NDArray[np.int16], NDArray[np.int64]]
"""Of each blended sample: the member that gives it, and which of the member's samples it is."""


def build_blending_indices(weights: list[float], size: int) -> Indices:
    """Turns of `size` samples under normalised weights."""
    array = np.array(weights, dtype=np.float64)
    return _walk(_Race(array, None), size)


def build_exhaustive_blending_indices(sizes: list[int]) -> Indices:
    """Turns until every member is used up: w_j = size_j / total, and a used-up member leaves the race."""
    total = sum(sizes)
    weights = np.array([size / total for size in sizes], dtype=np.float64)
    return _walk(_Race(weights, np.array(sizes, dtype=np.int64)), total)


@dataclasses.dataclass
class _Race:
    """The rule. weights: float64 [D].  limits: samples that each member has, int64 [D], None for no limit."""

    weights: NDArray[np.float64]
    limits: NDArray[np.int64] | None

    def winners(self, step: NDArray[np.int64], taken: NDArray[np.float64]) -> NDArray[np.intp]:
        """Who takes step[k], given taken[k]: [K] of member, for K independent races."""
        errors = self.weights * np.maximum(step, 1).astype(np.float64)[:, None]
        errors -= taken
        if self.limits is not None:
            errors[taken >= self.limits] = -np.inf
        return np.argmax(errors, axis=1)  # the first of equals

    def guess(self, step: NDArray[np.int64]) -> NDArray[np.float64]:
        """Counts [K, D] near weights * step that add up to step, by largest remainder, within the limits."""
        ideal = self.weights * step.astype(np.float64)[:, None]
        taken = np.floor(ideal)
        if self.limits is not None:
            np.minimum(taken, self.limits, out=taken)
        missing = step - taken.sum(axis=1).astype(np.int64)
        order = np.argsort(taken - ideal, axis=1, kind="stable")
        rank = np.argsort(order, axis=1, kind="stable")
        taken += rank < missing[:, None]
        return taken


def _walk(race: _Race, size: int) -> Indices:
    num_members = len(race.weights)
    assert 0 < num_members <= LARGEST_BLEND, f"{num_members} members, at most {LARGEST_BLEND}"
    member = np.empty(size, dtype=np.int16)
    sample = np.empty(size, dtype=np.int64)
    taken = np.zeros(num_members, dtype=np.float64)
    start = 0
    while start < size:
        stop = min(size, start + MOST_SEGMENTS * STEPS_PER_SEGMENT)
        taken = _walk_stretch(race, start, stop, taken, member, sample)
        start = stop
    return member, sample


def _walk_stretch(
    race: _Race,
    start: int,
    stop: int,
    taken: NDArray[np.float64],
    member: NDArray[np.int16],
    sample: NDArray[np.int64],
) -> NDArray[np.float64]:
    """Fill [start, stop) given the counts at `start`; returns the counts at `stop`."""
    first = np.arange(start, stop, STEPS_PER_SEGMENT, dtype=np.int64)
    begin = race.guess(first)
    begin[0] = taken
    end = np.empty_like(begin)
    todo = np.arange(len(first))
    while len(todo):
        end[todo] = _walk_segments(race, first[todo], stop, begin[todo], member, sample)
        wrong = np.flatnonzero((begin[1:] != end[:-1]).any(axis=1)) + 1
        begin[wrong] = end[wrong - 1]
        todo = wrong
    return end[-1]


def _walk_segments(
    race: _Race,
    first: NDArray[np.int64],
    stop: int,
    begin: NDArray[np.float64],
    member: NDArray[np.int16],
    sample: NDArray[np.int64],
) -> NDArray[np.float64]:
    """Walk segments side by side from the counts in `begin` [K, D]; returns their counts at the end."""
    taken = begin.copy()
    last_length = min(
        STEPS_PER_SEGMENT, stop - int(first[-1])
    )  # only the segment before `stop` can be shorter
    active = len(first)
    rows = np.arange(active)
    for offset in range(STEPS_PER_SEGMENT):
        if offset == last_length:
            active -= 1
            if not active:
                break
        step = first[:active] + offset
        winner = race.winners(step, taken[:active])
        member[step] = winner
        sample[step] = taken[rows[:active], winner]
        taken[rows[:active], winner] += 1
    return taken
