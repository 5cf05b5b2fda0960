"""Repeating blocks: nothing collides, inputs are there, and memory is what the unrolled order holds."""

import itertools

import pytest

from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.placement import LINEAR, V_SHAPED, Placement
from megatron.core.pipeline_parallel.plan.search.blocks import repeat
from megatron.core.pipeline_parallel.plan.search.clock import Clock
from megatron.core.pipeline_parallel.plan.search.problem import OrderProblem, peaks

FIGURES = (
    {},
    {"time_f": (18.5,), "time_b": (18.1,), "time_w": (9.3,), "comm": 0.6},
    {"time_w": (0,), "comm": 2.0},
    {"time_f": (1, 2, 3, 1), "activation": (1, 2, 1, 3), "memory_after_b": 0.5},
    {"time_f": (1, 2, 3, 1), "activation": (1, 2, 1, 3), "memory_after_b": 2.5},
    {"time_w": (0,), "comm": 2.0, "memory_after_b": 1.2},
)


def problems():
    for kind, figures in itertools.product((LINEAR, V_SHAPED), FIGURES):
        placement = Placement(kind, 4, 2 if kind == V_SHAPED else 1)
        costs = CostModel.of_ranks(placement, **figures)
        yield OrderProblem(placement, 30, costs, (1e9,) * 4)


def test_blocks_repeat_without_waiting():
    """The order of a block runs exactly at its offsets: no operation waits for another rank or collides on its own."""
    for problem in problems():
        work = max(problem.costs.rank_times(problem.placement))
        for stretch in (1.0, 1.1, 1.4):
            block = repeat(problem, stretch * work)
            if block is None:
                continue
            order = block.order(problem)
            times = Clock(problem).times(order)
            for rank, row in enumerate(order):
                done = {}
                for start, code in zip(times.starts[rank], row, strict=True):
                    done[code] = done.get(code, -1) + 1
                    assert start <= block.offsets[code] + done[code] * block.period + 1e-6


def test_peaks_of_the_steady_state_cover_the_unrolled_order():
    equal = []
    for problem in problems():
        work = max(problem.costs.rank_times(problem.placement))
        block = repeat(problem, 1.1 * work)
        for steady, unrolled in zip(block.peaks(problem), peaks(problem, block.order(problem)), strict=True):
            assert unrolled <= steady + 1e-9
            equal.append(steady == pytest.approx(unrolled))
    assert sum(equal) > 0.8 * len(equal)  # tight, not only safe


def test_equal_times_fit_at_the_work_of_a_rank_with_the_memory_of_v_min():
    for p, whole in ((4, 2.0), (8, 4.0), (16, 6.0)):
        placement = Placement(V_SHAPED, p, 2)
        problem = OrderProblem(placement, 4, CostModel.of_ranks(placement), (1e9,) * p)
        assert max(repeat(problem, 3.0).peaks(problem)) == whole


def test_a_period_shorter_than_the_work_is_impossible():
    for problem in problems():
        work = max(problem.costs.rank_times(problem.placement))
        assert repeat(problem, 0.9 * work) is None
