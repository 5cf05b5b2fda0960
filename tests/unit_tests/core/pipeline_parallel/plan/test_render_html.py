"""The page of a comparison, and the small picture."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from megatron.core.pipeline_parallel.plan import render_html
from megatron.core.pipeline_parallel.plan.compare import Entry
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.placement import Placement
from megatron.core.pipeline_parallel.plan.render_html import to_html
from tests.harness.measured_runs import lowered, simulate

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
    assert len(drawn) == 4  # a timeline and a memory chart each
    boxes = [float(timeline.findall(f"{SVG}rect")[-1].get("width")) for timeline in drawn[::2]]
    grounds = [
        max(float(one.get("width")) for one in timeline.iter(f"{SVG}rect") if one.get("fill") == "#eee")
        for timeline in drawn[::2]
    ]
    assert grounds[1] / grounds[0] == pytest.approx(fast.makespan / slow.makespan, rel=1e-3)
    assert boxes
    assert len(list(drawn[0].iter(f"{SVG}title"))) == 12  # a tooltip a computation
    memory = drawn[1]
    assert [bar.get("fill") for bar in memory.findall(f"{SVG}rect")] == ["#c0392b"] * 2
    assert [text.text for text in memory.findall(f"{SVG}text")] == ["0", "3 of 2", "1", "3 of 1"]
    assert len(memory.findall(f"{SVG}path")) == 2


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
    assert "the limit" not in page


def test_a_large_comparison_is_drawn_without_tooltips(monkeypatch):
    entries = [Entry("1f1b", simulation("1f1b", 4, 12))]
    with_tooltips = to_html("x", entries)
    monkeypatch.setattr(render_html, "_MOST_BOXES", 50)
    without = to_html("x", entries)
    assert "<title>0F0" in with_tooltips
    assert "<title>0F0" not in without
    assert len(without) < 0.5 * len(with_tooltips)
    assert svgs(without)


def test_nothing_takes_time():
    plan = lowered("gpipe", 2, 1)
    nothing = CostModel.of_ranks(Placement("linear", 2), time_f=[0], time_b=[0], time_w=[0], activation=[0])
    assert svgs(to_html("x", [Entry("gpipe", simulate(plan, nothing))], (0, 0)))
