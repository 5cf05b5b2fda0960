"""Small changes where an order is critical: what squeezing, which only fills gaps, cannot find.

The longest way through a plan that ends with its longest rank leads over operations that wait for the one before on
their rank. Only there can a change make the plan shorter: the later of two such neighbours is drawn before the earlier,
or before all of its unbroken run, or the earlier behind it.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.pipeline_parallel.plan.search.clock import Clock, Times
from megatron.core.pipeline_parallel.plan.search.problem import Order, OrderProblem, slack

# Steps to orders of the same cost in a row; a plateau may have an exit.
_PLATEAU = 12
# Places that an operation is moved by at most.
_LONGEST_MOVE = 8


class Improver:
    """Improves orders of one problem by single moves."""

    def __init__(self, problem: OrderProblem) -> None:
        self.problem = problem
        self.clock = Clock(problem)
        self.limits = [limit + slack(limit) for limit in problem.limits]
        self.num_stages = problem.num_stages
        ranks = self.clock.rank_of
        # By code: what its input comes from.
        self.source = {goal: code for code, goal in enumerate(self.clock.follower) if goal >= 0}
        assert all(ranks[goal] == self.clock.target[code] for goal, code in self.source.items())

    def improve(self, order: Order, evaluations: int) -> Order:
        """The best order met in so many evaluations of whole orders."""
        times = self.clock.times(order)
        assert times is not None, "an order that stops"
        best, best_cost = order, times.cost
        seen = {_mark(order)}
        level = 0
        while evaluations > 0 and level < _PLATEAU:
            step: tuple[Order, Times] | None = None
            for changed in self._neighbours(order, times):
                if evaluations <= 0:
                    break
                mark = _mark(changed)
                if mark in seen:
                    continue
                seen.add(mark)
                evaluations -= 1
                new = self.clock.times(changed)
                if new is None:
                    continue
                if new.cost < times.cost - slack(times.cost):
                    step = changed, new
                    break
                if step is None and new.cost <= times.cost + slack(times.cost):
                    step = changed, new
            if step is None:
                break
            order, times = step
            level += 1
            if times.cost < best_cost - slack(best_cost):
                best, best_cost, level = order, times.cost, 0
        return best

    def _neighbours(self, order: Order, times: Times) -> Iterator[Order]:
        """Orders that differ in one place of the critical way."""
        for rank, place, run in self._critical(order, times):
            row = order[rank]
            end = self._run_end(times, rank, row, place)
            changes = [[*row[: place - 1], row[place], row[place - 1], *row[place + 1 :]]]
            if run < place - 1:
                changes.append([*row[:run], row[place], *row[run:place], *row[place + 1 :]])
            if end > place:
                changes.append([*row[: place - 1], *row[place : end + 1], row[place - 1], *row[end + 1 :]])
            for changed in changes:
                if changed != row and self._is_right(rank, changed):
                    yield [*order[:rank], changed, *order[rank + 1 :]]

    def _run_end(self, times: Times, rank: int, row: list[int], place: int) -> int:
        """Where the unbroken run ends that this place is in, as far as moves go."""
        starts, durations = times.starts[rank], self.clock.durations
        last = min(len(row), place + _LONGEST_MOVE) - 1
        while place < last and starts[place + 1] <= starts[place] + durations[row[place]] + slack(
            starts[place]
        ):
            place += 1
        return place

    def _critical(self, order: Order, times: Times) -> list[tuple[int, int, int]]:
        """(rank, place, start of its unbroken run) of what waits for the one before it, on the critical way."""
        durations = self.clock.durations
        spans = [end - mine[0] for end, mine in zip(times.ends, times.starts, strict=True)]
        rank = spans.index(max(spans))
        place = len(order[rank]) - 1
        places = self._places(order)
        counts = self._indices(order)
        found = []
        while place > 0:
            start = times.starts[rank][place]
            before = times.starts[rank][place - 1] + durations[order[rank][place - 1]]
            if before >= start - slack(start):
                if order[rank][place] != order[rank][place - 1]:
                    found.append((rank, place, self._run_start(times, rank, order[rank], place)))
                place -= 1
                continue
            code = order[rank][place]
            source = self.source.get(code, -1)
            if source < 0:
                break
            index = counts[rank][place]
            rank = self.clock.rank_of[source]
            place = places[source][index]
        return found

    def _run_start(self, times: Times, rank: int, row: list[int], place: int) -> int:
        """Where it starts."""
        starts, durations = times.starts[rank], self.clock.durations
        low = max(0, place - _LONGEST_MOVE)
        while place > low and starts[place - 1] + durations[row[place - 1]] >= starts[place] - slack(
            starts[place]
        ):
            place -= 1
        return place

    def _places(self, order: Order) -> list[list[int]]:
        """By code: where each of its operations is in its row."""
        places: list[list[int]] = [[] for _ in range(self.clock.num_codes)]
        for row in order:
            for place, code in enumerate(row):
                places[code].append(place)
        return places

    def _indices(self, order: Order) -> list[list[int]]:
        """By rank and place: which of its code's operations it is."""
        done = [0] * self.clock.num_codes
        indices = []
        for row in order:
            mine = []
            for code in row:
                mine.append(done[code])
                done[code] += 1
            indices.append(mine)
        return indices

    def _is_right(self, rank: int, row: list[int]) -> bool:
        """Whether W's stay behind their B's, and memory within the limit."""
        num_stages, change = self.num_stages, self.clock.change
        held, limit = 0.0, self.limits[rank]
        done = [0] * self.clock.num_codes
        for code in row:
            held += change[code]
            if held > limit:
                return False
            done[code] += 1
            if code >= 2 * num_stages and done[code] > done[code - num_stages]:
                return False
        return True


def _mark(order: Order) -> int:
    return hash(tuple(map(tuple, order)))
