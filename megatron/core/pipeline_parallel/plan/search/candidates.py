"""Orders to start from: known ones, list scheduling by rules, and repeating blocks; the promising ones first."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from megatron.core.pipeline_parallel.plan.search.blocks import repeat
from megatron.core.pipeline_parallel.plan.search.greedy import ListScheduler, Urgency
from megatron.core.pipeline_parallel.plan.search.problem import Order, Problem, fits
from megatron.core.pipeline_parallel.plan.search.published import one_f_one_b, unit_zbv, v_block, zb_h

# What goes first where several can run: kind and chunk. One chunk:
_LINEAR_RULES = (("B0", "F0", "W0"), ("F0", "B0", "W0"))
# Two chunks:
_V_RULES = (
    ("B0", "F1", "B1", "F0", "W0", "W1"),
    ("B1", "B0", "F1", "F0", "W1", "W0"),
    ("F1", "B1", "B0", "F0", "W1", "W0"),
    ("F1", "F0", "B0", "B1", "W0", "W1"),
)
_PATIENCE = ((0.0, 0.0), (0.5, 0.5), (0.0, 1.0), (0.5, 0.0), (0.0, 0.5), (1.0, 1.0))
# Shares of the delay that each leg of the way gets (F by chunk, B by chunk).
_LINEAR_LEGS = ((0.0, 1.0), (1.0, 0.0), (1.0, 1.0))
_V_LEGS = (
    (1.0, 1.0, 0.0, 0.0),
    (4.0, 1.0, 0.0, 0.0),
    (0.0, 0.0, 1.0, 1.0),
    (0.0, 0.0, 0.0, 1.0),
    (1.0, 0.0, 1.0, 2.0),
    (1.0, 4.0, 1.0, 0.0),
    (4.0, 1.0, 0.0, 4.0),
    (3.0, 1.0, 3.0, 1.0),
)
# How much longer than the work of the busiest rank a block's period may be. Long ones need little memory.
_STRETCHES = (1.0, 1.02, 1.05, 1.1, 1.17, 1.25, 1.35, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)
_FITTING_STRETCHES = 3
_SHARES = (1.0, 0.5, 0.75)


def known(problem: Problem) -> Iterator[tuple[str, Order]]:
    """Published orders that fit."""
    if problem.placement.num_chunks == 1:
        made = [("zb-h2", zb_h(problem, 2)), ("zb-h1", zb_h(problem, 1)), ("1f1b", one_f_one_b(problem))]
    else:
        num_ranks = problem.placement.num_ranks
        made = [("zbv in units", unit_zbv(problem))]
        made += [
            ("v-half block", v_block(num_ranks, True).order(problem)),
            ("v-min block", v_block(num_ranks, False).order(problem)),
        ]
    return (one for one in made if fits(problem, one[1]))


def by_rules(problem: Problem) -> Iterator[tuple[str, Order]]:
    """List scheduling with fixed preferences."""
    scheduler = ListScheduler(problem)
    rules = _LINEAR_RULES if problem.placement.num_chunks == 1 else _V_RULES
    for (patience, patience_w), rule in itertools.product(_PATIENCE, rules):
        order = scheduler.order(Urgency(_classes(problem, rule), patience, patience_w))
        if order is not None:
            yield f"{' '.join(rule)}, patience {patience:g}, {patience_w:g}", order


def _classes(problem: Problem, rule: tuple[str, ...]) -> list[list[float]]:
    num_ranks, num_stages = problem.placement.num_ranks, problem.num_stages
    place = {name: float(index) for index, name in enumerate(rule)}
    return [
        [place[f"{'FBW'[code // num_stages]}{code % num_stages // num_ranks}"]] * problem.num_microbatches
        for code in range(3 * num_stages)
    ]


def by_blocks(problem: Problem) -> Iterator[tuple[str, Order]]:
    """Repeating blocks that fit: without delay at the shortest periods, then delayed as far as memory goes."""
    period = max(problem.costs.rank_times(problem.placement))
    if period <= 0:
        return
    legs = _LINEAR_LEGS if problem.placement.num_chunks == 1 else _V_LEGS
    none = (0.0,) * len(legs[0])
    fitting = []
    for stretch in _STRETCHES:
        order = _block_order(problem, stretch * period, none)
        if order is not None:
            fitting.append(stretch)
            yield f"block, period {stretch:g}", order
        if len(fitting) == _FITTING_STRETCHES:
            break
    if not fitting or fitting[0] > _STRETCHES[1]:
        return
    longest = [(leg, _longest_delay(problem, fitting[0] * period, leg)) for leg in legs]
    for share, (leg, scale) in itertools.product(_SHARES, longest):
        if scale > 0:
            order = _block_order(problem, fitting[0] * period, tuple(share * scale * one for one in leg))
            if order is not None:
                yield f"block, delays {leg} x {share * scale:g}", order


def _block_order(problem: Problem, period: float, delays: tuple[float, ...]) -> Order | None:
    block = repeat(problem, period, delays)
    if block is None:
        return None
    order = block.order(problem)
    return order if fits(problem, order) else None


def _longest_delay(problem: Problem, period: float, leg: tuple[float, ...]) -> float:
    """The largest multiple of these delays with which the block fits, by halving; 0 if none."""
    low, high = 0.0, period
    for _ in range(6):
        middle = (low + high) / 2
        if _block_order(problem, period, tuple(middle * one for one in leg)) is None:
            high = middle
        else:
            low = middle
    return low
