"""Proven lower bounds: what no order within the limits can beat, and which argument says so.

A rank's span begins with its first F, whose time is known, and what it computes is known, so a bound is a proof of idle
time. Memory is what forces a rank to wait: before the first gradient arrives it can run only F's that fit, behind its
last F only the B's and W's of what fits, behind its last B only W's of what fits, counted in whole ones. (The trip of a
microbatch that it waits for meanwhile is that of arXiv 2401.10241, section 2; memory is what the paper leaves out.)
What one rank does not wait for another one does: the first gradient passes ranks that are free at ends of F's only.

[Experiment: where the truth is] 15 of the widest gaps at P = 4, by annealing of relaxed problems: with limits on one
rank alone, the first or the last, 10 come to within 0.3 points of the best plan known; 4, all of zb-2p, with two
neighbours. [Experiment: what one rank proves] The exact optimum of all that the last rank waits for (best first over
what is done and when gradients arrive; zbv, P = 4, M = 8, 21 drawn costs) is what is proved of it here in 20; waits of
the first and the last microbatch alone give as much. On zb-1p those of the others count too, up to 1 point at P = 4.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.search.problem import OrderProblem, slack

INFINITY = float("inf")


class Bound(NamedTuple):
    """cost: the longest span of a rank is at least this, in the costs' unit. reason: which argument says so."""

    cost: float
    reason: str

    def gap(self, cost: float, work: float) -> float:
        """How much higher the bubble of a plan of this cost is than the bound's, as a share (0.005: half a point)."""
        return work / self.cost - work / cost if self.cost and cost else 0.0


def or_fused(problem: OrderProblem) -> OrderProblem:
    """With what a B leaves no larger than what its F left, as on a line of stages, where a search may come to fused
    backwards: a bound of this holds for both. On a V, the problem itself."""
    if problem.placement.num_chunks > 1:
        return problem
    costs = problem.costs
    held = tuple(map(min, costs.held_after_b, costs.activation))
    return dataclasses.replace(problem, costs=dataclasses.replace(costs, held_after_b=held))


def lower_bound(problem: OrderProblem) -> float:
    """A cost that every order within the limits takes at least."""
    return proven(problem).cost


def proven(problem: OrderProblem) -> Bound:
    """The highest of all bounds."""
    costs, latencies = problem.costs, problem.latencies()
    ranks = [_Rank(problem, rank, latencies) for rank in range(problem.placement.num_ranks)]
    found = [
        Bound(problem.work, "work of the busiest rank"),
        Bound(problem.num_microbatches * least_period(problem), "memory in a period"),
        Bound(
            sum(costs.f) + sum(costs.b) + 2 * sum(latencies) + costs.w[0],
            "critical path of a microbatch",
        ),
        *(bound for rank in ranks for bound in rank.bounds()),
    ]
    best = max(found, key=lambda one: one.cost)
    chained = _first_gradient(problem, ranks, latencies, best.cost)
    return Bound(chained, "first gradient through all ranks") if chained > best.cost else best


def least_period(problem: OrderProblem) -> float:
    """What each microbatch takes at least because of memory: what it holds times how long, by the limit."""
    costs, latencies = problem.costs, problem.latencies()
    best = 0.0
    for mine, limit in zip(problem.stages(), problem.limits, strict=True):
        if 0 < limit < INFINITY:
            area = sum(
                costs.activation[stage]
                * (sum(costs.f[stage:]) + sum(costs.b[stage:]) + 2 * sum(latencies[stage:]))
                + costs.held_after_b[stage] * costs.w[stage]
                for stage in mine
            )
            best = max(best, area / (limit + slack(limit)))
    return best


