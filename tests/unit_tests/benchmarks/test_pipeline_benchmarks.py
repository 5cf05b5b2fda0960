"""The benchmarks of the pipeline's runtime at toy size: what they plan, that all do the same work, what they say."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import fsdp_pipelines, pipeline_runtime, pipeline_vs_torch
from benchmarks.pipeline_vs_torch import check_same, closed_formula, figures
from benchmarks.sleeping_blocks import Sleeper
from benchmarks.sleeping_stages import interleaved, planned


def test_schedules_in_turn_against_their_plans(tmp_path, capsys):
    """Plans are made for the costs that are given; all steps of all schedules are measured, and none beats its plan."""
    file = tmp_path / "figures.json"
    flags = "--stages 2 --microbatches 4 --time-f 3 --time-b 2 --time-w 1 --time-comm 0.2 --repeat 2"
    names = ["1f1b", "zb-2p", "zbv"]
    status = pipeline_runtime.main(["--schedules", *names, *flags.split(), "--json", str(file)])
    assert status == 0
    printed, result = capsys.readouterr().out, json.loads(file.read_text())
    assert list(result["schedules"]) == names
    for name, one in result["schedules"].items():
        plan = planned(name, 2, 4, time_f=[3.0], time_b=[2.0], time_w=[1.0], comm=0.2)
        assert one["planned_cost_ms"] == pytest.approx(plan.cost)
        assert one["planned_bubble_rate"] == pytest.approx(1 - 4 * 6 / plan.cost)
        assert len(one["measured_costs_ms"]) == 2
        assert one["least_cost_ms"] >= 0.999 * plan.cost
        assert one["difference_points"] == pytest.approx(
            100 * (one["measured_bubble_rate"] - one["planned_bubble_rate"])
        )
        assert f"\n{name}" in printed
    assert result["schedules"]["1f1b"]["planned_cost_ms"] > result["schedules"]["zbv"]["planned_cost_ms"]


@pytest.mark.grid
def test_plans_with_gathers_and_reductions_against_a_slow_wire(tmp_path, capsys):
    """The engine's sums are looked at inside; no step beats its plan, which waits for the wire: 32 KiB of a unit of
    64 KiB take 1.09 ms, and nothing hides the first gather and the last sum."""
    file = tmp_path / "figures.json"
    flags = "--stages 2 --microbatches 4 --time-f 4 --time-b 4 --time-w 2 --repeat 1 --wire-mb-per-s 30"
    words = ["--schedules", "zbv", "gis", "--policies", "memory", "budget", "step", *flags.split()]
    assert pipeline_runtime.main([*words, "--json", str(file)]) == 0
    assert "wire: 0 us a collective, 30 MB/s" in capsys.readouterr().out
    found = json.loads(file.read_text())["schedules"]
    assert list(found) == [f"{name} {policy}" for name in ("zbv", "gis") for policy in words[4:7]]
    for name, one in found.items():
        bare = planned(name.split()[0], 2, 4, time_f=[4.0], time_b=[4.0], time_w=[2.0], comm=0.0)
        assert one["planned_cost_ms"] >= bare.cost + 2 * 32768 / 30e3 - 0.01
        assert one["least_cost_ms"] >= 0.999 * one["planned_cost_ms"]
        assert one["exposed_ms"] >= 2 * 32768 / 30e3 - 0.01
    assert (
        found["zbv memory"]["lane_share"]
        > found["zbv budget"]["lane_share"]
        > found["zbv step"]["lane_share"]
    )


def test_bars_of_sharded_pipelines_are_judged(capsys):
    bars = {"a / b": 0.85, "a / c": 0.9, "a / not there": 0.5}
    (missed,) = fsdp_pipelines.judged("fp32: CPU time", {"a / b": 0.86, "a / c": 0.9}, bars)
    assert missed == "fp32: CPU time of a / b: 0.860, at most 0.85"
    assert capsys.readouterr().out.splitlines() == [
        f"MISSED: {missed}",
        "held: fp32: CPU time of a / c: 0.900, at most 0.9",
    ]


def test_timelines_of_several_schedules_lie_apart(tmp_path):
    flags = "--stages 2 --microbatches 2 --time-f 1 --time-b 1 --time-w 1 --repeat 1".split()
    folder = tmp_path / "timelines"
    assert (
        pipeline_runtime.main(["--schedules", "1f1b", "zb-h1", "1f1b", *flags, "--timeline", str(folder)])
        == 0
    )
    assert sorted(one.name for one in folder.iterdir()) == ["1f1b", "zb-h1"]
    assert all(any(one.iterdir()) for one in folder.iterdir())


def test_what_cannot_be_planned_is_said(capsys):
    assert pipeline_runtime.main(["--schedule", "zigzag", "--stages", "2", "--microbatches", "2"]) == 2
    assert "schedule 'zigzag' is unknown; there are gpipe" in capsys.readouterr().err
    assert pipeline_vs_torch.main(["--ours", "zigzag", "--plain", "--torch", "--ranks", "2"]) == 2
    assert "schedule 'zigzag' is unknown" in capsys.readouterr().err


def test_ours_and_torchs_pipelines_do_the_same_work(tmp_path, capsys):
    """All of torch's schedules, and one of ours for each placement: the gradients of all blocks are compared inside."""
    file = tmp_path / "figures.json"
    flags = "--ranks 2 --blocks 4 --microbatches 4 --time-f 0.5 --time-b 0.5 --time-w 0.5 --repeat 1".split()
    ours = ["1f1b", "interleaved", "zbv"]
    status = pipeline_vs_torch.main(
        [
            "--ours",
            *ours,
            "--plain",
            "zb-2p",
            "--torch",
            *pipeline_vs_torch.TORCH,
            *flags,
            "--json",
            str(file),
        ]
    )
    assert status == 0
    (case,) = json.loads(file.read_text())["cases"]
    names = [f"ours {name}" for name in ours] + ["plain zb-2p"]
    names += [f"torch {name}" for name in pipeline_vs_torch.TORCH]
    assert list(case["contestants"]) == names
    assert case["work_ms"] == 12  # 4 microbatches, 2 of 4 blocks, 3 x 0.5 ms
    planned_ms = {name: one["planned_ms"] for name, one in case["contestants"].items()}
    assert planned_ms["ours 1f1b"] == planned_ms["torch 1F1B"] == planned_ms["torch GPipe"] == 15
    assert planned_ms["ours interleaved"] == planned_ms["torch Interleaved1F1B"] == 13.5
    assert planned_ms["torch ZBVZeroBubble"] is None
    assert planned_ms["ours zbv"] <= 13.5
    assert all(one["cpu_ms"] > 0 and one["median_ms"] > 0 for one in case["contestants"].values())
    for name, one in case["contestants"].items():  # a plan's own time has the latency that it was made for
        assert (
            one["simulated_ms"] is None
            if name.startswith("torch")
            else one["simulated_ms"] > planned_ms[name]
        )
    printed = capsys.readouterr().out
    assert "best: ours " in printed
    assert all(f"\n{name} " in printed for name in names)


