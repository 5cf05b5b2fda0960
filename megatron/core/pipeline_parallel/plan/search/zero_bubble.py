"""The searched schedules by name: zb-1p, zb-2p on the linear placement; zbv, v-half, v-min on the V."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping

from megatron.core.pipeline_parallel.plan.costs import peak_activation
from megatron.core.pipeline_parallel.plan.generators.linear import one_f_one_b
from megatron.core.pipeline_parallel.plan.ir import Plan
from megatron.core.pipeline_parallel.plan.placement import LINEAR, Placement
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.plan.search.bounds import Bound, or_fused, proven
from megatron.core.pipeline_parallel.plan.search.initial_orders import v_block_peak
from megatron.core.pipeline_parallel.plan.search.problem import OrderProblem, limits_of, plan_of, slack
from megatron.core.pipeline_parallel.plan.search.solve import solve
from megatron.core.pipeline_parallel.plan.simulate import simulate

# By schedule: by number of ranks, the whole-stage activations that a rank may hold where the request has no limit; and
# the share of 1F1B's memory up to which B's that grow get room on top, where whole stages are counted as F leaves them
# (None: as the larger one of F and B does). v-min without any room could hardly let an F run ahead of such a B.
_LIMITS: Mapping[str, tuple[Callable[[int], float], float | None]] = {
    "zb-1p": (float, None),
    "zb-2p": (lambda num_ranks: 2.0 * num_ranks, None),
    "zbv": (float, None),
    "v-half": (functools.partial(v_block_peak, half=True), 0.0),
    "v-min": (functools.partial(v_block_peak, half=False), 0.5),
}
_LINEAR_ONES = ("zb-1p", "zb-2p")


def problem_of(name: str, request: Request) -> OrderProblem:
    """What the schedule is searched for: the request's limits, or its own. Raises PlanError for another placement."""
    if name in _LINEAR_ONES:
        request.one_chunk(name)
        placement = Placement(LINEAR, request.num_ranks)
    else:
        placement = request.on_v(name)
    costs, (whole_stages, share) = request.costs_on(placement), _LIMITS[name]
    limits = limits_of(request, placement, costs, whole_stages(request.num_ranks), most_of_1f1b=share)
    return OrderProblem(placement, request.num_microbatches, costs, limits)


def bound_of(name: str, request: Request) -> Bound:
    """What no plan of the schedule beats."""
    return proven(or_fused(problem_of(name, request)))


def searched(name: str, request: Request) -> Plan:
    """The plan, without transfers. Raises PlanError naming the rank where a limit is lower than any order needs."""
    problem = problem_of(name, request)
    plan = plan_of(name, problem, solve(name, problem).order)
    return _or_fused(plan, problem) if name in _LINEAR_ONES else plan


def _or_fused(plan: Plan, problem: OrderProblem) -> Plan:
    """The plan, or 1F1B's fused backwards where these take less: a BW does not grow, and may do with a limit under
    which hardly any B can run ahead of its W."""
    costs = problem.costs
    if all(held <= left for held, left in zip(costs.held_after_b, costs.activation, strict=True)):
        return plan  # every order of fused backwards is one of split ones, and was judged
    request = Request(problem.placement.num_ranks, problem.num_microbatches)
    fused = dataclasses.replace(one_f_one_b(request), schedule=plan.schedule)
    peaks = (peak_activation(rank, row, costs) for rank, row in enumerate(fused.rows))
    fits = all(peak <= limit + slack(limit) for peak, limit in zip(peaks, problem.limits, strict=True))
    cost = simulate(plan, costs).cost
    return fused if fits and simulate(fused, costs).cost < cost - slack(cost) else plan
