"""Where the search starts: published orders, list scheduling by rules, and repeating blocks; promising ones first.

A start is a recipe, so that what was best on a short problem can be made for the whole one.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megatron.core.pipeline_parallel.plan.placement import V_SHAPED
from megatron.core.pipeline_parallel.plan.search.blocks import Block, repeat
from megatron.core.pipeline_parallel.plan.search.bounds import least_period
from megatron.core.pipeline_parallel.plan.search.greedy import ListScheduler, Urgency
from megatron.core.pipeline_parallel.plan.search.outward import shortest
from megatron.core.pipeline_parallel.plan.search.problem import TOLERANCE, Order, Problem
from megatron.core.pipeline_parallel.plan.search.published import one_f_one_b, unit_zbv, v_block, zb_h

# What goes first where several can run: kind and chunk.
_LINEAR_RULES = (("B0", "F0", "W0"), ("F0", "B0", "W0"))
_V_RULES = (
    ("B0", "F1", "B1", "F0", "W0", "W1"),
    ("B1", "B0", "F1", "F0", "W1", "W0"),
    ("F1", "B1", "B0", "F0", "W1", "W0"),
    ("F1", "F0", "B0", "B1", "W0", "W1"),
)
# For what a rank waits, as shares of what it could run meanwhile; the second where that is a W.
_PATIENCE = ((0.0, 0.0), (0.5, 0.5), (0.0, 1.0), (0.5, 0.0), (0.0, 0.5), (1.0, 1.0))
# Shares of the delay that each leg of a microbatch's way gets (F by chunk, B by chunk).
_LINEAR_LEGS = ((0.0, 1.0), (1.0, 0.0), (1.0, 1.0))
_V_LEGS = (
    (0.0, 0.0, 0.0, 1.0),
    (1.0, 1.0, 0.0, 0.0),
    (1.0, 0.0, 1.0, 2.0),
    (4.0, 1.0, 0.0, 0.0),
    (0.0, 0.0, 1.0, 1.0),
    (1.0, 4.0, 1.0, 0.0),
    (1.0, 0.0, 0.0, 1.0),
    (3.0, 1.0, 3.0, 1.0),
)
_SHARES = (0.75, 1.0, 0.5)
_HALVINGS = 5
# How much longer than the work of the busiest rank a period may be. Long ones need little memory.
_FINE_STRETCHES = tuple(1.0 + 0.02 * step for step in range(50))
_COARSE_STRETCHES = (
    2.0,
    2.2,
    2.4,
    2.7,
    3.0,
    3.5,
    4.0,
    5.0,
    6.0,
    8.0,
    11.0,
    16.0,
    24.0,
    36.0,
    54.0,
    80.0,
    128.0,
)
# Slots of equal length in a period, and slots waited at each turn.
_SLOTS = (6, 4, 8, 5, 7)
_TURNS = ((0, 0, 0), (2, 0, 0), (0, 2, 0), (0, 0, 2), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1))
_TIGHT_BLOCKS = 5
_LONGEST_OUTWARD = 2.0


@dataclass(frozen=True)
class Start:
    """make: the order of a problem with any number of microbatches; None where the recipe lets nothing go on.

    period: what each further microbatch costs, where that is more than the work of the busiest rank.
    """

    label: str
    make: Callable[[Problem], Order | None]
    period: float = 0.0


def known(problem: Problem) -> Iterator[Start]:
    """Published orders."""
    if problem.placement.num_chunks == 1:
        yield Start("zb-h2", functools.partial(zb_h, times=2))
        yield Start("zb-h1", functools.partial(zb_h, times=1))
        yield Start("1f1b", one_f_one_b)
        return
    num_ranks = problem.placement.num_ranks
    yield Start("zbv in units", unit_zbv)
    yield Start("v-half in units", v_block(num_ranks, half=True).order)
    yield Start("v-min in units", v_block(num_ranks, half=False).order)


def by_rules(problem: Problem) -> Iterator[Start]:
    """List scheduling with fixed preferences."""
    rules = _LINEAR_RULES if problem.placement.num_chunks == 1 else _V_RULES
    for (patience, patience_w), rule in itertools.product(_PATIENCE, rules):
        make = functools.partial(_by_rule, rule=rule, patience=patience, patience_w=patience_w)
        yield Start(f"rule {' '.join(rule)}, patience {patience:g} and {patience_w:g}", make)


def _by_rule(problem: Problem, rule: tuple[str, ...], patience: float, patience_w: float) -> Order | None:
    num_ranks, num_stages = problem.placement.num_ranks, problem.num_stages
    place = {name: float(index) for index, name in enumerate(rule)}
    urgency = [
        [place[f"{'FBW'[code // num_stages]}{code % num_stages // num_ranks}"]] * problem.num_microbatches
        for code in range(3 * num_stages)
    ]
    return ListScheduler(problem).order(Urgency(urgency, patience, patience_w))


def by_blocks(problem: Problem) -> Iterator[Start]:
    """Repeating blocks that fit: without delay at the shortest periods, then delayed as far as memory goes."""
    work = max(problem.costs.rank_times(problem.placement))
    if work <= 0:
        return
    legs = _LINEAR_LEGS if problem.placement.num_chunks == 1 else _V_LEGS
    plain = repeat(problem, work, (0.0,) * len(legs[0]))
    if plain is None or not plain.fits(problem):
        yield from (
            Start(label, block.order, block.period) for label, block in _tight(problem, work, len(legs[0]))
        )
        return
    yield Start("block", plain.order)
    longest: dict[tuple[float, ...], float] = {}
    for share, leg in itertools.product(_SHARES, legs):
        scale = longest[leg] if leg in longest else _longest_delay(problem, work, leg)
        longest[leg] = scale
        block = repeat(problem, work, tuple(share * scale * one for one in leg)) if scale > 0 else None
        if block is not None and block.fits(problem):
            yield Start(f"block, {share * scale:g} of delay on {leg}", block.order)


def _longest_delay(problem: Problem, period: float, leg: tuple[float, ...]) -> float:
    """About the largest multiple of these delays with which the block fits, by halving; 0 if none."""
    low, high = 0.0, period
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        block = repeat(problem, period, tuple(middle * one for one in leg))
        if block is None or not block.fits(problem):
            high = middle
        else:
            low = middle
    return low


def _tight(problem: Problem, work: float, num_legs: int) -> list[tuple[str, Block]]:
    """The blocks with the shortest periods that fit, where memory does not allow the shortest of all."""
    none = (0.0,) * num_legs
    found: list[tuple[float, str, Block]] = []
    for stretch in (*_FINE_STRETCHES, *_COARSE_STRETCHES):
        block = repeat(problem, stretch * work, none)
        if block is not None and block.fits(problem):
            found.append((stretch, f"block, {stretch:g} of the work", block))
        if len(found) >= _TIGHT_BLOCKS:
            break
    longest = max(problem.costs.f + problem.costs.b)
    turns = _TURNS if num_legs > 2 else _TURNS[:1]
    for num_slots, comm in itertools.product(_SLOTS, sorted({0.0, problem.costs.comm})):
        slot = max(work / num_slots, longest + comm)
        for turn in turns:
            block = repeat(problem, num_slots * slot, none, tuple(slot * one for one in turn), slot)
            if block is not None and block.fits(problem):
                stretch = num_slots * slot / work
                found.append(
                    (stretch, f"block of {num_slots} slots, {stretch:g} of the work, turns {turn}", block)
                )
    found = sorted(found, key=lambda one: one[0])[:_TIGHT_BLOCKS]
    if problem.placement.kind == V_SHAPED:
        least = max(work, least_period(problem))
        most = found[0][2].period if found else _LONGEST_OUTWARD * work
        for block in shortest(problem, least, most * (1.0 - TOLERANCE)):
            stretch = block.period / work
            found.append((stretch, f"block from the turn outwards, {stretch:g} of the work", block))
    found.sort(key=lambda one: one[0])
    return [(label, block) for _, label, block in found]
