"""The search: constructed starts, each cooled once, then the best order and a start in turn; a long problem through a
short one."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

from megatron.core.pipeline_parallel.plan.ir import PlanError
from megatron.core.pipeline_parallel.plan.search.bounds import lower_bound
from megatron.core.pipeline_parallel.plan.search.compaction import ROUNDS, Compactor, cooling
from megatron.core.pipeline_parallel.plan.search.improve import wander
from megatron.core.pipeline_parallel.plan.search.initial_orders import Start, starts
from megatron.core.pipeline_parallel.plan.search.problem import (
    Order,
    OrderProblem,
    check_limits,
    fits,
    peaks,
    slack,
)

# Operations that compaction may visit, two to four microseconds each. Not time: every rank must come to the same plan.
# (zbv, P = 16, ten costs of seed 77: worst gaps of 1.10, 0.94, 0.93 points with 300, 600, 1,200 thousand.)
_VISITS = 400_000
# A large problem is cooled so often, with at most so many visits (zbv, P = 64, fourteen costs of the table: worst gaps
# of 4.29 points with 400 thousand, 2.37 with these).
_COOLINGS, _MOST_VISITS = 8, 1_200_000
# Operations of a problem that is solved whole: a cooled order seldom settles, so that a short one is not extended.
_WHOLE = 100_000
# Coolings that gain nothing, in a row, behind which the best order is taken (zbv, P = 8, M = 2P, shares by code, four
# costs of seed 78: gaps of 1.72 points with 24, 1.60 with 200).
_FRUITLESS = 50
# Single moves find what no filled gap does on few operations alone.
_MOST_MOVED_OPS, _TRIES = 600, 4000
# Orders that are tried longer: two and six give the same zbv and v-min at P = 64, M = 512, where each takes 0.35 s.
_FINALISTS = 2
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
        self.visits_a_cooling = 2 * problem.num_ops * ROUNDS
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
        """Make the starts and cool them one by one; then the best order and a start in turn, while visits are left.

        The first start is cooled however long it takes.
        """
        made = []
        for start in starts(self.problem):
            found = self.add(start, start(self.problem))
            if self.is_done():
                return
            if found is not None:
                made.append(found)
        rng, fruitless = random.Random(0), 0
        again = ((None, one) for one in itertools.cycle(made))
        firsts = itertools.chain(made, itertools.chain.from_iterable(again))
        while made and fruitless < _FRUITLESS and not self.is_done():
            best = self.ranking[0]
            one = next(firsts) or best
            visits -= self.visits_a_cooling
            if visits < 0 and len(self.found) > len(made):
                break
            found = self.add(one.start, self.compactor.improve(one.order, cooling(rng)))
            fruitless = 0 if found is not None and found.cost < best.cost else fruitless + 1
        if made and self.problem.num_ops <= _MOST_MOVED_OPS and not self.is_done():
            best = self.ranking[0]
            self.add(best.start, wander(self.problem, best.order, _TRIES, rng))


def solve(name: str, problem: OrderProblem) -> Solution:
    """The best order found. Raises PlanError where a limit is lower than any order needs."""
    check_limits(name, problem)
    total, short = problem.num_microbatches, short_length(problem)
    search = Search(problem.of_length(short))
    search.run(max(_VISITS, min(_MOST_VISITS, _COOLINGS * search.visits_a_cooling)))
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
        whole.add(start, start(problem))
    assert whole.found, "no start can be made longer"
    return whole.ranking[0]


def short_length(problem: OrderProblem) -> int:
    """How many microbatches are solved in place of all: all where that is affordable, else enough for a start, a steady
    state and an end, and up to 8 a rank, in which these can overlap."""
    num_ranks, num_chunks = problem.placement.num_ranks, problem.placement.num_chunks
    if problem.num_ops <= _WHOLE:
        return problem.num_microbatches
    affordable = _WHOLE // (2 * problem.of_length(1).num_ops)
    short = max((4 if num_chunks == 1 else 2) * num_ranks + 16, min(8 * num_ranks, affordable))
    return min(short, problem.num_microbatches)


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
