"""When the operations of an order run, forwards in time or backwards."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core.pipeline_parallel.plan.search.problem import Order, OrderProblem


@dataclass(frozen=True)
class Times:
    """starts, ends: by rank, of each place. cost: the longest span of a rank."""

    starts: list[list[float]]
    ends: list[float]
    cost: float

    @property
    def makespan(self) -> float:
        """The last end."""
        return max(self.ends)


class Clock:
    """The rules of one problem by code, and the walk over an order.

    In reverse, time runs backwards: each W comes before its B, gradients travel from the first stage to the last and
    forwards back, and microbatches count from the last; rows are read from their ends. Memory is the same, since all
    that is taken is given back.
    """

    def __init__(self, problem: OrderProblem, *, reverse: bool = False) -> None:
        costs, num_stages = problem.costs, problem.num_stages
        self.problem, self.reverse = problem, reverse
        self.num_codes = 3 * num_stages
        self.durations = [*costs.f, *costs.b, *costs.w]
        latencies = problem.latencies()
        # By code: what waits for its result (-1: nothing), and how long the result takes to get there.
        self.follower = [-1] * self.num_codes
        self.delay = [0.0] * self.num_codes
        for stage in range(num_stages):
            backward = num_stages + stage
            ends = (
                [(stage + 1, stage), (backward, backward + 1)]
                if stage + 1 < num_stages
                else [(backward, stage)]
            )
            for goal, source in ends:
                if source != stage:
                    goal, source = backward, backward + 1
                one, other = (goal, source) if reverse else (source, goal)
                self.follower[one], self.delay[one] = other, latencies[stage]
        self.waits = [False] * self.num_codes
        for code in self.follower:
            if code >= 0:
                self.waits[code] = True
        ranks = problem.placement.ranks()
        self.rank_of = [ranks[code % num_stages] for code in range(self.num_codes)]
        self.target = [self.rank_of[code] if code >= 0 else -1 for code in self.follower]
        # By code: the code on the same stage that comes first although it sends nothing (-1: none).
        weights = range(2 * num_stages, 3 * num_stages)
        backwards = range(num_stages, 2 * num_stages)
        self.after = [-1] * self.num_codes
        for weight, backward in zip(weights, backwards, strict=True):
            one, other = (weight, backward) if reverse else (backward, weight)
            self.after[other] = one
        sign = -1.0 if reverse else 1.0
        self.change = [sign * one for one in problem.changes()]

    def times(self, order: Order, available: Sequence[float] | None = None) -> Times | None:
        """When everything runs as early as possible; None for an order that stops. available: by rank, from when."""
        durations, follower, delay = self.durations, self.follower, self.delay
        waits, target = self.waits, self.target
        inputs: list[list[float]] = [[] for _ in range(self.num_codes)]
        taken = [0] * self.num_codes
        clock = list(available) if available is not None else [0.0] * len(order)
        starts: list[list[float]] = [[] for _ in order]
        blocked_on = [-1] * len(order)
        ready = list(range(len(order)))[::-1]
        while ready:
            rank = ready.pop()
            row, now, mine = order[rank], clock[rank], starts[rank]
            for code in itertools.islice(row, len(mine), None):
                if waits[code]:
                    arrived = inputs[code]
                    index = taken[code]
                    if index >= len(arrived):
                        blocked_on[rank] = code
                        break
                    taken[code] = index + 1
                    if arrived[index] > now:
                        now = arrived[index]
                mine.append(now)
                now += durations[code]
                goal = follower[code]
                if goal >= 0:
                    inputs[goal].append(now + delay[code])
                    other = target[code]
                    if blocked_on[other] == goal:
                        blocked_on[other] = -1
                        ready.append(other)
            clock[rank] = now
        if any(len(mine) < len(row) for mine, row in zip(starts, order, strict=True)):
            return None
        cost = max(end - mine[0] for end, mine in zip(clock, starts, strict=True))
        return Times(starts, clock, cost)
