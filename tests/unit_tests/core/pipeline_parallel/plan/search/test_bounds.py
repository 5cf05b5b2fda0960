"""Proven bounds, and how near searches come to them: never worse than the rival, gaps in points of bubble."""

import statistics

import pytest

from benchmarks.schedule_search import SETTINGS, drawn, gaps, request_of
from megatron.core.pipeline_parallel.plan.search.bounds import lower_bound, or_fused, proven
from megatron.core.pipeline_parallel.plan.search.solve import solve
from megatron.core.pipeline_parallel.plan.search.zero_bubble import problem_of
from tests.harness.rival_schedule import rival_cost


# The worst gap of a draw, and the median of all, in points: (median, worst).
@pytest.mark.grid
@pytest.mark.parametrize(
    ("schedule", "median", "worst"), [("zb-1p", 0.1, 2), ("zb-2p", 0.5, 2), ("zbv", 0.5, 2)]
)
def test_gaps_to_the_bound(schedule, median, worst):
    found = [gap for gap, _ in gaps(schedule, 4, drawn(2))]
    assert min(found) >= -1e-6
    assert statistics.median(found) <= median
    assert max(found) <= worst


@pytest.mark.grid
@pytest.mark.parametrize("schedule", ["zb-1p", "zb-2p", "zbv"])
def test_no_search_is_worse_than_the_rival(schedule):
    for ranks, setting in ((2, 0), (3, 5), (4, 1), (5, 7), (8, 0)):
        problem = problem_of(schedule, request_of(schedule, ranks, 4 * ranks, drawn(8)[setting]))
        assert solve(schedule, problem).cost <= rival_cost(problem) * (1 + 1e-9), (ranks, setting)


def test_the_bound_says_what_holds_a_pipeline_up():
    for schedule, reason in (
        ("zb-1p", "warm-up and cool-down within memory"),
        ("zb-2p", "warm-up within memory"),
    ):
        problem = problem_of(schedule, request_of(schedule, 8, 32, SETTINGS[1]))
        assert proven(problem).reason == reason


@pytest.mark.parametrize("schedule", ["zb-1p", "zb-2p", "zbv", "v-half", "v-min"])
def test_no_order_beats_the_bound(schedule):
    for place, setting in enumerate(drawn(30)):
        problem = problem_of(schedule, request_of(schedule, 2 + place % 4, 4 + 3 * (place % 5), setting))
        assert lower_bound(or_fused(problem)) <= rival_cost(problem) * (1 + 1e-9), setting


# F, B, W, transfer, left after B. The wait of the last B here takes no whole W more, or its W's must follow it.
@pytest.mark.parametrize(
    "setting",
    [(1.0, 1.55, 0.527, 0.05, 0.444), (1.0, 1.323, 0.605, 0.008, 0.303), (1.0, 1.26, 0.636, 0.028, 0.436)],
)
def test_short_v_plans_are_proved_best(setting):
    problem = problem_of("zbv", request_of("zbv", 2, 4, setting))
    assert solve("zbv", problem).cost == pytest.approx(lower_bound(problem))
