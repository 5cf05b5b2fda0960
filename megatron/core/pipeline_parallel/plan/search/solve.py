"""The search: many starts, each squeezed; the best squeezed more; a long problem through a short one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core.pipeline_parallel.plan.ir import PlanError
from megatron.core.pipeline_parallel.plan.search.bound import lower_bound
from megatron.core.pipeline_parallel.plan.search.candidates import by_blocks, by_rules, known
from megatron.core.pipeline_parallel.plan.search.extend import extend
from megatron.core.pipeline_parallel.plan.search.problem import (
    Order,
    Problem,
    check_limits,
    fits,
    peaks,
    slack,
)
from megatron.core.pipeline_parallel.plan.search.squeeze import Squeezer

# Operations visited by squeezing, per rank. Not time: every rank must come to the same plan.
_VISITS = 7500
_STARTS_SHARE = 0.65
_GIVES = (0.0, 0.5, 0.25)


@dataclass(frozen=True, order=True)
class Found:
    """An order and its merit, the best first: cost, peak, makespan (rounded, so that ties are ties)."""

    cost: float
    peak: float
    makespan: float
    label: str
    order: Order


class Search:
    """Searches one problem within a budget."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.squeezer = Squeezer(problem)
        self.bound = lower_bound(problem)
        self.found: list[Found] = []
        self.seen: set[int] = set()

    def add(self, label: str, order: Order) -> Found | None:
        """Judge an order; None where it stops or is over a limit."""
        times = self.squeezer.forwards.times(order)
        if times is None or not fits(self.problem, order):
            return None
        unit = slack(times.cost)
        merit = [round(one / unit) * unit for one in (times.cost, times.makespan)]
        found = Found(merit[0], max(peaks(self.problem, order)), merit[1], label, order)
        self.found.append(found)
        return found

    @property
    def best(self) -> Found:
        """The best so far."""
        return min(self.found, key=lambda one: (one.cost, one.peak, one.makespan))

    def is_done(self) -> bool:
        """Whether nothing better is possible."""
        return bool(self.found) and self.best.cost <= self.bound + slack(self.bound)

    def squeeze(self, start: Found, rounds: int, give: float) -> Found:
        """An order squeezed; never worse."""
        order, _ = self.squeezer.improve(start.order, rounds, give)
        return self.add(start.label, order) or start

    def run(self, rounds: int) -> None:
        """Squeeze every start once, as far as the rounds go, then the best ones until the rounds are spent."""
        starts = self.starts()
        spent = 0
        squeezed: list[Found] = []
        while spent < max(2, int(rounds * _STARTS_SHARE)) and not self.is_done():
            start = next(starts, None)
            if start is None:
                break
            squeezed.append(self.squeeze(start, 1, 0.0))
            spent += 1
        squeezed.sort(key=lambda one: (one.cost, one.peak, one.makespan))
        for give, start in itertools.product(_GIVES, squeezed[: max(1, (rounds - spent) // 6)]):
            if self.is_done() or spent >= rounds:
                break
            self.squeeze(start, 3, give)
            spent += 3

    def starts(self) -> Iterator[Found]:
        """Distinct orders that fit, of all families in turn."""
        families = [by_blocks(self.problem), known(self.problem), by_rules(self.problem)]
        while families:
            for family in list(families):
                one = next(family, None)
                if one is None:
                    families.remove(family)
                    continue
                mark = hash(tuple(map(tuple, one[1])))
                if mark not in self.seen:
                    self.seen.add(mark)
                    found = self.add(*one)
                    if found is not None:
                        yield found


def solve(name: str, problem: Problem) -> Found:
    """The best order found. Raises PlanError where a limit is lower than any order needs."""
    check_limits(name, problem)
    num_ranks, total = problem.placement.num_ranks, problem.num_microbatches
    short = short_length(problem)
    search = Search(problem.of_length(short))
    rounds = _VISITS * num_ranks // search.problem.num_ops
    search.run(rounds)
    if not search.found:
        raise PlanError(f"{name}: no order found for {num_ranks} ranks and {total} microbatches")
    if short == total:
        return search.best
    whole = Search(problem)
    for label, order in known(problem):
        whole.add(label, order)
    for found in sorted(search.found, key=lambda one: (one.cost, one.peak, one.makespan))[:4]:
        longer = extend(found.order, problem.placement.num_chunks, total - short)
        if longer is not None:
            whole.add(found.label, longer)
    if not whole.found:
        whole.run(4)
    return whole.best


def short_length(problem: Problem) -> int:
    """How many microbatches are solved in place of all: enough for a start, a steady state and an end."""
    per_rank = 4 if problem.placement.num_chunks == 1 else 2
    short = per_rank * problem.placement.num_ranks + 16
    return short if problem.num_microbatches > short + short // 4 else problem.num_microbatches
