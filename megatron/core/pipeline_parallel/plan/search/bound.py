"""What no order can beat."""

from __future__ import annotations

from megatron.core.pipeline_parallel.plan.search.problem import Problem, slack


def lower_bound(problem: Problem) -> float:
    """A cost that every order within the limits takes at least.

    A rank starts after the first microbatch has come down to it; then, until the first gradient of its last stage, it
    can only run forwards, of which its memory holds so many; after its last B it can only run W's, of which its memory
    holds so many; and after that B the last gradient goes up to the first stage, whose rank ends with a W. And what a
    microbatch holds times how long it holds it, for all of them, is at most the limit times the rank's span.
    """
    costs, total = problem.costs, problem.num_microbatches
    latencies, durations = problem.latencies(), costs.rank_times(problem.placement)
    best = total * least_period(problem)
    for rank, mine in enumerate(problem.stages()):
        first, last = mine[0], mine[-1]
        limit = problem.limits[rank]
        forwards = total * sum(costs.f[stage] for stage in mine)
        weights = total * sum(costs.w[stage] for stage in mine)
        trip = (
            sum(costs.f[first:]) + sum(costs.b[last + 1 :]) + sum(latencies[first:]) + sum(latencies[last:])
        )
        idle = max(0.0, trip - _most(mine, costs.f, costs.activation, limit, forwards))
        own = total * durations[rank]
        best = max(best, own + idle)
        if rank:
            down = sum(costs.f[:first]) + sum(latencies[:first])
            up = sum(costs.b[:first]) + sum(latencies[:first]) + costs.w[0]
            after = _most(mine, costs.w, costs.held_after_b, limit, weights)
            best = max(best, down + up + idle + own - after)
    return best


def least_period(problem: Problem) -> float:
    """What each microbatch takes at least because of memory: what it holds times how long, by the limit."""
    costs, latencies = problem.costs, problem.latencies()
    best = 0.0
    for mine, limit in zip(problem.stages(), problem.limits, strict=True):
        if 0 < limit < float("inf"):
            area = sum(
                costs.activation[stage]
                * (sum(costs.f[stage:]) + sum(costs.b[stage:]) + 2 * sum(latencies[stage:]))
                + costs.held_after_b[stage] * costs.w[stage]
                for stage in mine
            )
            best = max(best, area / (limit + slack(limit)))
    return best


def _most(
    stages: list[int], durations: tuple[float, ...], sizes: tuple[float, ...], limit: float, every: float
) -> float:
    """The longest that a rank can compute what holds memory: all of it, or what the limit lets be held."""
    smallest = min(sizes[stage] for stage in stages)
    if not smallest or limit == float("inf"):
        return every
    count = int(limit / smallest + slack(1.0))
    return min(every, count * max(durations[stage] for stage in stages))
