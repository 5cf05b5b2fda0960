"""List scheduling: of all ranks the one that can start first does, with a B if one is near, else an F, else a W.

What tells good orders apart is how long a rank waits for a B that is on its way. A gradient that comes while an F or a
W runs is late on every rank behind this one; but time waited is lost. No wait is right for all: with F, B, W, transfer
= 18.5, 18.1, 9.3, 0.6 and 2p activations waits of 0, 0.15, 0.3, 0.6, 1 F leave bubbles of 7.7, 2.1, 1.5, 10.5, 28.8 %
at P = 32, M = 128, and a wait of 1 F before an F, half a W before a W, 1.0 %.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.search.clock import Clock
from megatron.core.pipeline_parallel.plan.search.problem import Order, OrderProblem, slack

INFINITY = float("inf")


class Patience(NamedTuple):
    """How long a rank waits for a B rather than run an F, or a W, that it could start; in F's of the B's stage."""

    before_f: float
    before_w: float


@dataclass(frozen=True)
class Growth:
    """What a rank keeps free for B's that leave more than their F did.

    stages: of the rank, by chunk. num_stages: global ones. kept: by chunk, what a microbatch holds whose F's up to that
    chunk are done and no later one's, or whose B's down to the next chunk and their W's are done. for_b: by chunk, what
    it needs on top of that for the rest of its B's, W's right behind them. for_f: the same for its F's and all B's.
    """

    stages: Sequence[int]
    num_stages: int
    kept: Sequence[float]
    for_b: Sequence[float]
    for_f: Sequence[float]

    @classmethod
    def of(cls, stages: Sequence[int], costs: CostModel) -> Growth:
        """For the stages of one rank."""
        kept, for_b, total, needed = [], [], 0.0, 0.0
        for stage in stages:
            size = costs.activation[stage]
            # This B grows on top of what is there; those that follow begin from what this one and its W have freed.
            needed = max(costs.held_after_b[stage] - size, needed - size, 0.0)
            total += size
            kept.append(total)
            for_b.append(needed)
        return cls(stages, len(costs.f), kept, for_b, [total - one + needed for one in kept])

    def allows(self, done: Sequence[int], stage: int, limit: float) -> bool:
        """Whether the rank can still come to the end once it has done one more F of this stage.

        That is: with all W's done whose B's are, one microbatch after the other, the oldest first, goes through all
        that it still needs. All ranks keep room for the oldest microbatch first, so together they always go on.
        done: by code. Of microbatches that are equally far the oldest needs as much as the others and finds least room.
        """
        num_stages, kept = self.num_stages, self.kept
        forwards = [done[one] + (one == stage) for one in self.stages]
        backwards = [done[num_stages + one] for one in self.stages]
        last = len(forwards) - 1
        ahead_b, ahead_f = [*backwards[1:], forwards[last]], forwards[1:]
        groups = [(ahead_b[c] - backwards[c], kept[c], self.for_b[c]) for c in range(last + 1)]
        groups += [(forwards[c] - ahead_f[c], kept[c], self.for_f[c]) for c in range(last - 1, -1, -1)]
        held = sum(count * size for count, size, _ in groups)
        for count, size, needed in groups:
            if count:
                if held + needed > limit:
                    return False
                held -= count * size
        return True


def list_schedule(problem: OrderProblem, patience: Patience) -> Order:
    """The order that comes out. Never stuck: every rank keeps room for its oldest microbatch."""
    return _ListRun(problem, patience).order()


class _ListRun:
    """State: how many of each code are done, when inputs arrive, what ranks hold, when they are free."""

    def __init__(self, problem: OrderProblem, patience: Patience) -> None:
        costs, num_stages, total = problem.costs, problem.num_stages, problem.num_microbatches
        self.patience, self.num_stages, self.total, self.left = patience, num_stages, total, problem.num_ops
        self.stages, self.clock = problem.stages(), Clock(problem)
        self.limits = [limit + slack(limit) for limit in problem.limits]
        # For F of a stage: what the rank's later stages take of one microbatch, kept free for the oldest one that has
        # not come there yet. Without it early forwards could take all memory and nothing could go on.
        self.later, self.next_stage = [0.0] * num_stages, [-1] * num_stages
        for mine in self.stages:
            for chunk, stage in enumerate(mine):
                self.later[stage] = sum(costs.activation[other] for other in mine[chunk + 1 :])
                self.next_stage[stage] = mine[chunk + 1] if chunk + 1 < len(mine) else -1
        # By rank: where a B leaves more than its F did, what an F has to keep free.
        self.growth = [
            Growth.of(mine, costs) if any(self.clock.change[num_stages + one] > 0 for one in mine) else None
            for mine in self.stages
        ]
        self.done = [0] * (3 * num_stages)
        # By code of F or B: when each input arrives, as far as known.
        self.arrivals: list[list[float]] = [[0.0] * total, *([] for _ in range(2 * num_stages - 1))]
        self.held, self.free = [0.0] * len(self.stages), [0.0] * len(self.stages)
        self.rows: Order = [[] for _ in self.stages]
        # (start, rank, code, how many choices the rank had made); of a rank the last choice counts.
        self.events: list[tuple[float, int, int, int]] = []
        self.choices = [0] * len(self.stages)

    def order(self) -> Order:
        """All rows."""
        for rank in range(len(self.stages)):
            self._choose_and_note(rank)
        while self.events:
            start, rank, code, choice = heapq.heappop(self.events)
            if choice == self.choices[rank]:
                waiting = self._run(rank, code, start)
                self._choose_and_note(rank)
                if waiting not in (-1, rank):
                    self._choose_and_note(waiting)
        assert not self.left, "list scheduling stopped"
        return self.rows

    def _choose_and_note(self, rank: int) -> None:
        start, code = self._choose(rank)
        self.choices[rank] += 1
        if code >= 0:
            heapq.heappush(self.events, (start, rank, code, self.choices[rank]))

    def _choose(self, rank: int) -> tuple[float, int]:
        """What the rank does next by what is known now, and when; code -1: nothing is known."""
        done, arrivals, num_stages, now = self.done, self.arrivals, self.num_stages, self.free[rank]
        room, growth = self.limits[rank] - self.held[rank], self.growth[rank]
        at_b, b, at_f, f, w = INFINITY, -1, INFINITY, -1, -1
        for stage in reversed(self.stages[rank]):
            code, count = num_stages + stage, done[num_stages + stage]
            if count < len(arrivals[code]) and (growth is None or room >= self.clock.change[code]):
                start = max(arrivals[code][count], now)
                if start < at_b:
                    at_b, b = start, code
            if w < 0 and done[code + num_stages] < count:
                w = code + num_stages
            count = done[stage]
            if count < self.total and count < len(arrivals[stage]) and room >= self.clock.change[stage]:
                start = max(arrivals[stage][count], now)
                if start < at_f and self._may_start(rank, stage):
                    at_f, f = start, stage
        if b >= 0:
            unit = self.clock.durations[b - num_stages]
            run_f = f >= 0 and at_f <= now
            wait = self.patience.before_f if run_f else self.patience.before_w
            if at_b <= now + wait * unit:
                return at_b, b
        if f >= 0 and at_f <= now:
            return at_f, f
        if w >= 0:
            return now, w
        return (at_b, b) if at_b <= at_f else (at_f, f)

    def _may_start(self, rank: int, stage: int) -> bool:
        """Whether all else can still come to the end with one more F of this stage."""
        following, done = self.next_stage[stage], self.done
        if following >= 0:
            needed = (done[stage] + 1 - done[following]) * self.clock.change[stage] + self.later[stage]
            if needed > self.limits[rank]:
                return False
        growth = self.growth[rank]
        return growth is None or growth.allows(done, stage, self.limits[rank])

    def _run(self, rank: int, code: int, start: float) -> int:
        """Run an operation; the rank that waits for its result, -1: none."""
        clock, end = self.clock, start + self.clock.durations[code]
        self.rows[rank].append(code)
        self.done[code] += 1
        self.left -= 1
        self.free[rank] = end
        self.held[rank] += clock.change[code]
        if clock.follower[code] >= 0:
            self.arrivals[clock.follower[code]].append(end + clock.delay[code])
        return clock.target[code]
