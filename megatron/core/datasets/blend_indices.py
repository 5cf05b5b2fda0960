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

import numpy as np
from numpy.typing import NDArray

STEPS_PER_SEGMENT = 1 << 11
MOST_SEGMENTS = 1 << 10
LARGEST_BLEND = 2**15 - 1

Indices = tuple[NDArray[np.int16], NDArray[np.int64]]
"""Of each blended sample: the member that gives it, and which of the member's samples it is."""


def build_blending_indices(weights: list[float], size: int) -> Indices:
    """Turns of `size` samples under normalised weights."""
    return _Race(np.array(weights, dtype=np.float64), None, size).run()


def build_exhaustive_blending_indices(sizes: list[int]) -> Indices:
    """Turns until every member is used up: w_j = size_j / total, and a used-up member leaves the race."""
    total = sum(sizes)
    weights = np.array([size / total for size in sizes], dtype=np.float64)
    return _Race(weights, np.array(sizes, dtype=np.int64), total).run()


class _Race:
    """The rule, for `size` samples. weights: float64 [D].  limits: samples that each member has, int64 [D], None for no
    limit."""

    def __init__(self, weights: NDArray[np.float64], limits: NDArray[np.int64] | None, size: int) -> None:
        assert 0 < len(weights) <= LARGEST_BLEND, f"{len(weights)} members, at most {LARGEST_BLEND}"
        self.weights, self.limits, self.size = weights, limits, size
        self.member, self.sample = np.empty(size, dtype=np.int16), np.empty(size, dtype=np.int64)

    def run(self) -> Indices:
        taken = np.zeros(len(self.weights), dtype=np.float64)
        stretch = MOST_SEGMENTS * STEPS_PER_SEGMENT
        for start in range(0, self.size, stretch):
            taken = self._stretch(start, min(self.size, start + stretch), taken)
        return self.member, self.sample

    def _stretch(self, start: int, stop: int, taken: NDArray[np.float64]) -> NDArray[np.float64]:
        """Fill [start, stop) given the counts at `start`; returns the counts at `stop`."""
        first = np.arange(start, stop, STEPS_PER_SEGMENT, dtype=np.int64)
        begin = self._guess(first)
        begin[0] = taken
        end = np.empty_like(begin)
        todo = np.arange(len(first))
        while len(todo):
            end[todo] = self._segments(first[todo], stop, begin[todo])
            todo = np.flatnonzero((begin[1:] != end[:-1]).any(axis=1)) + 1
            begin[todo] = end[todo - 1]
        return end[-1]

    def _segments(
        self, first: NDArray[np.int64], stop: int, taken: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Walk segments side by side from the counts in `taken` [K, D], which become those at their end."""
        last_length = min(
            STEPS_PER_SEGMENT, stop - int(first[-1])
        )  # only the one before `stop` can be shorter
        active = len(first)
        rows = np.arange(active)
        for offset in range(STEPS_PER_SEGMENT):
            if offset == last_length:
                active -= 1
                if not active:
                    break
            step = first[:active] + offset
            winner = self._winners(step, taken[:active])
            self.member[step] = winner
            self.sample[step] = taken[rows[:active], winner]
            taken[rows[:active], winner] += 1
        return taken

    def _winners(self, step: NDArray[np.int64], taken: NDArray[np.float64]) -> NDArray[np.intp]:
        """Who takes step[k], given taken[k]: [K] of member, for K independent races."""
        errors = self.weights * np.maximum(step, 1).astype(np.float64)[:, None]
        errors -= taken
        if self.limits is not None:
            errors[taken >= self.limits] = -np.inf
        return np.argmax(errors, axis=1)  # the first of equals

    def _guess(self, step: NDArray[np.int64]) -> NDArray[np.float64]:
        """Counts [K, D] near weights * step that add up to step, by largest remainder, within the limits."""
        ideal = self.weights * step.astype(np.float64)[:, None]
        taken = np.floor(ideal)
        if self.limits is not None:
            np.minimum(taken, self.limits, out=taken)
        missing = step - taken.sum(axis=1).astype(np.int64)
        order = np.argsort(taken - ideal, axis=1, kind="stable")
        taken += np.argsort(order, axis=1, kind="stable") < missing[:, None]
        return taken
