"""The search: constructed starts, the best of them compacted; a long problem through a short one."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.pipeline_parallel.plan.ir import PlanError
from megatron.core.pipeline_parallel.plan.search.bounds import lower_bound
from megatron.core.pipeline_parallel.plan.search.compaction import COOLING, Compactor
from megatron.core.pipeline_parallel.plan.search.improve import Improver
from megatron.core.pipeline_parallel.plan.search.problem import (
    Order,
    OrderProblem,
    check_limits,
    fits,
    peaks,
    slack,
)
from megatron.core.pipeline_parallel.plan.search.starts import Start, starts

# Operations that compaction may visit, three microseconds each. Not time: every rank must come to the same plan.
_VISITS = 600_000
# Orders that single moves improve (each from a different one), and that are tried longer.
_FINALISTS = 6
# Single moves find what no filled gap does on few operations alone: P = 3, M = 6 and below, by the proved optima.
_MOST_MOVED_OPS = 600
_EVALUATIONS = 400
# A steady state may take this many microbatches to come back to itself.
_LONGEST_CYCLE = 6


@dataclass(frozen=True)
class Solution:
    """An order, its start, and its merit: cost, peak, makespan (rounded, so that ties are ties), least first."""

    merit: tuple[float, float, float]
    start: Start
    order: Order

    @property
    def cost(self) -> float:
        """The longest span of a rank."""
        return self.merit[0]


class Search:
    """Searches one problem within a budget."""

    def __init__(self, problem: OrderProblem) -> None:
        self.problem, self.compactor = problem, Compactor(problem)
        self.bound = lower_bound(problem)
        self.found: list[Solution] = []

    def add(self, start: Start, order: Order | None) -> Solution | None:
        """Judge an order; None where it stops or is over a limit."""
        if order is None or not fits(self.problem, order):
            return None
        times = self.compactor.forwards.times(order)
        if times is None:
            return None
        unit = slack(times.cost)
        cost, makespan = (round(one / unit) * unit for one in (times.cost, times.makespan))
        found = Solution((cost, round(max(peaks(self.problem, order)), 9), makespan), start, order)
        self.found.append(found)
        return found

    @property
    def ranking(self) -> list[Solution]:
        """All that was found, the best first; ties in the order in which they were found."""
        return sorted(self.found, key=lambda one: one.merit)

    def is_done(self) -> bool:
        """Whether nothing better is possible."""
        return any(one.cost <= self.bound + slack(self.bound) for one in self.found)

    def run(self, visits: int) -> None:
        """Make the starts, squeeze them, then cool them one by one for as long as visits are left."""
        each = 2 * self.problem.num_ops
        visits = max(visits, 2 * each)  # the best start is squeezed, however long it takes
        made = []
        for start in starts(self.problem):
            found = self.add(start, start.make(self.problem))
            if self.is_done():
                return
            if found is not None:
                made.append(found)
        for gives, firsts in (((0.0, 0.0), self.ranking), (COOLING, made)):
            for one in firsts:
                visits -= len(gives) * each
                if visits < 0 or self.is_done():
                    return
                self.add(one.start, self.compactor.improve(one.order, gives))
        if self.problem.num_ops <= _MOST_MOVED_OPS:
            self.move()

    def move(self) -> None:
        """Single moves, from the best orders that differ."""
        improver = Improver(self.problem)
        firsts = {str(found.order): found for found in self.ranking}
        for found in list(firsts.values())[:_FINALISTS]:
            if self.is_done():
                return
            moved = self.add(found.start, improver.improve(found.order, _EVALUATIONS))
            if moved is not None and moved.cost < found.cost:
                self.add(found.start, self.compactor.improve(moved.order, (0.0, 0.0)))


def solve(name: str, problem: OrderProblem) -> Solution:
    """The best order found. Raises PlanError where a limit is lower than any order needs."""
    check_limits(name, problem)
    total, short = problem.num_microbatches, short_length(problem)
    search = Search(problem.of_length(short))
    search.run(_VISITS)
    if not search.found:
        raise PlanError(
            f"{name}: no order found for {problem.placement.num_ranks} ranks and {total} microbatches"
        )
    if short == total:
        return search.ranking[0]
    whole = Search(problem)
    expected = search.ranking[0].cost + (total - short) * problem.work / total
    expected += slack(expected)
    for found in search.ranking:
        longer = whole.add(found.start, extend(found.order, problem.placement.num_chunks, total - short))
        if longer is not None and longer.cost <= expected:
            return longer
        if len(whole.found) == _FINALISTS:
            break
    # Memory makes each further microbatch take more than its work, or nothing settles within the short problem.
    for start in list(dict.fromkeys(found.start for found in search.ranking))[:_FINALISTS]:
        whole.add(start, start.make(problem))
    assert whole.found, "no start can be made longer"
    return whole.ranking[0]


def short_length(problem: OrderProblem) -> int:
    """How many microbatches are solved in place of all: enough for a start, a steady state and an end; and 8 a rank, in
    which these can overlap, where several coolings of so many are affordable."""
    num_ranks, num_chunks = problem.placement.num_ranks, problem.placement.num_chunks
    short = (4 if num_chunks == 1 else 2) * num_ranks + 16
    several = 4 * len(COOLING) * problem.of_length(8 * num_ranks).num_ops <= _VISITS
    short = max(short, 8 * num_ranks) if several else short
    return short if problem.num_microbatches > short + short // 4 else problem.num_microbatches


def extend(order: Order, num_chunks: int, more: int) -> Order | None:
    """The order for `more` microbatches more; None where some rank never settles.

    In the middle of a good order each rank repeats one sequence that has every operation of its stages once (or a few
    times). Rows with the same cycle, extended alike, stay consistent.
    """
    for length in range(1, _LONGEST_CYCLE + 1):
        if more % length == 0:
            rows = [_longer(row, 3 * num_chunks * length, length, more // length) for row in order]
            if None not in rows:
                return [row for row in rows if row is not None]
    return None


def _longer(row: list[int], cycle: int, each: int, copies: int) -> list[int] | None:
    """The row with its steady state repeated `copies` times more."""
    best, best_start, run = 0, 0, 0
    for place in range(len(row) - cycle):
        run = run + 1 if row[place] == row[place + cycle] else 0
        if run > best:
            best, best_start = run, place + 1 - run
    unit = row[best_start : best_start + cycle]
    if best < cycle or any(unit.count(code) != each for code in set(row)):
        return None
    return row[:best_start] + unit * copies + row[best_start:]
