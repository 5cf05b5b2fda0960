"""What one rank tells of its steps: medians by hand, both ends choose the same messages, all of it JSON."""

from __future__ import annotations

import json

import pytest

from megatron.core.pipeline_parallel.plan.ir import SEND_B, SEND_F, Kind, Plan, parse_row
from megatron.core.pipeline_parallel.plan.measured import Span
from megatron.core.pipeline_parallel.plan.placement import Placement
from megatron.core.pipeline_parallel.plan.rank_figures import RankStep, figures_of, median
from tests.harness.measured_runs import figures_of_run, lowered


def test_medians_spans_and_work_by_hand():
    plan = Plan("split", Placement("linear", 1), 2, (parse_row("0F0 0B0 0F1 0W0 0BW1".split()),))
    spans = [Span(1, 2, 0.25), Span(2, 3, 0.5), Span(3, 6), Span(6, 7), Span(7, 11)]
    made = figures_of([RankStep(4, plan, 0, spans)], (6,), {0: (100, 40)}, 77)
    assert json.loads(json.dumps(made)) == {
        "pipeline": [6],
        "rank": 0,
        "times": [
            # of two forwards, 0.75 and 3 s, the lower one
            [Kind.F, 0, 750_000_000],
            [Kind.B, 0, 500_000_000],
            [Kind.W, 0, 1_000_000_000],
            [Kind.BW, 0, 4_000_000_000],
        ],
        "sends": [],
        "receives": [],
        "steps": [[4, 9_750_000_000, 9_250_000_000]],
        "activations": [[0, 100, 40]],
        "peak_bytes": 77,
    }


def test_parts_of_a_w_are_one_and_operations_of_data_parallelism_are_no_computation():
    row = parse_row("0UNSHARD[0:2] 0F0 0B0 0REDUCE[1:2].2 0W0[1:2] 0W0[0:1] 0REDUCE[0:1]".split())
    plan = Plan("parts", Placement("linear", 1), 1, (row,))
    spans = [
        Span(0, 2, 1),
        Span(1, 3, 0.25, 0.5),
        Span(3, 4),
        Span(6, 7),
        Span(4, 8, 0, 1),
        Span(8, 9),
        Span(9, 20),
    ]
    made = figures_of([RankStep(4, plan, 0, spans)], (6,))
    assert made["times"] == [
        [Kind.F, 0, 1_250_000_000],
        [Kind.B, 0, 1_000_000_000],
        [Kind.W, 0, 4_000_000_000],
    ]
    assert made["steps"] == [[4, 7_750_000_000, 6_250_000_000]]


def test_median_is_a_value():
    assert [median(values) for values in ([3], [9, 1], [5, 1, 9], [4, 3, 2, 1])] == [3, 1, 5, 2]


@pytest.mark.parametrize("microbatches", [3, 60])
def test_both_ends_tell_of_the_same_few_messages(microbatches):
    """Whatever number a rank sends: each receive that is told of has its send among the other's figures."""
    plan = lowered("zb-1p", 3, microbatches)
    figures = figures_of_run(plan, steps=2)
    sent = {(one["rank"], iteration, message) for one in figures for iteration, message, _ in one["sends"]}
    got = {(row[2], row[0], row[1]) for one in figures for row in one["receives"]}
    assert got
    assert got <= sent
    kinds = {op[7]: op[0] for row in plan.rows for op in row if op[0] in (SEND_F, SEND_B)}
    assert {kinds[message] for _, _, message in got} == {SEND_F, SEND_B}
    for one in figures:
        routes = 2 if one["rank"] == 1 else 1
        assert len(one["sends"]) <= 2 * routes * 14
    assert len(json.dumps(figures[1])) < 6000
