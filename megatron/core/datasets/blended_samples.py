"""Several datasets read in turns, without randomness, in exact float64 arithmetic.

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

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets.errors import DataError
from megatron.core.datasets.gpt_samples import GPTDataset, Sample, SampleFormat
from megatron.core.datasets.held_arrays import held_in_memory, offer, offered
from megatron.core.words import plain

STEPS_PER_SEGMENT = 1 << 11
MOST_SEGMENTS = 1 << 10
LARGEST_BLEND = 2**15 - 1

Counts = NDArray[np.float64]
Indices = tuple[NDArray[np.int16], NDArray[np.int64]]
"""Of consecutive blended samples: the member that gives each, and which of the member's samples it is."""
TURN = np.dtype([("member", "<i2"), ("sample", "<i8")])


class BlendedDataset:
    """A deterministic mixture.

    members: at least one.  weights: normalised.  size: samples of the blend; None goes through every member
    once. Raises DataError where a member is too short for its turns. Turns are kept in memory, 10 bytes a sample,
    once a machine; building them takes about a second for 10^7, so they are not cached on disk.
    """

    def __init__(self, members: Sequence[GPTDataset], weights: list[float], size: int | None) -> None:
        self.members, self.weights = list(members), list(weights)
        limits = [len(member) for member in members]
        turns_taken = sum(limits) if size is None else size
        name = f"the turns of {turns_taken} samples of a blend (--train-samples)"
        race = exhaustive_race(limits) if size is None else Race(np.array(weights), None, size)
        key = json.dumps(["blend", [one.hex() for one in weights], limits, size])
        layout = TURN, (turns_taken,)
        arrays = offered(key, {"turns": layout})
        if arrays is None:
            turns = held_in_memory(name, layout, map(_turns, race.stretches()))
            arrays = offer(key, {"turns": turns}, is_on_disk=False)
            self._check_turns(race.taken.tolist())
        self._turns = arrays["turns"]

    def _check_turns(self, taken: list[float]) -> None:
        for member, needed in zip(self.members, taken, strict=True):
            if needed > len(member):
                raise DataError(
                    f"{member.corpus.prefix}: the blend needs {plain(needed)} samples of split {member.split!r}, the "
                    f"dataset has {len(member)}: raise --mid-level-dataset-surplus"
                )

    def __len__(self) -> int:
        return len(self._turns)

    def __getitem__(self, i: int) -> Sample:
        """Sample i, as the member gives it."""
        member, sample = self.locate(i)
        return self.members[member][sample]

    def text(self, i: int) -> NDArray[np.int64]:
        """Tokens of sample i, as the member gives them."""
        member, sample = self.locate(i)
        return self.members[member].text(sample)

    @property
    def format(self) -> SampleFormat:
        """Of all members."""
        return self.members[0].format

    def description(self) -> dict[str, object]:
        """What decides which tokens sample i has; see `GPTDataset.description`."""
        return {"weights": self.weights, "members": [member.description() for member in self.members]}

    def documents(self, i: int) -> list[int]:
        """The sequences, in their own corpus, that sample i has tokens of."""
        member, sample = self.locate(i)
        return self.members[member].documents(sample)

    def locate(self, i: int) -> tuple[int, int]:
        """Which member gives sample i, and which of its samples that is."""
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        (turn,) = self._turns[i : i + 1]
        return int(turn["member"]), int(turn["sample"])


def _turns(indices: Indices) -> NDArray[Any]:
    turns = np.empty(len(indices[0]), TURN)
    turns["member"], turns["sample"] = indices
    return turns


def exhaustive_race(sizes: list[int]) -> Race:
    """Turns until every member is used up: w_j = size_j / total, and a used-up member leaves the race."""
    total = sum(sizes)
    weights = np.array([size / max(1, total) for size in sizes], dtype=np.float64)
    return Race(weights, np.array(sizes, dtype=np.int64), total)


class Race:
    """The rule, for `size` samples. weights: float64 [D].  limits: samples that each member has, int64 [D], None for no
    limit."""

    def __init__(self, weights: NDArray[np.float64], limits: NDArray[np.int64] | None, size: int) -> None:
        assert 0 < len(weights) <= LARGEST_BLEND, f"{len(weights)} members, at most {LARGEST_BLEND}"
        self.weights, self.limits, self.size = weights, limits, size
        self.taken = np.zeros(len(self.weights), dtype=np.float64)  # so far, of each member

    def stretches(self) -> Iterator[Indices]:
        """All turns, so many at a time as are walked side by side."""
        stretch = MOST_SEGMENTS * STEPS_PER_SEGMENT
        for start in range(0, self.size, stretch):
            stop = min(self.size, start + stretch)
            first = np.arange(start, stop, STEPS_PER_SEGMENT, dtype=np.int64)
            self._turns = np.empty(stop - start, dtype=np.int16), np.empty(stop - start, dtype=np.int64)
            begin = self._guess(first)
            begin[0] = self.taken
            end = np.empty_like(begin)
            todo = np.arange(len(first))
            while len(todo):
                end[todo] = self._walk(first[todo], start, stop, begin[todo])
                todo = np.flatnonzero((begin[1:] != end[:-1]).any(axis=1)) + 1
                begin[todo] = end[todo - 1]
            self.taken = end[-1]
            yield self._turns

    def _walk(self, first: NDArray[np.int64], start: int, stop: int, taken: Counts) -> Counts:
        """Walk segments of turns [start, stop) side by side from the counts in `taken` [K, D], which become those at
        their end."""
        member, sample = self._turns
        last_length = min(STEPS_PER_SEGMENT, stop - int(first[-1]))  # the one before `stop` may be shorter
        active = len(first)
        rows = np.arange(active)
        for offset in range(STEPS_PER_SEGMENT):
            if offset == last_length:
                active -= 1
                if not active:
                    break
            step = first[:active] + offset
            winner = self._winners(step, taken[:active])
            member[step - start] = winner
            sample[step - start] = taken[rows[:active], winner]
            taken[rows[:active], winner] += 1
        return taken

    def _winners(self, step: NDArray[np.int64], taken: Counts) -> NDArray[np.intp]:
        """Who takes step[k], given taken[k]: [K] of member, for K independent races."""
        errors = self.weights * np.maximum(step, 1).astype(np.float64)[:, None]
        errors -= taken
        if self.limits is not None:
            errors[taken >= self.limits] = -np.inf
        return np.argmax(errors, axis=1)  # the first of equals

    def _guess(self, step: NDArray[np.int64]) -> Counts:
        """Counts [K, D] near weights * step that add up to step, by largest remainder, within the limits."""
        ideal = self.weights * step.astype(np.float64)[:, None]
        taken = np.floor(ideal)
        if self.limits is not None:
            np.minimum(taken, self.limits, out=taken)
        missing = step - taken.sum(axis=1).astype(np.int64)
        order = np.argsort(taken - ideal, axis=1, kind="stable")
        taken += np.argsort(order, axis=1, kind="stable") < missing[:, None]
        return taken
