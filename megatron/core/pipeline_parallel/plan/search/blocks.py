"""Repeating blocks: one microbatch's operations laid out so that they repeat every period without colliding.

This is modulo scheduling. The operations of a microbatch that lie on its way (all F, then all B) are placed one by one,
each as early as its input allows and at a place of its rank's period that is free and leaves room for what is still
to come; the W's last (after the controllable-memory paper, arXiv 2405.15362).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron.core.pipeline_parallel.plan.search.problem import TOLERANCE, Order, OrderProblem, slack


@dataclass(frozen=True)
class Block:
    """offsets: by code, when the operation of microbatch 0 starts; microbatch m is m periods later."""

    offsets: list[float]
    period: float

    def order(self, problem: OrderProblem) -> Order:
        """The operations of all microbatches in the order of their starts."""
        num_stages, total = problem.num_stages, problem.num_microbatches
        rows = []
        for mine in problem.stages():
            starts = [
                # Ties: with T_W = 0 a W starts with its B. F, B, W is the order of one microbatch.
                (self.offsets[code] + m * self.period, code // num_stages, m, code)
                for stage in mine
                for code in (stage, num_stages + stage, 2 * num_stages + stage)
                for m in range(total)
            ]
            rows.append([one[3] for one in sorted(starts)])
        return rows

    def peaks(self, problem: OrderProblem) -> list[float]:
        """By rank: what it holds at most once the block repeats, in program order."""
        num_stages, costs, period = problem.num_stages, problem.costs, self.period
        found = []
        for mine in problem.stages():
            highest = 0.0
            # After an F, or after a B that leaves more than its F did.
            growing = [num_stages + one for one in mine if costs.held_after_b[one] > costs.activation[one]]
            for code in (*mine, *growing):
                now, is_b = self.offsets[code], code >= num_stages
                held = 0.0
                for stage in mine:
                    size, kept = costs.activation[stage], costs.held_after_b[stage]
                    forwards = math.floor((now - self.offsets[stage]) / period + TOLERANCE)
                    backwards = (now - self.offsets[num_stages + stage]) / period
                    # At one time F's come first, then B's: before an F no B of its time counts, behind a B all do.
                    through = (
                        math.floor(backwards + TOLERANCE) + 1 if is_b else math.ceil(backwards - TOLERANCE)
                    )
                    weights = math.ceil((now - self.offsets[2 * num_stages + stage]) / period - TOLERANCE)
                    # Microbatches up to `forwards` have begun; those before `through` and `weights` are through.
                    held += (forwards + 1 - through) * size + (through - weights) * kept
                highest = max(highest, held)
            found.append(highest)
        return found

    def fits(self, problem: OrderProblem) -> bool:
        """Whether the block can repeat for ever within the limits of all ranks."""
        return all(
            peak <= limit + slack(limit)
            for peak, limit in zip(self.peaks(problem), problem.limits, strict=True)
        )


def repeat(problem: OrderProblem, period: float) -> Block | None:
    """The block with this period; None where its operations do not fit."""
    return _Layout(problem, period).block()


class _Layout:
    """rooms: by rank, the free intervals of the period, as (start, end) within 0 to period."""

    def __init__(self, problem: OrderProblem, period: float) -> None:
        self.problem, self.period = problem, period
        self.tolerance = slack(period)
        num_stages, costs = problem.num_stages, problem.costs
        self.num_stages = num_stages
        self.durations = [*costs.f, *costs.b, *costs.w]
        self.ranks = problem.placement.ranks()
        # By rank: what is placed, as (start within the period, duration).
        self.placed: list[list[tuple[float, float]]] = [[] for _ in range(problem.placement.num_ranks)]
        self.left = [
            [self.durations[kind * num_stages + stage] for stage in mine for kind in range(3)]
            for mine in problem.stages()
        ]

    def block(self) -> Block | None:
        num_stages, latencies = self.num_stages, self.problem.latencies()
        offsets = [0.0] * (3 * num_stages)
        arrival = 0.0
        for code in [*range(num_stages), *range(2 * num_stages - 1, num_stages - 1, -1)]:
            kind, stage = divmod(code, num_stages)
            start = self._place(code, arrival)
            if start < 0:
                return None
            offsets[code] = start
            # A gradient goes to the stage before; the loss's is there at once.
            behind = latencies[stage - 1] if kind and stage else 0.0 if kind else latencies[stage]
            arrival = start + self.durations[code] + behind
        for stage in range(num_stages - 1, -1, -1):
            code, backward = 2 * num_stages + stage, num_stages + stage
            start = self._place(code, offsets[backward] + self.durations[backward])
            if start < 0:
                return None
            offsets[code] = start
        return Block(offsets, self.period)

    def _place(self, code: int, earliest: float) -> float:
        """Where an operation starts that may not start before `earliest`, or -1; it is noted as placed."""
        rank, duration = self.ranks[code % self.num_stages], self.durations[code]
        left = self.left[rank]
        left.remove(duration)
        base = earliest % self.period
        for wait in sorted({round(one, 9) for one in self._waits(rank, base, duration, left)}):
            start = (earliest + wait) % self.period
            if self._roomy(rank, start, duration, left):
                self.placed[rank].append((start, duration))
                return earliest + wait
        return -1.0

    def _rooms(self, rank: int, placed: list[tuple[float, float]]) -> list[tuple[float, float]]:
        """The free intervals of a rank's period as (start, length); one may run over its end."""
        period = self.period
        if not placed:
            return [(0.0, period)]
        ordered = sorted(placed)
        rooms = []
        for index, (start, duration) in enumerate(ordered):
            following = ordered[index + 1][0] if index + 1 < len(ordered) else ordered[0][0] + period
            length = following - start - duration
            if length > self.tolerance:
                rooms.append(((start + duration) % period, length))
        return rooms

    def _waits(self, rank: int, base: float, duration: float, left: list[float]) -> list[float]:
        """How long to wait: until a place where what is left of the room before it can be filled."""
        period = self.period
        sums = {0.0}
        for one in left:
            sums |= {total + one for total in sums}
        waits = [0.0]
        for start, length in self._rooms(rank, self.placed[rank]):
            if length + self.tolerance < duration:
                continue
            whole = length >= period - self.tolerance
            for total in sums:
                for at in (start + total, start + length - duration - total):
                    if start - self.tolerance <= at <= start + length - duration + self.tolerance or whole:
                        wait = (at - base) % period
                        waits.append(0.0 if period - wait < self.tolerance else wait)
        return waits

    def _roomy(self, rank: int, start: float, duration: float, left: list[float]) -> bool:
        """Whether the operation fits at this place of the period and all that is left still fits around it."""
        placed = self.placed[rank]
        period, tolerance = self.period, self.tolerance
        for at, length in placed:
            gap = (start - at) % period
            if gap > period - tolerance:
                gap = 0.0
            if gap < length - tolerance and length > tolerance:
                return False
            if (at - start) % period < duration - tolerance and length > 0:
                if period - (at - start) % period > tolerance:
                    return False
        lengths = [length for _, length in self._rooms(rank, [*placed, (start, duration)])]
        return packs(sorted(left, reverse=True), lengths, tolerance)


def packs(pieces: list[float], rooms: list[float], tolerance: float) -> bool:
    """Whether all pieces fit into the rooms (there are at most six)."""
    if not pieces:
        return True
    piece, rest = pieces[0], pieces[1:]
    tried = set()
    for index, room in enumerate(rooms):
        if room + tolerance >= piece and room not in tried:
            tried.add(room)
            if packs(rest, [*rooms[:index], room - piece, *rooms[index + 1 :]], tolerance):
                return True
    return False
