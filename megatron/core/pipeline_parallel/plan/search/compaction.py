"""Fill the gaps of an order with operations that come later in it, without delaying anything.

What is moved ends before the gap does, so every operation starts as early as before or earlier, and no order gets
worse. Forwards and backwards in turn, this is the justification of project scheduling: backwards it draws work to
the end of the step, which makes room at the start.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterable

from megatron.core.pipeline_parallel.plan.search.clock import Clock, Times
from megatron.core.pipeline_parallel.plan.search.problem import Order, OrderProblem, slack

INFINITY = float("inf")
Starts = list[list[float]]  # by rank, of each place


# [Experiment: coolings] Gaps of zbv to the bound, P = 8, by other seeds than the table's. Seed 79, M = 2P and 4P: 6 and
# 11 rounds, alike (0.46 points on average). Again and again from the best order, seed 78: 25 times 11 rounds, tops of
# 0.8, 1.2, 1.8: 0.91, 0.90, 0.93; 50 times 6 rounds: 0.92, 0.86, 0.90; never again: 1.10. Shares drawn once a round, or
# by rank, by kind, by code, seed 78, M = 2P, the four costs with a gap: 1.46, 1.63, 1.64, 1.60.
ROUNDS, _TOP = 6, 1.2


def cooling(rng: random.Random) -> list[float]:
    """By round: the share of an operation that may stick out of the gap that it fills, falling to none.

    What that delays may gain elsewhere: large shares shake an order up, small ones settle it, as temperatures do in
    annealing. They are drawn, so that every cooling finds other orders.
    """
    return [_TOP * (1 - step / (ROUNDS - 1)) * rng.random() for step in range(ROUNDS)]


class Compactor:
    """Improves orders of one problem."""

    def __init__(self, problem: OrderProblem) -> None:
        self.problem = problem
        self.forwards, self.backwards = Clock(problem), Clock(problem, reverse=True)
        self.limits = [limit + slack(limit) for limit in problem.limits]

    def improve(self, order: Order, gives: Iterable[float]) -> Order:
        """The best order met. gives: by round of both directions. With a give of 0 no round is worse."""
        found = self.forwards.times(order)
        assert found is not None, "an order that stops"
        best, best_cost, times = order, found.cost, found
        for give in gives:
            dues = [mine[0] + times.cost for mine in times.starts]
            last = max(dues)
            rows, begins = self._mirrored(order, times.starts, last)
            available = [last - due for due in dues]
            rows, back = fill(self.backwards, self.limits, rows, begins, available, give)
            rows, begins = self._mirrored(rows, back.starts, back.makespan)
            order, times = fill(self.forwards, self.limits, rows, begins, [0.0] * len(order), give)
            if times.cost < best_cost - slack(best_cost):
                best, best_cost = order, times.cost
        return best

    def _mirrored(self, order: Order, starts: Starts, last: float) -> tuple[Order, Starts]:
        """The order from its end, and when its operations start if time runs backwards from `last`."""
        durations = self.forwards.durations
        begins = [
            [last - start - durations[code] for code, start in zip(row, mine, strict=True)][::-1]
            for row, mine in zip(order, starts, strict=True)
        ]
        return [row[::-1] for row in order], begins


def fill(
    clock: Clock,
    limits: list[float],
    order: Order,
    starts: Starts,
    available: list[float],
    give: float = 0.0,
) -> tuple[Order, Times]:
    """One walk over the order by time, moving operations into the gaps before it. starts: of the order's operations, in
    a schedule that is possible; nothing comes later than there but what a give delays."""
    walk = _Compaction(clock, limits, order, starts, available, give)
    return walk.order(), walk.times()


class _Compaction:
    """One walk over an order; ranks run on by themselves and meet in a queue of events only where they stall."""

    def __init__(
        self,
        clock: Clock,
        limits: list[float],
        order: Order,
        starts: Starts,
        available: list[float],
        give: float,
    ) -> None:
        self.clock, self.limits, self.old, self.starts = clock, limits, order, starts
        self.rows: Order = [[] for _ in order]
        self.new: Starts = [[] for _ in order]
        self.place = [0] * len(order)
        self.moved = [bytearray(len(row)) for row in order]
        self.held = [0.0] * len(order)
        self.now = list(available)
        self.stalled = [False] * len(order)
        self.done = [0] * clock.num_codes
        self.arrivals: list[list[float]] = [[] for _ in range(clock.num_codes)]
        # By code: where its operations are in the old row.
        self.places: list[list[int]] = [[] for _ in range(clock.num_codes)]
        for row in order:
            for place, code in enumerate(row):
                self.places[code].append(place)
        self.codes = [sorted(set(row)) for row in order]
        # By code: how long a gap must be for the operation; and the shortest of each rank.
        self.needed = [duration * (1.0 - give) for duration in clock.durations]
        self.shortest = [min(self.needed[code] for code in codes) for codes in self.codes]
        self.events: list[tuple[float, int]] = []

    def order(self) -> Order:
        """The order that comes out."""
        events, now, stalled = self.events, self.now, self.stalled
        for rank in range(len(self.old)):
            self._run_on(rank)
        while events:
            time, rank = heapq.heappop(events)
            if time < now[rank] or not stalled[rank]:
                continue
            now[rank] = time
            self._unstall(rank, time)
        assert all(len(new) == len(old) for new, old in zip(self.rows, self.old, strict=True)), (
            "filling stopped"
        )
        return self.rows

    def times(self) -> Times:
        """Of that order."""
        cost = max(end - mine[0] for end, mine in zip(self.now, self.new, strict=True))
        return Times(self.new, self.now, cost)

    def _run_on(self, rank: int) -> None:
        """Run what comes next in the row for as long as it is ready, then stall."""
        clock, done, arrivals, stalled = self.clock, self.done, self.arrivals, self.stalled
        durations, waits, change, follower = clock.durations, clock.waits, clock.change, clock.follower
        row, moved, place, mine = self.old[rank], self.moved[rank], self.place[rank], self.rows[rank]
        new = self.new[rank]
        now, held, length = self.now[rank], self.held[rank], len(row)
        while place < length:
            if moved[place]:
                place += 1
                continue
            code = row[place]
            index = done[code]
            if waits[code]:
                arrived = arrivals[code]
                if index >= len(arrived) or arrived[index] > now:
                    break
            done[code] = index + 1
            mine.append(code)
            new.append(now)
            held += change[code]
            now += durations[code]
            place += 1
            goal = follower[code]
            if goal >= 0:
                arrival = now + clock.delay[code]
                arrivals[goal].append(arrival)
                other = clock.target[code]
                if stalled[other]:
                    heapq.heappush(
                        self.events, (arrival if arrival > self.now[other] else self.now[other], other)
                    )
        self.place[rank], self.now[rank], self.held[rank] = place, now, held
        stalled[rank] = True
        if place < length:
            heapq.heappush(self.events, (now, rank))

    def _ready(self, code: int) -> float:
        """When the next operation of a code can start; infinity where that is not known yet."""
        clock, index = self.clock, self.done[code]
        first = clock.after[code]
        if first >= 0 and self.done[first] <= index:
            return INFINITY
        if not clock.waits[code]:
            return 0.0
        arrived = self.arrivals[code]
        return arrived[index] if index < len(arrived) else INFINITY

    def _unstall(self, rank: int, now: float) -> None:
        """Go on if what comes next is ready; else run what fits before it; else wait."""
        place = self.place[rank]
        if place == len(self.old[rank]):
            return
        following = self.old[rank][place]
        ready = self._ready(following)
        if ready > now:
            gap_end = ready if ready < INFINITY else self.starts[rank][place]
            chosen, wake = -1, INFINITY
            if gap_end - now >= self.shortest[rank]:
                chosen, wake = self._filler(rank, following, now, gap_end)
            if chosen < 0:
                wake = min(wake, ready)
                if wake < INFINITY:
                    heapq.heappush(self.events, (wake, rank))
                return
            self.moved[rank][self.places[chosen][self.done[chosen]]] = 1
            self._run_early(rank, chosen, now)
        self.stalled[rank] = False
        self._run_on(rank)

    def _filler(self, rank: int, following: int, now: float, gap_end: float) -> tuple[int, float]:
        """The first operation of the row that fits into the gap, or -1; and when there might be one."""
        best, best_place, wake = -1, len(self.old[rank]), INFINITY
        needed = self.needed
        for code in self.codes[rank]:
            index, places = self.done[code], self.places[code]
            if code == following or index == len(places) or places[index] >= best_place:
                continue
            if now + needed[code] > gap_end:
                continue
            start = self._ready(code)
            if start > now:
                wake = min(wake, start)
            elif self._fits(rank, code, places[index]):
                best, best_place = code, places[index]
        return best, wake

    def _fits(self, rank: int, code: int, until: int) -> bool:
        """Whether the operation can come now, and all that stood before it still keep to the limit."""
        change = self.clock.change
        extra = change[code]
        if extra <= 0:
            return True
        held, limit = self.held[rank] + extra, self.limits[rank]
        if held > limit:
            return False
        row, moved = self.old[rank], self.moved[rank]
        for place in range(self.place[rank], until):
            if not moved[place]:
                held += change[row[place]]
                if held > limit:
                    return False
        return True

    def _run_early(self, rank: int, code: int, now: float) -> None:
        clock = self.clock
        end = now + clock.durations[code]
        self.rows[rank].append(code)
        self.new[rank].append(now)
        self.done[code] += 1
        self.held[rank] += clock.change[code]
        self.now[rank] = end
        goal = clock.follower[code]
        if goal >= 0:
            arrival = end + clock.delay[code]
            self.arrivals[goal].append(arrival)
            other = clock.target[code]
            if self.stalled[other] and other != rank:
                heapq.heappush(self.events, (max(arrival, self.now[other]), other))
