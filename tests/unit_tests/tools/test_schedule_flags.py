"""What the flags of show_schedule say: costs and limits of every rank, chunks only for who has a choice."""

from __future__ import annotations

import pytest

from megatron.core.pipeline_parallel.plan.ir import PlanError
from megatron.core.pipeline_parallel.plan.schedules import SCHEDULES
from tools.schedules.flags import limits_of, names_of, parser, request_of


def parsed(*words):
    return parser("", ["text"]).parse_args([*map(str, words), "--stages", "2", "--microbatches", "4"])


def test_costs_are_of_the_schedules_own_placement():
    args = parsed("--schedule", "zbv", "--time-f", "1,3", "--time-comm", 0.5, "--memory-after-b", 0.25)
    request, costs = request_of(args, "zbv")
    assert costs.f == (0.5, 1.5, 1.5, 0.5)  # stages on ranks 0, 1, 1, 0
    assert costs.held_after_b == (0.125,) * 4
    assert costs.comm == 0.5
    assert request.costs == costs
    assert request_of(args, "zb-1p")[1].f == (1, 3)
    assert request_of(args, "interleaved")[1].f == (0.5, 1.5, 0.5, 1.5)


def test_chunks_are_for_interleaving_only_among_several():
    args = parsed("--schedule", "interleaved", "zbv", "--chunks", 3)
    interleaved, costs = request_of(args, "interleaved", several=True)
    assert (interleaved.num_chunks, len(costs.f)) == (3, 6)
    assert request_of(args, "zbv", several=True)[0].num_chunks is None
    assert request_of(args, "zbv")[0].num_chunks == 3  # alone: zbv says what it thinks of it


def test_limits_by_rank():
    assert limits_of(parsed(), 2) is None
    assert limits_of(parsed("--memory-limit", 3), 2) == (3, 3)
    assert limits_of(parsed("--memory-limit", 3, 2), 2) == (3, 2)
    assert limits_of(parsed("--memory-limit", "3,2"), 2) == (3, 2)
    with pytest.raises(PlanError, match="3 numbers for 2 ranks"):
        limits_of(parsed("--memory-limit", 1, 2, 3), 2)


def test_all_are_all_and_none_is_twice():
    assert names_of(parsed()) == []
    assert names_of(parsed("--schedule", "all", "auto")) == [*SCHEDULES, "auto"]
    with pytest.raises(PlanError, match="names zbv twice"):
        names_of(parsed("--schedule", "zbv", "all"))
    with pytest.raises(PlanError, match="'zbw' is unknown; there are gpipe"):
        names_of(parsed("--schedule", "zbw"))
