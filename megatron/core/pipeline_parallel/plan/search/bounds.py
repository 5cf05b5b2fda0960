"""Proven lower bounds: what no order within the limits can beat, and which argument says so.

All bounds look at one rank. Its span begins with its first F, whose time is known, and what it computes is known, so a
bound is a proof of idle time. Memory is what forces a rank to wait: before the first gradient arrives it can run only
F's that fit, behind its last F only the B's and W's of what fits, behind its last B only W's of what fits. (The trip of
a microbatch that it waits for meanwhile is that of arXiv 2401.10241, section 2; memory is what the paper leaves out.)
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
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
    found = [
        Bound(problem.work, "work of the busiest rank"),
        Bound(problem.num_microbatches * least_period(problem), "memory in a period"),
        Bound(
            sum(costs.f) + sum(costs.b) + 2 * sum(latencies) + costs.w[0],
            "critical path of a microbatch",
        ),
    ]
    for rank in range(problem.placement.num_ranks):
        found += _Rank(problem, rank, latencies).bounds()
    return max(found, key=lambda one: one.cost)


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
        first, last = mine[0], mine[-1]
        self.down = sum(costs.f[:first]) + sum(latencies[:first])
        # From the last B of the rank to the end of rank 0, which starts `down` before this rank.
        self.up = sum(costs.b[:first]) + sum(latencies[:first]) + costs.w[0] if first else 0.0
        # From the end of a microbatch's last F here to the arrival of its gradient, and to the end of its last B here.
        self.away = sum(costs.f[last + 1 :]) + sum(costs.b[last + 1 :]) + 2 * sum(latencies[last:])
        self.back = self.away + sum(costs.b[first : last + 1]) + sum(latencies[first:last])
        trip = sum(costs.f[first : last + 1]) + sum(latencies[first:last]) + self.away
        self.idle_first = max(0.0, trip - self._most(costs.f, costs.activation))

    def bounds(self) -> list[Bound]:
        own = self.total * self.each
        found = [
            Bound(own + self.idle_first, "warm-up within memory"),
            Bound(own + self.idle_first + self._idle_last(), "warm-up and cool-down within memory"),
        ]
        if self.up:
            left = self._most(self.costs.w, self.costs.held_after_b)
            cost = self.down + self.idle_first + own - left + self.up
            found.append(Bound(cost, "weight gradients that memory lets wait"))
        return found

    def _most(self, durations: Sequence[float], sizes: Sequence[float]) -> float:
        """The longest that the rank can run F's alone, or W's alone: of every microbatch, or of what fits."""
        every = self.total * sum(durations[one] for one in self.mine)
        smallest = min(sizes[one] for one in self.mine)
        if not smallest or self.limit == INFINITY:
            return every
        return min(every, int(self.limit / smallest + slack(1.0)) * max(durations[one] for one in self.mine))

    def _idle_last(self) -> float:
        """Idle time behind the rank's last F, beside that of the warm-up where both can be told apart.

        When that F ends, x microbatches have ended theirs within the time that one is away: their gradients are not
        there yet, they hold all they can. What else is left then, B's and W's of others, is what fits beside them. And
        `away` before that moment at most the x microbatches and a memory full of others were left. Few x leave room
        for other work but make the second figure small, so the least over x of the larger idle time holds always.
        """
        whole = sum(self.costs.activation[one] for one in self.mine)
        after_f = sum(self.costs.b[one] + self.costs.w[one] for one in self.mine)
        tail = max(self.down + self.back + self.up, self.back + self.costs.w[self.mine[0]])
        work = _work_per_memory(self.mine, self.costs)
        least = INFINITY
        for x in range(1, self.total + 1):
            if x * whole > self.limit:
                break
            others = (self.total - x) * after_f
            beside, before = others, others
            if work < INFINITY and self.limit < INFINITY:
                beside, before = min(others, work * (self.limit - x * whole)), min(others, work * self.limit)
            # The warm-up's idle time is over by then if some gradient must have come for all to fit.
            idle = tail - x * after_f - beside
            idle -= 0.0 if self.total * whole > self.limit else self.idle_first
            left = x * self.each + before
            # Where all may be left, that moment may be before the rank has begun.
            earlier = tail + self.away - left if left < self.total * self.each else -INFINITY
            earlier -= 0.0 if (self.total - x) * whole > self.limit else self.idle_first
            least = min(least, max(idle, earlier))
            if earlier <= idle:
                break  # with more of them `idle` only grows
        return max(0.0, least) if least < INFINITY else 0.0


def _work_per_memory(mine: Sequence[int], costs: CostModel) -> float:
    """The most work that a microbatch whose F's are done can have left, by what it holds; infinite if it holds none."""
    best = 0.0
    for done in range(len(mine) + 1):  # B's, the last stage's first; of each the W may be open
        open_b, had_b = mine[: len(mine) - done], mine[len(mine) - done :]
        for waits in itertools.product((False, True), repeat=done):
            held = sum(costs.activation[one] for one in open_b)
            work = sum(costs.b[one] + costs.w[one] for one in open_b)
            for stage, open_w in zip(had_b, waits, strict=True):
                held += costs.held_after_b[stage] if open_w else 0.0
                work += costs.w[stage] if open_w else 0.0
            if work > 0:
                best = max(best, work / held if held > 0 else INFINITY)
    return best
