"""A greedy in forty lines, which searched schedules may never be worse than.

Of all ranks the one that can start first does: B if it can start within k F, else F within the limit, else W.
"""

import heapq

from megatron.core.pipeline_parallel.plan.search.clock import Clock

PATIENCES = (0, 0.15, 0.3, 0.6, 1)
NEVER = float("inf")


def rival_cost(problem):
    """The least over k of the longest span of a rank; infinite where memory stops every one."""
    clock = Clock(problem)
    orders = [rival(problem, k) for k in PATIENCES]
    return min((clock.times(one).cost for one in orders if one is not None), default=NEVER)


def rival(problem, k):
    """The order, None if it stops."""
    costs, num_stages, total = problem.costs, problem.num_stages, problem.num_microbatches
    stages, ranks, latencies = problem.stages(), problem.placement.ranks(), problem.latencies()
    durations = [*costs.f, *costs.b, *costs.w]
    change = [*costs.activation, *(h - a for a, h in zip(costs.activation, costs.held_after_b, strict=True))]
    change += [-h for h in costs.held_after_b]
    arrivals = [[0.0] * total, *([] for _ in range(2 * num_stages - 1))]
    done, held, now = [0] * (3 * num_stages), [0.0] * len(stages), [0.0] * len(stages)
    rows, choices, events = [[] for _ in stages], [0] * len(stages), []

    def first(rank, codes):
        ready = [(arrivals[one][done[one]], one) for one in codes if done[one] < len(arrivals[one])]
        return max(now[rank], min(ready)[0]) if ready else NEVER, min(ready)[1] if ready else -1

    def choose(rank):
        mine = stages[rank][::-1]
        at_b, b = first(rank, [num_stages + one for one in mine])
        at_f, f = first(
            rank, [s for s in mine if held[rank] + change[s] <= problem.limits[rank] * (1 + 1e-9)]
        )
        weights = [
            2 * num_stages + one for one in mine if done[2 * num_stages + one] < done[num_stages + one]
        ]
        if b >= 0 and at_b <= now[rank] + k * durations[b - num_stages]:
            found = at_b, b
        elif f >= 0 and at_f <= now[rank]:
            found = at_f, f
        else:
            found = (now[rank], weights[0]) if weights else min((at_b, b), (at_f, f))
        choices[rank] += 1
        if found[1] >= 0:
            heapq.heappush(events, (found[0], rank, choices[rank], found[1]))

    for rank in range(len(stages)):
        choose(rank)
    while events:
        start, rank, choice, code = heapq.heappop(events)
        if choice != choices[rank]:
            continue
        kind, stage = divmod(code, num_stages)
        now[rank] = end = start + durations[code]
        rows[rank].append(code)
        done[code] += 1
        held[rank] += change[code]
        goal = -1
        if kind == 0:
            goal = stage + 1 if stage + 1 < num_stages else num_stages + stage
            arrivals[goal].append(end + latencies[stage])
        elif kind == 1 and stage:
            goal = code - 1
            arrivals[goal].append(end + latencies[stage - 1])
        for one in {rank, ranks[goal % num_stages]} if goal >= 0 else {rank}:
            choose(one)
    return rows if sum(map(len, rows)) == problem.num_ops else None
