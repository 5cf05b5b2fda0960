"""Published orders of a search's problem."""

from megatron.core.pipeline_parallel.plan.generators import linear as plain
from megatron.core.pipeline_parallel.plan.generators.linear import zb_h1, zb_h2
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.plan.search.problem import order_of


def one_f_one_b(problem):
    """1F1B, each W right behind its B."""
    return order_of(plain.one_f_one_b(Request(problem.placement.num_ranks, problem.num_microbatches)))


def zb_h(problem, times):
    """ZB-H1 or ZB-H2."""
    return order_of((zb_h1, zb_h2)[times - 1](Request(problem.placement.num_ranks, problem.num_microbatches)))