class _Rank:
    """What one rank has to wait for; `first` and `last` are its stages that come first and last in the pipeline."""

    def __init__(self, problem: OrderProblem, rank: int, latencies: Sequence[float]) -> None:
        costs, mine = problem.costs, problem.stages()[rank]
        self.costs, self.mine, self.total = costs, mine, problem.num_microbatches
        self.limit = problem.limits[rank] + slack(problem.limits[rank])
        self.each = sum(costs.f[one] + costs.b[one] + costs.w[one] for one in mine)
        self.own = self.total * self.each
        first, last = mine[0], mine[-1]
        self.down = sum(costs.f[:first]) + sum(latencies[:first])
        # From the last B of the rank to the end of rank 0, which starts `down` before this rank.
        self.up = sum(costs.b[:first]) + sum(latencies[:first]) + costs.w[0] if first else 0.0
        # From the end of a microbatch's last F here to the arrival of its gradient, and to the end of its last B here.
        self.away = sum(costs.f[last + 1 :]) + sum(costs.b[last + 1 :]) + 2 * sum(latencies[last:])
        self.back = self.away + sum(costs.b[first : last + 1]) + sum(latencies[first:last])
        self.tail = max(self.down + self.back + self.up, self.back + costs.w[first])
        self.f_pieces = _pieces((costs.activation[one], costs.f[one]) for one in mine)
        self.w_pieces = _pieces((costs.held_after_b[one], costs.w[one]) for one in mine)
        # What is left of microbatches whose F's are done: B's and W's of the first chunks up to one, and single W's.
        held = itertools.accumulate(costs.activation[one] for one in mine)
        left = itertools.accumulate(costs.b[one] + costs.w[one] for one in mine)
        self.open_pieces = _pieces([*zip(held, left, strict=True), *self.w_pieces])
        trip = sum(costs.f[first : last + 1]) + sum(latencies[first:last]) + self.away
        every = self.total * sum(costs.f[one] for one in mine)
        self.idle_behind = functools.cache(self._least_idle_behind)
        self.idle_first = max(0.0, trip - min(every, self._most(self.f_pieces, self.limit, self.total)))

    def bounds(self) -> tuple[Bound, Bound]:
        own = self.own + self.idle_first
        return (
            Bound(own, "warm-up within memory"),
            Bound(own + self.idle_last(self.idle_first), "warm-up and cool-down within memory"),
        )

    def most_forwards(self, before: int | None = None) -> int:
        """How many F's the rank can run before its first B, or before the first F of one of its later stages."""
        earlier = self.mine if before is None else self.mine[: self.mine.index(before)]
        room = self.limit - (0.0 if before is None else self.costs.activation[before])
        smallest, most = min(self.costs.activation[one] for one in earlier), self.total * len(earlier)
        return min(most, int(room / smallest + slack(1.0))) if smallest and room < INFINITY else most

    def _most(self, pieces: tuple[Piece, ...], room: float, microbatches: int) -> float:
        """The most work of so many microbatches that fits into the room; each has at most a piece a stage."""
        return most_work(pieces, room, microbatches * len(self.mine))

    def idle_last(self, known: float) -> float:
        """Idle time behind the rank's last F, beside `known` idle time in the warm-up where both can be told apart.

        When that F ends, x microbatches have ended theirs within the time that one is away: their gradients are not
        there yet, they hold all they can, and what else is left fits beside them. And `away` before that moment at
        most the x microbatches and a memory full of others were left. Few x leave room for other work but make the
        second figure small, so the least over x of the larger idle time holds always.
        """
        whole = sum(self.costs.activation[one] for one in self.mine)
        most = min(self.total, int(self.limit / whole)) if whole and self.limit < INFINITY else self.total
        # The warm-up's idle time is over by then if some gradient must have come for all to fit.
        beside = 0.0 if self.total * whole > self.limit else known

        def earlier(x: int) -> float:
            left = x * self.each + self._others(x, self.limit)
            if left >= self.own:
                return -INFINITY  # where all may be left, that moment may be before the rank has begun
            return self.tail + self.away - left - (0.0 if (self.total - x) * whole > self.limit else known)

        # With more of them the first figure only grows, as each takes the place of other work, and the second falls.
        cross = bisect.bisect_left(
            range(1, most), True, key=lambda x: earlier(x) <= self.idle_behind(x) - beside
        )
        figures = (max(self.idle_behind(x) - beside, earlier(x)) for x in (cross, cross + 1) if 0 < x <= most)
        return max(0.0, min(figures, default=0.0))

    def _others(self, x: int, room: float) -> float:
        """The most work that is left of all microbatches but x, their F's done, within the room."""
        every = (self.total - x) * sum(self.costs.b[one] + self.costs.w[one] for one in self.mine)
        return min(every, self._most(self.open_pieces, room, self.total - x))

    def _least_idle_behind(self, x: int) -> float:
        """Idle time behind the last F, with x microbatches whose B's are all left: the least over what else is left.

        The last B ends once its gradient is back, and not before all other B's and the W's that are put before it;
        behind it only W's are left, while the ranks above end their B's. So B's fill one wait only; W's both, and as
        whole ones: what is put before the last B leaves a rest of its wait idle, or delays it.
        """
        costs, chunks, first = self.costs, len(self.mine), self.mine[0]
        size, held, b, w = kind = _stage(costs, first)
        room = self.limit - x * sum(costs.activation[one] for one in self.mine)
        if any(_stage(costs, one) != kind for one in self.mine):  # too many ways to choose among them
            return (
                self.tail - x * sum(costs.b[one] + costs.w[one] for one in self.mine) - self._others(x, room)
            )
        least, free = INFINITY, (self.total - x) * chunks
        # B's with their W's are left of so many stages of other microbatches; of the rest as many W's as fit beside.
        fit = min(free, int(room / size + slack(1.0))) if size and room < INFINITY else free
        for count in range(fit, -1, -1):
            rest = max(0.0, room - count * size)
            alone = (
                min(free - count, int(rest / held + slack(1.0))) if held and rest < INFINITY else free - count
            )
            before, behind = (x * chunks + count) * b, (x * chunks + count + alone) * w
            whole_ones = int(max(0.0, self.back - before) / w + slack(1.0)) if w else 0
            for fill in (min(whole_ones * w, behind - w), min((whole_ones + 1) * w, behind - w)):
                end = max(self.back, before + fill)
                to_end = max(behind - fill, self.down + self.up if self.up else 0.0)
                least = min(least, end + to_end - before - behind)
            if least <= 0:
                break
        return least


