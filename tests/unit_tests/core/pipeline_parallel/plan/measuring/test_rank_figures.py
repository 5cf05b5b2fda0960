"""What one rank tells of its steps: medians by hand, all of it JSON."""

from __future__ import annotations

import json

from megatron.core.pipeline_parallel.plan.ir import Kind, Plan, parse_row
from megatron.core.pipeline_parallel.plan.measuring.measured_costs import RankStep, figures_of, median
from megatron.core.pipeline_parallel.plan.measuring.timeline_files import OpTimes
from megatron.core.pipeline_parallel.plan.placement import Placement


def test_medians_spans_and_work_by_hand():
    plan = Plan("split", Placement("linear", 1), 2, (parse_row("0F0 0B0 0F1 0W0 0BW1".split()),))
    spans = [OpTimes(1, 2, 0.25), OpTimes(2, 3, 0.5), OpTimes(3, 6), OpTimes(6, 7), OpTimes(7, 11)]
    made = figures_of([RankStep(4, plan, 0, spans)], (6,), 77, 5)
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
        "link_ns": 5,
        "steps": [[4, 9_750_000_000, 9_250_000_000]],
        "peak_bytes": 77,
    }


def test_parts_of_a_w_are_one_and_operations_of_data_parallelism_are_no_computation():
    row = parse_row("0UNSHARD[0:2] 0F0 0B0 0REDUCE[1:2].2 0W0[1:2] 0W0[0:1] 0REDUCE[0:1]".split())
    plan = Plan("parts", Placement("linear", 1), 1, (row,))
    spans = [
        OpTimes(0, 2, 1),
        OpTimes(1, 3, 0.25, 0.5),
        OpTimes(3, 4),
        OpTimes(6, 7),
        OpTimes(4, 8, 0, 1),
        OpTimes(8, 9),
        OpTimes(9, 20),
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
