"""The page of a comparison, and the small picture."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.held.lanes import LaneCosts, Lanes
from megatron.core.pipeline_parallel.plan.ir import Kind
from megatron.core.pipeline_parallel.plan.passes.add_residency import add_residency
from megatron.core.pipeline_parallel.plan.placement import Placement
from tests.harness import unit_stages
from tests.harness.measured_runs import lowered, simulate
from tools.drawing.page import ZOOM
from tools.schedules import page
from tools.schedules.page import Entry, to_html


def simulation(name, ranks=2, microbatches=3, comm=0.0):
    plan = lowered(name, ranks, microbatches)
    return simulate(plan, CostModel.of_ranks(plan.placement, comm=comm))


def svgs(page):
    return list(ET.fromstring(page.removeprefix("<!DOCTYPE html>")).iter("figure"))


def lanes(figure):
    """(colour, left, right) of the boxes in lanes."""
    paths = [path for group in figure.iter("g") if group.get("class") == "bars" for path in group]
    boxes = [(path.get("fill"), re.findall(r"M(\d+) \d+H(\d+)V", path.get("d"))) for path in paths]
    return [(colour, int(left), int(right)) for colour, found in boxes for left, right in found]


def legend(figure):
    return ["".join(key.itertext()) for key in figure.find("figcaption").iter("span")]


def test_all_are_on_one_axis_and_limits_are_drawn():
    slow, fast = simulation("gpipe"), simulation("zb-1p")
    page = to_html("a <page>", [Entry("gpipe", slow), Entry("zb-1p", fast)], (2, 1), notes=["because > all"])
    assert "<h1>a &lt;page&gt;</h1>" in page
    assert "because &gt; all" in page
    drawn = svgs(page)
    assert len(drawn) == 2
    grounds = [max(right for _, _, right in lanes(timeline)) for timeline in drawn]
    assert grounds[1] / grounds[0] == pytest.approx(fast.makespan / slow.makespan, rel=1e-3)
    assert len(list(drawn[0].iter("title"))) == 12  # a tooltip a computation
    said = [text.text for text in drawn[0].iter("text")]
    assert [one for one in said if one.startswith(("limit", "peak"))] == [
        "limit 2",
        "peak 3 !",
        "limit 1",
        "peak 3 !",
    ]
    assert "memory: activations" in legend(drawn[0])
    assert "memory: gathered weights" not in legend(drawn[0])
    dashed = [[path for path in one.iter("path") if path.get("class") == "limit"] for one in drawn]
    heights = [[float(re.search(r" ([\d.]+)H", path.get("d"))[1]) for path in paths] for paths in dashed]
    assert heights[0] == heights[1]  # one axis of memory
    assert len(heights[0]) == 2


@pytest.mark.parametrize("most_boxes", [6000, 1])
def test_gathers_and_what_is_held_lie_below_computations(monkeypatch, most_boxes):
    monkeypatch.setattr(page, "MOST_BOXES", most_boxes)
    plan = lowered("1f1b", 2, 3)
    stages, costs = (
        unit_stages.model(plan.placement, 2),
        CostModel.of_ranks(plan.placement, activation=[5 * 2**30]),
    )
    residency = unit_stages.asked("optim_grads_params", "memory", 2).within((16 * 2**30, 17 * 2**30))
    plan = add_residency(plan, stages, residency, costs)
    found = simulate(plan, costs, Lanes(stages, residency, LaneCosts(bandwidth=30.0)))
    (drawn,) = svgs(to_html("x", [Entry("1f1b", found)]))
    said = [text.text for text in drawn.iter("text")]
    kinds = "states at rest|activations|gathered weights|whole gradients|gradients under way".split("|")
    keys = [
        "wire: gather",
        "wire: reduction",
        "number: microbatch",
        *(f"memory: {kind}" for kind in kinds),
        "memory: in all",
        "memory limit",
    ]
    assert legend(drawn)[-len(keys) :] == keys
    assert [one for one in said if one.startswith(("limit", "peak"))] == [
        "limit 16 GiB",
        "peak 10 GiB",
        "limit 17 GiB",
        "peak 5 GiB",
    ]
    gathers = sum(colour == "#e08a3c" for colour, _, _ in lanes(drawn))
    assert gathers == sum(op[0] == Kind.UNSHARD for row in plan.rows for op in row)
    end = said.index("time: a rank's F takes 1")
    axis = said[end - 5 : end]
    assert max(map(float, axis)) <= found.makespan, "an axis of time"
    assert max(map(float, axis)) > 0.7 * found.makespan


def test_planned_and_measured_are_lanes_side_by_side_and_problems_are_told():
    planned, measured = simulation("1f1b"), simulation("1f1b", comm=1.0)
    page = to_html("x", [Entry("1f1b", planned, measured=measured), Entry("zbv", None, "no <room>")])
    lanes = ["rank 0 planned", "measured", "rank 1 planned", "measured"]
    assert [text.text for text in svgs(page)[0].iter("text") if text.text in lanes] == lanes
    assert '<p class="over">no &lt;room&gt;</p>' in page
    assert ">limit" not in page


def test_a_large_comparison_is_drawn_without_tooltips(monkeypatch):
    entries = [Entry("1f1b", simulation("1f1b", 4, 48))]
    with_tooltips = to_html("x", entries)
    monkeypatch.setattr(page, "MOST_BOXES", 50)
    without = to_html("x", entries)
    assert "<title>0F0" in with_tooltips
    assert "<title>0F0" not in without
    drawn = [len(text) - len(ZOOM) - text.index("<figure") for text in (without, with_tooltips)]
    assert drawn[0] < 0.5 * drawn[1]
    assert svgs(without)


def test_nothing_takes_time():
    plan = lowered("gpipe", 2, 1)
    nothing = CostModel.of_ranks(Placement("linear", 2), time_f=[0], time_b=[0], time_w=[0], activation=[0])
    assert svgs(to_html("x", [Entry("gpipe", simulate(plan, nothing))], (0, 0)))