def test_another_gradient_stops_the_comparison():
    same = {"block0": torch.ones(2)}
    check_same([{"ours a": same, "plain a": None, "torch b": same}])
    check_same([{"ours a": same, "torch b": {}}, {"ours a": {}, "torch b": same}])
    for other in ({"block0": torch.full((2,), 1.01)}, {"block1": torch.ones(2)}, {}):
        with pytest.raises(SystemExit, match="gradients of torch b differ from those of ours a"):
            check_same([{"ours a": same, "torch b": other}])


def test_a_steps_time_is_the_pipelines():
    """From the first start on any rank to the last end, over all that was planned."""
    rank0 = [pipeline_vs_torch.Step(1.0, 1.5, 0.1, 0.0), pipeline_vs_torch.Step(5.0, 5.4, 0.1, 0.002)]
    rank1 = [pipeline_vs_torch.Step(1.1, 1.6, 0.2, 0.01), pipeline_vs_torch.Step(4.9, 5.3, 0.2, 0.0)]
    result = figures([rank0, rank1], planned_ms=500.0, work_ms=440.0)
    assert result["steps_ms"] == pytest.approx([600, 500])
    assert result["median_ms"] == pytest.approx(550)
    assert result["least_ms"] == pytest.approx(500)
    assert result["over_planned"] == pytest.approx(0.1)
    assert result["over_work"] == pytest.approx(0.25)
    assert result["slept_over_ms"] == pytest.approx(6)
    assert result["cpu_ms"] == pytest.approx(300)


def test_closed_formulas_are_those_of_the_facts():
    work = {2: 960.0, 4: 480.0}
    told = {"GPipe": (1080, 660), "1F1B": (1080, 660), "Interleaved1F1B": (1020, 570)}
    for name, (two, four) in told.items():
        assert closed_formula(name, 2, 8, work[2]) == two
        assert closed_formula(name, 4, 8, work[4]) == four
    assert closed_formula("ZBVZeroBubble", 2, 8, 960.0) is None


def test_everybody_begins_a_round_in_turn():
    assert interleaved("abc", 4) == [list("abc"), list("bca"), list("cab"), list("abc")]


def test_a_sleeper_sleeps_less_by_how_late_it_wakes(monkeypatch):
    now, asked = [10.0], []

    def sleep(seconds):
        asked.append(seconds)
        now[0] += seconds + 0.5

    monkeypatch.setattr("time.sleep", sleep)
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    sleeper = Sleeper()
    sleeper.calibrate(2.0, 3)
    assert sleeper.late_s == pytest.approx(0.5)
    sleeper.fill(now[0] - 1.0, 3.0)  # a second of it has gone already
    assert asked == pytest.approx([2.0] * 3 + [1.5])
    assert sleeper.slept_over_s == pytest.approx(0.0)
    sleeper.fill(now[0] - 3.0, 3.0)
    assert asked[-1] == 0
    assert sleeper.slept_over_s == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--ours", "--plain", "--torch"], "name a schedule"),
        (["--blocks", "6"], "a multiple of twice every number of --ranks"),
        (["--ranks", "1"], "at least 2"),
        (["--time-f", "-1"], "times are finite and at least 0"),
    ],
)
def test_flags_that_cannot_be(flags, told, capsys):
    with pytest.raises(SystemExit):
        pipeline_vs_torch.parse(flags)
    assert told in capsys.readouterr().err
