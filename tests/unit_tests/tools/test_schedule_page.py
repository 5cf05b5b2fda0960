"""The page of a comparison, and the small picture."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.held.lane_clock import Lanes
from megatron.core.pipeline_parallel.plan.ir import Kind
from megatron.core.pipeline_parallel.plan.passes.add_residency import add_residency
from megatron.core.pipeline_parallel.plan.placement import Placement
from megatron.core.pipeline_parallel.plan.residency import LaneCosts
from tests.harness import unit_stages
from tests.harness.measured_runs import lowered, simulate
from tools import schedule_page as page
from tools.schedule_page import Entry, to_html

SVG = "{http://www.w3.org/2000/svg}"


def simulation(name, ranks=2, microbatches=3, comm=0.0):
    plan = lowered(name, ranks, microbatches)
    return simulate(plan, CostModel.of_ranks(plan.placement, comm=comm))


def svgs(page):
    return [ET.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def test_all_are_on_one_axis_and_limits_are_drawn():
    slow, fast = simulation("gpipe"), simulation("zb-1p")
    page = to_html("a <page>", [Entry("gpipe", slow), Entry("zb-1p", fast)], (2, 1), notes=["because > all"])
    assert "<h1>a &lt;page&gt;</h1>" in page
    assert "because &gt; all" in page
    drawn = svgs(page)
    assert len(drawn) == 2
    grounds = [
        max(float(one.get("width")) for one in timeline.iter(f"{SVG}rect") if one.get("fill") == "#eee")
        for timeline in drawn
    ]
    assert grounds[1] / grounds[0] == pytest.approx(fast.makespan / slow.makespan, rel=1e-3)
    assert len(list(drawn[0].iter(f"{SVG}title"))) == 12  # a tooltip a computation
    said = [text.text for text in drawn[0].iter(f"{SVG}text")]
    assert [one for one in said if one.startswith(("limit", "peak"))] == [
        "limit 2",
        "peak 3 !",
        "limit 1",
        "peak 3 !",
    ]
    assert "activations" in said
    assert "gathered weights" not in said
    dashed = [[path for path in one.iter(f"{SVG}path") if path.get("stroke-dasharray")] for one in drawn]
    heights = [[float(re.search(r" ([\d.]+)H", path.get("d"))[1]) for path in paths] for paths in dashed]
    assert heights[0] == heights[1]  # one axis of memory
    assert len(heights[0]) == 2


@pytest.mark.parametrize("most_boxes", [6000, 1])
def test_gathers_and_what_is_held_lie_below_computations(monkeypatch, most_boxes):
    monkeypatch.setattr(page, "MOST_BOXES", most_boxes)
    plan = lowered("1f1b", 2, 3)
    stages, costs = unit_stages.model(plan.placement, 2), CostModel.of_ranks(plan.placement, activation=[5e9])
    residency = unit_stages.asked("optim_grads_params", "memory", 2).within((16e9, 17e9))
    plan = add_residency(plan, stages, residency, costs)
    found = simulate(plan, costs, Lanes(stages, residency, LaneCosts(bandwidth=30.0)))
    (drawn,) = svgs(to_html("x", [Entry("1f1b", found)]))
    said = [text.text for text in drawn.iter(f"{SVG}text")]
    legend = (
        "gather|reduction|states at rest|activations|gathered weights|whole gradients|gradients under way"
    )
    assert said[said.index("gather") :][:7] == legend.split("|")
    assert [one for one in said if one.startswith(("limit", "peak"))] == [
        "limit 16 GB",
        "peak 10 GB",
        "limit 17 GB",
        "peak 5 GB",
    ]
    gathers = [path.get("d") for path in drawn.iter(f"{SVG}path") if path.get("fill") == "#e08a3c"][1:]
    count = [sum(op[0] == Kind.UNSHARD for op in row) for row in plan.rows]
    assert [path.count("M") for path in gathers] == count
    assert said[-5:] == [f"{found.makespan * part / 4:.4g}" for part in range(5)] or most_boxes == 1


def test_planned_and_measured_are_lanes_side_by_side_and_problems_are_told():
    planned, measured = simulation("1f1b"), simulation("1f1b", comm=1.0)
    page = to_html("x", [Entry("1f1b", planned, measured=measured), Entry("zbv", None, "no <room>")])
    lanes = [text.text for text in svgs(page)[0].iter(f"{SVG}text")]
    assert [lane for lane in lanes if lane and lane[0] in "01" and lane.endswith("ed")] == [
        "0 planned",
        "0 measured",
        "1 planned",
        "1 measured",
    ]
    assert '<p class="over">no &lt;room&gt;</p>' in page
    assert ">limit" not in page


def test_a_large_comparison_is_drawn_without_tooltips(monkeypatch):
    entries = [Entry("1f1b", simulation("1f1b", 4, 12))]
    with_tooltips = to_html("x", entries)
    monkeypatch.setattr(page, "MOST_BOXES", 50)
    without = to_html("x", entries)
    assert "<title>0F0" in with_tooltips
    assert "<title>0F0" not in without
    assert len(without) < 0.5 * len(with_tooltips)
    assert svgs(without)


def test_nothing_takes_time():
    plan = lowered("gpipe", 2, 1)
    nothing = CostModel.of_ranks(Placement("linear", 2), time_f=[0], time_b=[0], time_w=[0], activation=[0])
    assert svgs(to_html("x", [Entry("gpipe", simulate(plan, nothing))], (0, 0)))
