"""List scheduling: every rank, whenever it is free, takes the most urgent of the operations that can run.

What is urgent is said by a table, so one scheduler serves hand-made rules, repeating blocks and improvement.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import B, F
from megatron.core.pipeline_parallel.plan.search.problem import Order, Problem, slack

INFINITY = float("inf")


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


@dataclass(frozen=True)
class Urgency:
    """urgency: by code (kind * num_stages + stage), then by microbatch; the least goes first.

    patience: how long a rank waits for something more urgent that is on its way, as a share of what it could run
    instead. patience_w: the same where what it could run is a W.
    caps: by stage, how many microbatches may be between their F and their B, beside the limit; None: any number.
    release: by microbatch, before when the first stage may not start its F; None: at once.
    """

    urgency: Sequence[Sequence[float]]
    patience: float = 0.0
    patience_w: float = 0.0
    caps: Sequence[int] | None = None
    release: Sequence[float] | None = None


class ListScheduler:
    """Makes orders of one problem."""

    def __init__(self, problem: Problem) -> None:
        num_stages, costs = problem.num_stages, problem.costs
        self.problem, self.num_stages, self.total = problem, num_stages, problem.num_microbatches
        self.stages = problem.stages()
        self.ranks = problem.placement.ranks()
        self.latencies = problem.latencies()
        self.durations = [*costs.f, *costs.b, *costs.w]
        self.limits = [limit + slack(limit) for limit in problem.limits]
        # For F of a stage: what the rank's later stages take of one microbatch, kept free for the oldest one that has
        # not come there yet. Without it early forwards could take all memory and nothing could go on.
        self.later = [0.0] * num_stages
        self.change = [
            *costs.activation,
            *(h - a for a, h in zip(costs.activation, costs.held_after_b, strict=True)),
        ]
        # By rank: where a B leaves more than its F did, what an F has to keep free.
        self.growth = [
            Growth.of(mine, costs) if any(self.change[num_stages + stage] > 0 for stage in mine) else None
            for mine in self.stages
        ]
        self.next_stage = [-1] * num_stages
        for mine in self.stages:
            for chunk, stage in enumerate(mine):
                self.later[stage] = sum(costs.activation[other] for other in mine[chunk + 1 :])
                if chunk + 1 < len(mine):
                    self.next_stage[stage] = mine[chunk + 1]

    def order(self, how: Urgency) -> Order | None:
        """The order that comes out; None if the caps let nothing go on."""
        return _Run(self, how).order()


class _Run:
    """State: how many of each code are done, when inputs arrive, what ranks hold."""

    def __init__(self, scheduler: ListScheduler, how: Urgency) -> None:
        num_ranks, num_stages, total = len(scheduler.stages), scheduler.num_stages, scheduler.total
        self.scheduler, self.how = scheduler, how
        self.done = [0] * (3 * num_stages)
        # By code of F or B: when each input arrives, as far as known.
        self.arrivals: list[list[float]] = [[] for _ in range(2 * num_stages)]
        self.arrivals[0] = list(how.release) if how.release is not None else [0.0] * total
        self.held = [0.0] * num_ranks
        self.busy_until = [0.0] * num_ranks
        self.rows: Order = [[] for _ in range(num_ranks)]
        self.events = [(0.0, rank) for rank in range(num_ranks)]

    def order(self) -> Order | None:
        events, busy_until = self.events, self.busy_until
        left = self.scheduler.problem.num_ops
        while events:
            now, rank = heapq.heappop(events)
            if now < busy_until[rank]:
                continue
            code = self._choose(rank, now)
            if code >= 0:
                self._start(rank, code, now)
                left -= 1
        return None if left else self.rows

    def _choose(self, rank: int, now: float) -> int:
        """The code to start now, or -1; then an event stands where that may change."""
        scheduler, done, arrivals = self.scheduler, self.done, self.arrivals
        num_stages, total, durations = scheduler.num_stages, scheduler.total, scheduler.durations
        urgency, caps = self.how.urgency, self.how.caps
        room = scheduler.limits[rank] - self.held[rank]
        activation, change = scheduler.problem.costs.activation, scheduler.change
        growth = scheduler.growth[rank]
        first = INFINITY  # the earliest start, and what starts there
        first_code = -1
        candidates = []
        for stage in scheduler.stages[rank]:
            code = num_stages + stage
            forwards, backwards, weights = done[stage], done[code], done[code + num_stages]
            if backwards < len(arrivals[code]) and (growth is None or room >= change[code]):
                start = arrivals[code][backwards]
                if start < now:
                    start = now
                candidates.append((urgency[code][backwards], start, code))
                if start < first:
                    first, first_code = start, code
            if (
                forwards < total
                and forwards < len(arrivals[stage])
                and room >= activation[stage]
                and (caps is None or forwards - backwards < caps[stage])
            ):
                following = scheduler.next_stage[stage]
                if (
                    following < 0
                    or (forwards + 1 - done[following]) * activation[stage] + scheduler.later[stage]
                    <= scheduler.limits[rank]
                ) and (growth is None or growth.allows(done, stage, scheduler.limits[rank])):
                    start = arrivals[stage][forwards]
                    if start < now:
                        start = now
                    candidates.append((urgency[stage][forwards], start, stage))
                    if start < first:
                        first, first_code = start, stage
            if weights < backwards:
                code += num_stages
                candidates.append((urgency[code][weights], now, code))
                if now < first:
                    first, first_code = now, code
        if not candidates:
            return -1
        if len(candidates) > 1:
            patience = self.how.patience_w if first_code >= 2 * num_stages else self.how.patience
            latest = first + patience * durations[first_code]
            _, first, first_code = min(one for one in candidates if one[1] <= latest)
        if first > now:
            heapq.heappush(self.events, (first, rank))
            return -1
        return first_code

    def _start(self, rank: int, code: int, now: float) -> None:
        """Run an operation, and tell the rank that waits for it."""
        scheduler = self.scheduler
        num_stages, costs = scheduler.num_stages, scheduler.problem.costs
        end = now + scheduler.durations[code]
        self.rows[rank].append(code)
        self.done[code] += 1
        self.busy_until[rank] = end
        heapq.heappush(self.events, (end, rank))
        kind, stage = divmod(code, num_stages)
        if kind == F:
            self.held[rank] += scheduler.change[code]
            if stage + 1 < num_stages:
                goal, arrival = stage + 1, end + scheduler.latencies[stage]
            else:
                goal, arrival = num_stages + stage, end
        elif kind == B:
            self.held[rank] += scheduler.change[code]
            if not stage:
                return
            goal, arrival = code - 1, end + scheduler.latencies[stage - 1]
        else:
            self.held[rank] -= costs.held_after_b[stage]
            return
        self.arrivals[goal].append(arrival)
        waiting = scheduler.ranks[goal % num_stages]
        if waiting != rank:
            # Now, not at its arrival: it may be worth waiting for.
            heapq.heappush(self.events, (max(now, self.busy_until[waiting]), waiting))
