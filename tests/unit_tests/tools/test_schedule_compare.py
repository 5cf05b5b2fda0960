from __future__ import annotations

import pytest

from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.placement import Placement
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.plan.simulate import over_limit
from tools.schedules.page import (
    Entry,
    entry_of,
    longest,
    of_rank_totals,
    table,
)


def entry(name, ranks=3, microbatches=4, limits=None):
    request = Request(ranks, microbatches)
    return entry_of(name, request, CostModel.of_ranks(Placement("linear", ranks)), limits)


def test_an_entry_says_what_is_wrong_with_it():
    fits = entry("1f1b", limits=(3, 2, 1))
    assert (fits.problem, fits.simulation.cost) == ("", 18)
    over = entry("1f1b", limits=(3, 1, 0.25))
    assert over.problem == "needs 2 activations on rank 1, the limit is 1"
    assert over.simulation is not None
    impossible = entry("2f2b")
    assert impossible.simulation is None
    assert "unknown" in impossible.problem


def test_the_rank_that_is_most_over_and_the_first_of_equals():
    simulation = entry("gpipe").simulation
    assert over_limit(simulation, None) is None
    assert over_limit(simulation, (4, 4, 4)) is None
    assert over_limit(simulation, (3, 3, 3)) == (0, 4)
    assert over_limit(simulation, (3, 3.5, 1)) == (2, 4)


def test_table_has_a_row_for_each_and_for_what_was_measured():
    fits, slow = entry("1f1b"), entry("gpipe").simulation
    rows = table([Entry("a", fits.simulation, measured=slow)]).splitlines()
    assert rows == [
        "| schedule    | step time | bubble | activations by rank | transfers |",
        "|-------------|-----------|--------|---------------------|-----------|",
        "| a           | 18        | 33.33% | 3 2 1               | 16        |",
        "| a, measured | 18        | 33.33% | 4 4 4               | 16        |",
    ]
    assert "| cannot |" in table([fits, Entry("b", None, "cannot")])
    assert "| 1 to 9  " in table([entry("1f1b", 9, 9)])
    assert longest([fits, Entry("b", None, "cannot")]) == 18
    assert longest([]) == 0


def test_rank_totals_stay_with_the_rank():
    ran, asked = Placement("linear", 2), Placement("v", 2, 2)
    costs = CostModel((2, 4), (6, 8), (1, 3), (10, 20), (5, 10), comm=0.5)
    moved = of_rank_totals(costs, ran, asked)
    assert moved.f == (1, 2, 2, 1)  # stages of ranks 0, 1, 1, 0
    assert moved.activation == (5, 10, 10, 5)
    assert moved.held_after_b == pytest.approx((2.5, 5, 5, 2.5))
    assert moved.comm == 0.5
    assert moved.rank_times(asked) == costs.rank_times(ran)
    assert of_rank_totals(moved, asked, ran) == costs
