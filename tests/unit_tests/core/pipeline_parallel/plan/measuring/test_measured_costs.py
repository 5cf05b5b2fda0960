"""Costs come back out of what ranks measured, whatever their clocks say; all ranks get the same bits."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest

from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import BW, B, F, W
from megatron.core.pipeline_parallel.plan.measuring.measured_costs import (
    bubble_rate,
    costs_of,
    divide_backwards,
    peaks_of,
)
from megatron.core.pipeline_parallel.plan.measuring.replan import Bubbles
from megatron.core.pipeline_parallel.plan.placement import Placement
from megatron.core.pipeline_parallel.plan.simulate import simulate
from tests.harness.measured_runs import figures_of_run, lowered

NS = 1e9


def costs(placement, seed=0, comm=0.25):
    """Different times on every stage, whole microseconds."""
    rng = random.Random(seed)
    f, b, w = (
        tuple(rng.randint(500_000, 2_000_000) / 1e6 for _ in range(placement.num_stages)) for _ in "fbw"
    )
    share = (1 / placement.num_chunks,) * placement.num_stages
    return CostModel(f, b, w, share, share, comm)


@pytest.mark.parametrize("name", ["zb-h1", "zbv", "v-half", "1f1b", "interleaved", "gis"])
def test_a_run_gives_its_costs_back_on_clocks_that_differ(name):
    plan = lowered(name, 3, 9, comm=0.25)
    real = costs(plan.placement)
    figures = figures_of_run(plan, real, ahead_s=(0.0, -3.5, 70_000.0), steps=3)
    found = costs_of(figures, plan.placement)
    assert found.f == pytest.approx([NS * one for one in real.f], abs=2)
    both = [b + w for b, w in zip(real.b, real.w, strict=True)]
    assert [b + w for b, w in zip(found.b, found.w, strict=True)] == pytest.approx(
        [NS * one for one in both], abs=4
    )
    if name in ("zb-h1", "zbv", "v-half"):
        assert found.b == pytest.approx([NS * one for one in real.b], abs=2)
    assert found.comm == pytest.approx(NS * real.comm, abs=2)
    assert found.activation == real.activation
    # and so the plan costs what it cost
    assert simulate(plan, found).cost == pytest.approx(NS * simulate(plan, real).cost, rel=1e-6)


def test_without_a_measured_link_transfers_take_nothing():
    figures = figures_of_run(lowered("1f1b", 2, 3))
    for one in figures:
        one["link_ns"] = 0
    assert costs_of(figures, Placement("linear", 2)).comm == 0


def test_of_several_ranks_of_a_stage_the_slowest_and_of_several_links_the_slowest():
    plan = lowered("zb-h1", 2, 4)
    slow = dataclasses.replace(costs(plan.placement, 1), comm=0.5)
    other = costs(plan.placement, 2)
    figures = figures_of_run(plan, slow, pipeline=(0, 2)) + figures_of_run(plan, other, pipeline=(1, 3))
    found = costs_of(figures, plan.placement)
    for kind in ("f", "b", "w"):
        most = [max(pair) * NS for pair in zip(getattr(slow, kind), getattr(other, kind), strict=True)]
        assert getattr(found, kind) == pytest.approx(most, abs=2)
    assert found.comm == pytest.approx(0.5 * NS, abs=2)


def test_every_rank_gets_the_same_bits_in_any_order_and_by_way_of_json():
    plan = lowered("zbv", 3, 6)
    figures = figures_of_run(plan, costs(plan.placement), ahead_s=(1.0, 2.0, 3.0), steps=2)
    first = costs_of(figures, plan.placement)
    other = json.loads(json.dumps(figures))
    random.Random(3).shuffle(other)
    assert costs_of(other, plan.placement) == first
    assert all(value == int(value) for value in (*first.f, *first.b, *first.w, first.comm))


def test_a_stage_that_nobody_has_measured_is_named():
    figures = figures_of_run(lowered("zb-h1", 2, 3))
    for one in figures:
        one["times"] = [row for row in one["times"] if row[:2] != [F, 1]]
    with pytest.raises(AssertionError, match=r"the forwards of stages \[1\]"):
        costs_of(figures, Placement("linear", 2))


def test_fused_backwards_are_divided_as_those_seen_elsewhere():
    assert divide_backwards([30, None, None], [10, None, None], [None, 100, 7]) == ([30, 75, 5], [10, 25, 2])
    assert divide_backwards([None], [None], [9]) == ([4], [5])  # evenly, and still 9
    assert divide_backwards([None, 6], [None, 0], [None, None]) == ([0, 6], [0, 0])
    # a stage that has all three: its own
    figures = figures_of_run(lowered("zb-h1", 1, 2))
    figures[0]["times"] = [[F, 0, 5], [B, 0, 6], [W, 0, 7], [BW, 0, 99]]
    found = costs_of(figures, Placement("linear", 1))
    assert (found.b, found.w) == ((6,), (7,))


def test_bubbles_of_steps_are_those_of_the_simulator():
    plan = lowered("1f1b", 3, 5, comm=0.25)
    real = costs(plan.placement)
    slower = dataclasses.replace(real, comm=0.75)
    figures = figures_of_run(plan, real, steps=1, ahead_s=(9.0, 1.0, 5.0))
    found = Bubbles.of(figures, plan, None)
    expected = pytest.approx(simulate(plan, real).bubble_rate, abs=1e-6)
    assert (found.planned, found.measured) == (expected, expected)
    # of two pipelines the slower one; an incomplete one says nothing
    figures += figures_of_run(plan, slower, pipeline=(3, 4, 5))
    found = Bubbles.of(figures, plan, None)
    expected = pytest.approx(simulate(plan, slower).bubble_rate, abs=1e-6)
    assert (found.planned, found.measured) == (expected, expected)
    assert Bubbles.of(figures[:2], plan, None) is None
    assert bubble_rate([(100, 60), (90, 80)]) == pytest.approx(0.2)
    assert bubble_rate([(0, 0)]) == 0


def test_peaks_are_the_most_of_all_pipelines():
    figures = figures_of_run(lowered("1f1b", 2, 3)) + figures_of_run(lowered("1f1b", 2, 3), pipeline=(4, 5))
    for one, peak in zip(figures, (7, 5, 6, 9), strict=True):
        one["peak_bytes"] = peak
    assert peaks_of(figures, 2) == (7, 9)
    assert peaks_of([], 2) == (0, 0)
