"""What is said of a measured pipeline."""

import dataclasses

from megatron.core.pipeline_parallel.plan.measuring.replan import Bubbles, MeasuredPlan


def test_bubbles():
    bubbles = Bubbles(7, 0.0769, 0.1)
    assert bubbles.lines() == [" pipeline bubble of iteration 7: planned 7.69%, measured 10.00%"]
    assert bubbles.scalars() == {"planned-bubble": 0.0769, "measured-bubble": 0.1}


def test_a_schedule_solved_again():
    plan = MeasuredPlan(
        iteration=109,
        first_iteration=100,
        solved=True,
        schedule="zb-1p",
        hash="0123456789abcdef",
        f_ms=(2.0, 1.5),
        b_ms=(1.0, 1.0001),
        w_ms=(0.25, 0.5),
        comm_ms=0.125,
        activation_bytes=(1, 2),
        peak_bytes_per_rank=(3, 4),
        planned_bubble_before=0.25,
        planned_bubble=0.125,
        kept=None,
        path="out/pipeline-plan.json",
    )
    begin = (
        " > pipeline solved again after iteration 109 (iterations 100-109): F 1.5-2, B 1, "
        "W 0.25-0.5 ms a stage, a transfer 0.125 ms; planned bubble 25.00%"
    )
    line = MeasuredPlan.line
    assert line(plan) == f"{begin} -> 12.50%, zb-1p 0123456789ab, saved as out/pipeline-plan.json"
    assert line(dataclasses.replace(plan, path=None)).endswith(
        "zb-1p 0123456789ab, not saved: that takes --save"
    )
    assert plan.in_short() == " > pipeline: bubble 25.0% by costs measured in steps 100-109; new plan: 12.5%"
    kept = dataclasses.replace(plan, kept="a new one would take as long")
    assert kept.in_short() == " > pipeline: bubble 25.0% by costs measured in steps 100-109; plan stays"
    assert line(kept) == f"{begin}; zb-1p 0123456789ab stays: a new one would take as long"
    fixed = dataclasses.replace(plan, schedule="gpipe", solved=False, kept="gpipe is a fixed order")
    assert line(fixed).startswith(" > pipeline measured after iteration 109 (iterations 100-109): F ")