def _stage(costs: CostModel, stage: int) -> tuple[float, float, float, float]:
    """What F and B leave there, and how long B and W take."""
    return costs.activation[stage], costs.held_after_b[stage], costs.b[stage], costs.w[stage]


Piece = tuple[float, float]  # what it holds, what it has of work


def _pieces(found: Iterable[Piece]) -> tuple[Piece, ...]:
    """Each kind once, the most work by what is held first; only those that have work."""
    return tuple(
        sorted({one for one in found if one[1] > 0}, key=lambda one: one[1] / one[0] if one[0] else INFINITY)[
            ::-1
        ]
    )


@functools.lru_cache(maxsize=4096)
def most_work(pieces: tuple[Piece, ...], room: float, most: int) -> float:
    """The most work of whole pieces that fit into the room, `most` of them in all: an exact knapsack."""
    return _packed(pieces, room, most, 0.0)


def _packed(pieces: tuple[Piece, ...], room: float, most: int, beat: float) -> float:
    """The same, or `beat` where that is more. The rest of a room holds at most as much as the next densest fills it."""
    if not pieces or room < 0:
        return max(beat, 0.0)
    (size, work), rest = pieces[0], pieces[1:]
    if not size or room == INFINITY:
        return max(beat, most * max(one for _, one in pieces))
    for count in range(min(most, int(room / size + slack(1.0))), -1, -1):
        here, left = count * work, max(0.0, room - count * size)
        if (left * rest[0][1] / rest[0][0] if rest else 0.0) <= beat - here:
            break
        beat = max(beat, here + _packed(rest, left, most - count, beat - here))
    return beat


def _first_gradient(
    problem: OrderProblem, ranks: Sequence[_Rank], latencies: Sequence[float], proved: float
) -> float:
    """The least cost with which the first microbatch passes all ranks and none of them idles more than it leaves.

    Until its first B a rank runs F's only, so what it has idled by then is the time less a whole number of F's that
    fit. A cost allows each rank some idle time (its work, and what it idles at its end, taken off): the rank starts
    that B, or the first F of a later chunk, when the input is there or at the next end of an F, whichever the
    allowance permits. If there is no such time on some rank the cost is too low, and so is any lower one: bisection.
    """
    if not all(len({rank.costs.f[one] for one in rank.mine}) == 1 for rank in ranks):
        return proved  # ends of F's of several lengths can be anywhere
    ends = [rank.idle_last(INFINITY) for rank in ranks]
    of_stage = problem.placement.ranks()

    def is_possible(cost: float) -> bool:
        now = 0.0
        codes = [*range(problem.num_stages), *range(2 * problem.num_stages - 1, problem.num_stages - 1, -1)]
        for code in codes:
            is_b, stage = divmod(code, problem.num_stages)
            rank = ranks[of_stage[stage]]
            if stage == rank.mine[-1] if is_b else stage != rank.mine[0]:
                length, passed = rank.costs.f[stage], now - rank.down
                allowed = cost - rank.own - ends[of_stage[stage]] + slack(cost)
                most = rank.most_forwards(None if is_b else stage)
                count = min(most, int(passed / length + slack(1.0))) if length else most
                if passed - count * length > allowed:
                    if count == most:
                        return False
                    now = rank.down + (count + 1) * length
            now += rank.costs.b[stage] if is_b else rank.costs.f[stage]
            now += latencies[stage - 1] if is_b and stage else 0.0 if is_b else latencies[stage]
        return True

    low, high = proved, 2 * proved
    if is_possible(low) or not is_possible(high):
        return proved
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if is_possible(middle) else (middle, high)
    return low
