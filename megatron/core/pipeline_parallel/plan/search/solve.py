"""The search: many starts, each squeezed; the best squeezed more; a long problem through a short one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core.pipeline_parallel.plan.ir import PlanError
from megatron.core.pipeline_parallel.plan.search.bounds import lower_bound
from megatron.core.pipeline_parallel.plan.search.candidates import Start, by_blocks, by_rules, known
from megatron.core.pipeline_parallel.plan.search.extend import extend
from megatron.core.pipeline_parallel.plan.search.improve import Improver
from megatron.core.pipeline_parallel.plan.search.problem import (
    Order,
    Problem,
    check_limits,
    fits,
    peaks,
    slack,
)
from megatron.core.pipeline_parallel.plan.search.squeeze import Squeezer

# Operations visited by squeezing: at least, and more for each rank. Not time: every rank must come to the same plan.
_VISITS, _VISITS_OF_RANK = 35000, 1800
_STARTS_SHARE = 0.65
_MOST_STARTS = 40
# How much of an operation may stick out of the gap that it fills; what is delayed by it may gain elsewhere.
_GIVES = (0.0, 0.5, 0.25)
_FINALISTS = 6
# Single moves are tried on this many orders, if the budget allows so many evaluations of each.
_MOVED = 6
_LEAST_EVALUATIONS, _MOST_EVALUATIONS = 40, 600
# An evaluation costs about so much less than a round of squeezing.
_EVALUATIONS_OF_ROUND = 8


@dataclass(frozen=True)
class Found:
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

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.squeezer = Squeezer(problem)
        self.bound = lower_bound(problem)
        self.found: list[Found] = []
        self.seen: set[int] = set()

    def add(self, start: Start, order: Order | None) -> Found | None:
        """Judge an order; None where it stops or is over a limit."""
        if order is None or not fits(self.problem, order):
            return None
        times = self.squeezer.forwards.times(order)
        if times is None:
            return None
        unit = slack(times.cost)
        cost, makespan = (round(one / unit) * unit for one in (times.cost, times.makespan))
        found = Found((cost, round(max(peaks(self.problem, order)), 9), makespan), start, order)
        self.found.append(found)
        return found

    @property
    def ranking(self) -> list[Found]:
        """All that was found, the best first; ties in the order in which they were found."""
        return sorted(self.found, key=lambda one: one.merit)

    def is_done(self) -> bool:
        """Whether nothing better is possible."""
        return any(one.cost <= self.bound + slack(self.bound) for one in self.found)

    def squeeze(self, found: Found, rounds: int, give: float) -> Found:
        """An order squeezed; never worse."""
        order, _ = self.squeezer.improve(found.order, rounds, give)
        return self.add(found.start, order) or found

    def run(self, rounds: int) -> None:
        """Squeeze every start once, as far as the rounds go, then the best ones until the rounds are spent."""
        for start in known(self.problem):
            self.add(start, start.make(self.problem))
        if self.is_done():
            return
        most = min(_MOST_STARTS, max(2, int(rounds * _STARTS_SHARE)))
        squeezed: list[Found] = []
        for found in itertools.islice(self.starts(), most):
            squeezed.append(self.squeeze(found, 1, 0.0))
            if self.is_done():
                return
        squeezed.sort(key=lambda one: one.merit)
        left = min(rounds, 2 * _MOST_STARTS) - len(squeezed)
        for one, give in itertools.product(squeezed[: max(1, left // 9)], _GIVES):
            if left <= 0 or self.is_done():
                break
            self.squeeze(one, min(3, left), give)
            left -= 3
        self.move(rounds)

    def move(self, rounds: int) -> None:
        """Try single moves on the best orders, one of each start, for what about half the rounds would cost."""
        evaluations = _EVALUATIONS_OF_ROUND * rounds // 2
        count = min(_MOVED, evaluations // _LEAST_EVALUATIONS)
        improver = Improver(self.problem)
        firsts = {found.start.label: found for found in reversed(self.ranking)}
        for found in sorted(firsts.values(), key=lambda one: one.merit)[:count]:
            if self.is_done():
                return
            order = improver.improve(found.order, min(_MOST_EVALUATIONS, evaluations // count))
            moved = self.add(found.start, order)
            if moved is not None and moved.cost < found.cost:
                self.squeeze(moved, 2, 0.0)

    def starts(self) -> Iterator[Found]:
        """Distinct orders that fit, of all families in turn."""
        blocks, others = by_blocks(self.problem), [known(self.problem), by_rules(self.problem)]
        # On the V, blocks are most often the best.
        families = [*[blocks] * (2 * self.problem.placement.num_chunks - 1), *others]
        while families:
            for family in list(families):
                start = next(family, None)
                if start is None:
                    families.remove(family)
                    continue
                order = start.make(self.problem)
                mark = hash(tuple(map(tuple, order or ())))
                if mark not in self.seen:
                    self.seen.add(mark)
                    found = self.add(start, order)
                    if found is not None:
                        yield found


def solve(name: str, problem: Problem) -> Found:
    """The best order found. Raises PlanError where a limit is lower than any order needs."""
    check_limits(name, problem)
    num_ranks, total = problem.placement.num_ranks, problem.num_microbatches
    short = short_length(problem)
    search = Search(problem.of_length(short))
    visits = _VISITS + _VISITS_OF_RANK * num_ranks
    search.run(visits // search.problem.num_ops)
    if not search.found:
        raise PlanError(f"{name}: no order found for {num_ranks} ranks and {total} microbatches")
    return (
        search.ranking[0] if short == total else _lengthen(search, problem, visits // (2 * problem.num_ops))
    )


def _lengthen(search: Search, problem: Problem, rounds: int) -> Found:
    """The best order of the whole problem, by what was best on the short one."""
    whole = Search(problem)
    more = problem.num_microbatches - search.problem.num_microbatches
    ranking = search.ranking
    work = max(problem.costs.rank_times(problem.placement))
    expected = ranking[0].cost + more * max(work, ranking[0].start.period)
    expected += slack(expected)
    for found in ranking[: _FINALISTS if rounds else _FINALISTS // 2]:
        longer = whole.add(found.start, extend(found.order, problem.placement.num_chunks, more))
        if longer is not None and longer.cost <= expected:
            break
    else:
        _squeeze_long(whole, ranking[0].start, 2 * search.problem.num_microbatches, rounds, expected)
    # One may take less for each further microbatch than what is best for few.
    fitting = {found.start.label for found in search.found}
    for start in known(problem):
        if start.label in fitting and (problem.placement.num_chunks == 1 or not whole.is_done()):
            whole.add(start, start.make(problem))
    # The scheduler comes to the end within any limit that lets one microbatch through.
    for start in by_rules(problem):
        if whole.found:
            break
        whole.add(start, start.make(problem))
    assert whole.found, "no start can be made longer"
    return whole.ranking[0]


def _squeeze_long(whole: Search, start: Start, middle: int, rounds: int, expected: float) -> None:
    """For a start that does not settle within the short problem: squeeze a longer one, and if need be the whole, where
    that many rounds are left."""
    problem = whole.problem
    if 2 * middle <= problem.num_microbatches or not rounds:
        half = Search(problem.of_length(middle))
        found = half.add(start, start.make(half.problem))
        if found is not None:
            found = half.squeeze(found, 1, 0.0)
            more = problem.num_microbatches - middle
            longer = whole.add(start, extend(found.order, problem.placement.num_chunks, more))
            work = max(problem.costs.rank_times(problem.placement))
            reached = found.cost + more * max(work, start.period)
            if longer is not None and longer.cost <= max(expected, reached + slack(reached)):
                return
    made = whole.add(start, start.make(problem))
    if made is not None and rounds:
        whole.squeeze(made, rounds, 0.0)


def short_length(problem: Problem) -> int:
    """How many microbatches are solved in place of all: enough for a start, a steady state and an end."""
    per_rank = 4 if problem.placement.num_chunks == 1 else 2
    short = per_rank * problem.placement.num_ranks + 16
    return short if problem.num_microbatches > short + short // 4 else problem.num_microbatches
