"""The searched schedules by name: zb-1p, zb-2p on the linear placement; zbv, v-half, v-min on the V."""

from __future__ import annotations

import dataclasses

from megatron.core.pipeline_parallel.plan.costs import peak_activation
from megatron.core.pipeline_parallel.plan.ir import Plan
from megatron.core.pipeline_parallel.plan.one_f_one_b import one_f_one_b
from megatron.core.pipeline_parallel.plan.placement import LINEAR, Placement
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.plan.search.problem import Problem, limits_of, plan_of, slack
from megatron.core.pipeline_parallel.plan.search.published import v_block_peak
from megatron.core.pipeline_parallel.plan.search.solve import solve
from megatron.core.pipeline_parallel.plan.simulate import simulate
from megatron.core.pipeline_parallel.plan.v_placement import v_placement


def zb_1p(request: Request) -> Plan:
    """B and W apart on the linear placement, with 1F1B's memory (or the request's limit)."""
    return zero_bubble("zb-1p", request, float(request.num_ranks))


def zb_2p(request: Request) -> Plan:
    """B and W apart on the linear placement, with twice 1F1B's memory (or the request's limit)."""
    return zero_bubble("zb-2p", request, 2.0 * request.num_ranks)


def zbv(request: Request) -> Plan:
    """The V without a bubble at equal times, with 1F1B's memory (or the request's limit)."""
    return adaptive_v("zbv", request, float(request.num_ranks))


def v_half(request: Request) -> Plan:
    """The V with about half of 1F1B's memory (or the request's limit)."""
    return adaptive_v("v-half", request, v_block_peak(request.num_ranks, half=True), most_of_1f1b=0.0)


def v_min(request: Request) -> Plan:
    """The V with about a third of 1F1B's memory (or the request's limit). B's that grow get room while that keeps to
    half of 1F1B's: without any, hardly an F can run ahead of them."""
    return adaptive_v("v-min", request, v_block_peak(request.num_ranks, half=False), most_of_1f1b=0.5)


def zero_bubble(name: str, request: Request, whole_stages: float) -> Plan:
    """The linear placement with any memory limit: the request's, or this many activations of the largest stage.

    Raises PlanError naming the rank where a limit is lower than any order needs.
    """
    request.one_chunk(name)
    return _or_fused(request, _searched(name, request, Placement(LINEAR, request.num_ranks), whole_stages))


def adaptive_v(
    name: str, request: Request, whole_stages: float, *, most_of_1f1b: float | None = None
) -> Plan:
    """The V with any memory limit: the request's, or this many whole-stage activations of the largest rank.

    most_of_1f1b: as F leaves them, see `limits_of`.
    Raises PlanError naming the rank where a limit is lower than any order needs.
    """
    return _searched(name, request, v_placement(request, name), whole_stages, most_of_1f1b)[0]


def _searched(
    name: str,
    request: Request,
    placement: Placement,
    whole_stages: float,
    most_of_1f1b: float | None = None,
) -> tuple[Plan, Problem]:
    costs = request.costs_on(placement)
    limits = limits_of(request, placement, costs, whole_stages, most_of_1f1b=most_of_1f1b)
    problem = Problem(placement, request.num_microbatches, costs, limits)
    return plan_of(name, problem, solve(name, problem).order), problem


def _or_fused(request: Request, found: tuple[Plan, Problem]) -> Plan:
    """The plan, or 1F1B's fused backwards where these take less: a BW does not grow, and may do with a limit under
    which hardly any B can run ahead of its W."""
    plan, problem = found
    costs = problem.costs
    if all(held <= left for held, left in zip(costs.held_after_b, costs.activation, strict=True)):
        return plan  # every order of fused backwards is one of split ones, and was judged
    fused = dataclasses.replace(
        one_f_one_b(Request(request.num_ranks, request.num_microbatches)), schedule=plan.schedule
    )
    peaks = (peak_activation(rank, row, costs) for rank, row in enumerate(fused.rows))
    fits = all(peak <= limit + slack(limit) for peak, limit in zip(peaks, problem.limits, strict=True))
    cost = simulate(plan, costs).cost
    return fused if fits and simulate(fused, costs).cost < cost - slack(cost) else plan
