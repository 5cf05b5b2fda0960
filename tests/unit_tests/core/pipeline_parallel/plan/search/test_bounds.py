"""Proven bounds, and how near searches come to them: never worse than the rival, gaps in points of bubble."""

import statistics

import pytest

from benchmarks.schedule_search import SETTINGS, drawn, gaps, request_of
from megatron.core.pipeline_parallel.plan.search.bounds import proven
from megatron.core.pipeline_parallel.plan.search.solve import solve
from megatron.core.pipeline_parallel.plan.search.zero_bubble import problem_of
from tests.harness.rival_schedule import rival_cost


# The worst gap of a draw, and the median of all, in points: (median, worst).
@pytest.mark.parametrize(
    ("schedule", "median", "worst"), [("zb-1p", 0.1, 2), ("zb-2p", 0.5, 2), ("zbv", 1.0, 2.5)]
)
def test_gaps_to_the_bound(schedule, median, worst):
    found = [gap for gap, _ in gaps(schedule, 4, drawn(2))]
    assert min(found) >= -1e-6
    assert statistics.median(found) <= median
    assert max(found) <= worst


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
