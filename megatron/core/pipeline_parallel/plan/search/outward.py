"""Repeating blocks for the V with little waiting, laid out from its turn outwards.

A microbatch goes down and up the ranks twice: forwards, then backwards. Each of the four legs passes every rank, so
from one rank to the next two operations get earlier and two later, and within a period they meet. Somebody must wait
then; what each choice costs shows only some ranks later. So several layouts are carried on from rank to rank, those
that wait least, where `blocks.repeat` knows one.
"""

from __future__ import annotations

import math

from megatron.core.pipeline_parallel.plan.search.blocks import Block, packs
from megatron.core.pipeline_parallel.plan.search.problem import Problem, slack

# Layouts that are carried on, and what each may become on the next rank.
_WIDTH, _CHILDREN = 4, 8
# Phases that are tried for one period, and periods, as shares of the least one; and how often the step to the first
# period that does is halved.
_PHASES = 6
_STRETCHES = (1.0, 1.07, 1.16, 1.28, 1.42)
_HALVINGS = 2
# The order of places and waits is F0, F1, B1, B0. F0 and B1 are laid out against time: they wait by being earlier.
_SIGNS = (-1.0, 1.0, -1.0, 1.0)

_Places = tuple[float, ...]


def shortest(problem: Problem, least: float, most: float) -> list[Block]:
    """Blocks that keep to all limits, about the shortest periods that do, between `least` and `most`."""
    found: list[Block] = []
    below = 0.0
    for stretch in _STRETCHES:
        period = least * stretch
        if period >= most:
            break
        block = _fitting(problem, period)
        if block is None:
            below = period
            continue
        found.append(block)
        for _ in range(_HALVINGS if below else 0):
            middle = (below + found[-1].period) / 2
            block = _fitting(problem, middle)
            if block is None:
                below = middle
            else:
                found.append(block)
        break
    return found[::-1]


def _fitting(problem: Problem, period: float) -> Block | None:
    """The first block of this period that keeps to all limits."""
    outward = Outward(problem, period)
    for step in range(_PHASES):
        block = outward.block(step * period / _PHASES)
        if block is not None and block.fits(problem):
            return block
    return None


