"""Single moves where an order gets no longer: what coolings, which only fill gaps, cannot find in small problems.

An order may have to wait where something could run. (Experiment: seed 13 of the random problems that tests hold against
proved optima has 28.81 by coolings, however many, and 28.40 within 400 to 2,200 moves of up to 8 places, 3 seeds of 3.)
"""

from __future__ import annotations

import random

from megatron.core.pipeline_parallel.plan.search.clock import Clock
from megatron.core.pipeline_parallel.plan.search.problem import Order, OrderProblem, fits, slack

LONGEST_MOVE = 8


def wander(problem: OrderProblem, order: Order, tries: int, rng: random.Random) -> Order:
    """An order that takes no longer: so many times one operation is moved by some places within its rank."""
    clock = Clock(problem)
    times = clock.times(order)
    assert times is not None, "an order that stops"
    cost = times.cost
    for _ in range(tries):
        rank = rng.randrange(len(order))
        row = list(order[rank])
        place = rng.randrange(len(row))
        goal = place + rng.randint(-LONGEST_MOVE, LONGEST_MOVE)
        row.insert(min(max(goal, 0), len(row) - 1), row.pop(place))
        if row == order[rank] or not _weights_follow(clock, row):
            continue
        moved = [*order[:rank], row, *order[rank + 1 :]]
        if fits(problem, moved) and (found := clock.times(moved)) and found.cost <= cost + slack(cost):
            order, cost = moved, min(cost, found.cost)
    return order


def _weights_follow(clock: Clock, row: list[int]) -> bool:
    """Whether each W of the row comes behind its B."""
    done = [0] * clock.num_codes
    for code in row:
        done[code] += 1
        first = clock.after[code]
        if first >= 0 and done[code] > done[first]:
            return False
    return True