class Outward:
    """Lays out blocks of one problem on the V with one period."""

    def __init__(self, problem: Problem, period: float) -> None:
        self.problem, self.period, self.tolerance = problem, period, slack(period)
        costs, num_stages = problem.costs, problem.num_stages
        self.num_ranks = problem.placement.num_ranks
        # By rank: F0, F1, B1, B0, W1, W0.
        self.durations = [
            (costs.f[a], costs.f[z], costs.b[z], costs.b[a], costs.w[z], costs.w[a])
            for a, z in ((rank, num_stages - 1 - rank) for rank in range(self.num_ranks))
        ]
        self.known: dict[tuple[tuple[float, ...], tuple[int, ...]], list[_Places]] = {}

    def block(self, phase: float) -> Block | None:
        """The block in which, on the last rank, B of the second chunk starts `phase` after its F within the period."""
        layouts: list[tuple[float, list[_Places]]] = [(0.0, [])]
        for rank in range(self.num_ranks - 1, -1, -1):
            grown: dict[tuple[int, ...], tuple[float, list[_Places]]] = {}
            for waited, places in layouts:
                earliest = self._earliest(rank, places, phase)
                for waits in self._waits(rank, earliest):
                    at = tuple(
                        one + sign * wait for one, sign, wait in zip(earliest, _SIGNS, waits, strict=True)
                    )
                    total = waited + sum(waits)
                    mark = self._mark(at)
                    if mark not in grown or total < grown[mark][0] - self.tolerance:
                        grown[mark] = total, [*places, at]
            if not grown:
                return None
            layouts = sorted(grown.values(), key=lambda one: one[0])[:_WIDTH]
        closed = [block for _, places in layouts if (block := self._closed(places)) is not None]
        return min(closed, key=self._excess, default=None)

    def _mark(self, at: _Places) -> tuple[int, ...]:
        """The three phases within the period, for comparison."""
        unit = self.tolerance * 100
        turn = round(self.period / unit)
        return tuple(round((one - at[0]) / unit) % turn for one in at[1:])

    def _earliest(self, rank: int, places: list[_Places], phase: float) -> _Places:
        """Where the four operations would be without waiting; those laid out against time: at the latest."""
        f0, _, b1, _, _, _ = self.durations[rank]
        if not places:
            return 0.0, f0, f0 + phase, f0 + phase + b1
        inner, comm = self.durations[rank + 1], self.problem.costs.comm
        a, b, c, d = places[-1]
        return a - f0 - comm, b + inner[1] + comm, c - b1 - comm, d + inner[3] + comm

    def _waits(self, rank: int, earliest: _Places) -> list[_Places]:
        """What the four wait so that they do not meet and the W's have room; the least ones."""
        durations = self.durations[rank]
        key = durations, self._mark(earliest)
        if key not in self.known:
            found: dict[tuple[float, ...], float] = {}
            self._take_turns(durations, earliest, [], {}, 0.0, found)
            least = sorted((total, waits) for waits, total in found.items())
            self.known[key] = [waits for _, waits in least[:_CHILDREN]]
        return self.known[key]

    def _take_turns(
        self,
        durations: tuple[float, ...],
        earliest: _Places,
        placed: list[tuple[float, float]],
        waits: dict[int, float],
        total: float,
        found: dict[tuple[float, ...], float],
    ) -> None:
        """Place what is left of the four in every order, each with the least wait."""
        if len(waits) == 4:
            found[tuple(round(waits[which], 9) for which in range(4))] = total
            return
        if found and total >= min(found.values()) + self.period:
            return
        for which in range(4):
            if which in waits or (found and min(found.values()) <= self.tolerance):
                continue
            left = [durations[one] for one in range(6) if one != which and one not in waits]
            wait = self._wait(placed, earliest[which], durations[which], _SIGNS[which], left)
            if wait >= 0:
                at = (earliest[which] + _SIGNS[which] * wait) % self.period
                self._take_turns(
                    durations,
                    earliest,
                    [*placed, (at, durations[which])],
                    {**waits, which: wait},
                    total + wait,
                    found,
                )

    def _wait(
        self, placed: list[tuple[float, float]], at: float, duration: float, sign: float, left: list[float]
    ) -> float:
        """The least wait to a place that is free and leaves room for what is left; -1: there is none."""
        period, tolerance = self.period, self.tolerance
        base = at % period
        left = [one for one in left if one > tolerance]
        sums = {0.0}
        for one in left:
            sums |= {round(total + one, 9) for total in sums}
        rooms = _rooms(placed, period, tolerance)
        waits = [0.0]
        for start, length in rooms:
            if length + tolerance >= duration:
                for total in sums:
                    if total <= length - duration + tolerance:
                        waits.append((sign * (start + total - base)) % period)
                        waits.append((sign * (start + length - duration - total - base)) % period)
        for wait in sorted(0.0 if period - wait < tolerance else wait for wait in waits):
            start = (base + sign * wait) % period
            rest = _without(rooms, start, duration, period, tolerance)
            if rest is not None and packs(sorted(left, reverse=True), rest, tolerance):
                return wait
        return -1.0

    def _excess(self, block: Block) -> float:
        """By how much it needs more memory than the limit of the rank that has the least for it."""
        peaks = block.peaks(self.problem)
        return max(peak - limit for peak, limit in zip(peaks, self.problem.limits, strict=True))

    def _closed(self, inwards: list[_Places]) -> Block | None:
        """The block: the backwards come when all forwards of their microbatch are through. None if W's do not fit."""
        period, num_stages = self.period, self.problem.num_stages
        places = inwards[::-1]
        a, b, c, _ = places[0]
        turns = math.ceil((b + self.durations[0][1] - c) / period - self.tolerance / period)
        offsets = [0.0] * (3 * num_stages)
        for rank, (f0, f1, b1, b0) in enumerate(places):
            first, second = rank, num_stages - 1 - rank
            b1, b0 = b1 + turns * period, b0 + turns * period
            for code, at in (
                (first, f0),
                (second, f1),
                (num_stages + second, b1),
                (num_stages + first, b0),
            ):
                offsets[code] = at - a
            weights = self._weights(rank, (f0, f1, b1, b0))
            if weights is None:
                return None
            offsets[2 * num_stages + second] = weights[0] - a
            offsets[2 * num_stages + first] = weights[1] - a
        return Block(offsets, period)

    def _weights(self, rank: int, at: _Places) -> tuple[float, float] | None:
        """Where the W's of the second and of the first chunk start: that order or the other, whichever ends sooner."""
        durations = self.durations[rank]
        placed = [(one % self.period, duration) for one, duration in zip(at, durations[:4], strict=True)]
        ready = (at[2] + durations[2], at[3] + durations[3])
        found = []
        for first, other in ((0, 1), (1, 0)):
            one = self._wait(placed, ready[first], durations[4 + first], 1.0, [durations[4 + other]])
            also = [*placed, ((ready[first] + one) % self.period, durations[4 + first])]
            two = self._wait(also, ready[other], durations[4 + other], 1.0, [])
            if one >= 0 and two >= 0:  # rooms that are filled to the last bit may miss it by rounding
                waits = (one, two) if first == 0 else (two, one)
                found.append((one + two, (ready[0] + waits[0], ready[1] + waits[1])))
        return min(found)[1] if found else None


def _rooms(placed: list[tuple[float, float]], period: float, tolerance: float) -> list[tuple[float, float]]:
    """The free intervals of a period as (start, length)."""
    if not placed:
        return [(0.0, period)]
    ordered = sorted(one for one in placed if one[1] > 0) or sorted(placed)[:1]
    rooms = []
    for index, (start, duration) in enumerate(ordered):
        following = ordered[index + 1][0] if index + 1 < len(ordered) else ordered[0][0] + period
        if following - start - duration > tolerance:
            rooms.append(((start + duration) % period, following - start - duration))
    return rooms


def _without(
    rooms: list[tuple[float, float]], start: float, duration: float, period: float, tolerance: float
) -> list[float] | None:
    """Lengths of the rooms that are left when an operation takes its place; None: it does not fit there."""
    for index, (begin, length) in enumerate(rooms):
        before = (start - begin) % period
        if period - before < tolerance:
            before = 0.0
        if before + duration <= length + tolerance:
            rest = [one for at, (_, one) in enumerate(rooms) if at != index]
            return [*rest, before, length - before - duration]
        if len(rooms) == 1 and length >= period - tolerance:
            return [length - duration]
    return None if duration > tolerance else [length for _, length in rooms]
