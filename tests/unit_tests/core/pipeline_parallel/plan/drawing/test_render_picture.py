from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.drawing.svg import COLOURS, to_picture
from tests.harness.measured_runs import lowered, simulate

SVG = "{http://www.w3.org/2000/svg}"
BOX = re.compile(r"M([\d.]+) (\d+)h([\d.]+)v16")


def simulation(name, ranks, microbatches):
    plan = lowered(name, ranks, microbatches)
    return simulate(plan, CostModel.of_ranks(plan.placement))


def test_every_computation_is_a_box_of_its_time():
    made = simulation("zbv", 2, 3)
    root = ET.fromstring(to_picture(made))
    scale = (760 - 22) / made.makespan
    boxes = {
        (one.get("fill"), one.get("fill-opacity")): BOX.findall(one.get("d"))
        for one in root.findall(f"{SVG}path")
        if one.get("fill-opacity")
    }
    # F, B and W, of the first chunk dark and of the second light: 2 ranks x 3 microbatches each
    assert set(boxes) == {(colour, shade) for colour in COLOURS[:3] for shade in ("1", "0.75")}
    assert all(len(found) == 6 for found in boxes.values())
    widths = [float(width) for found in boxes.values() for _, _, width in found]
    assert widths == pytest.approx([0.5 * scale - 0.6] * 36, abs=0.06)
    numbers = [text.text for text in root.iter(f"{SVG}text")]
    assert numbers.count("2") == 2 * 2 * 3
    assert [text for text in numbers if text in ("F", "B", "W", "BW")] == ["F", "B", "W"]


def test_an_axis_can_be_longer_and_numbers_need_room():
    made = simulation("1f1b", 2, 12)
    half = ET.fromstring(to_picture(made, span=2 * made.makespan))
    lane = half.find(f"{SVG}path[@fill='#e6e6e6']").get("d")
    assert float(lane.split("h")[1].split("v")[0]) == pytest.approx((760 - 22) / 2, abs=0.1)
    narrow = [text.text for text in ET.fromstring(to_picture(made, width=120)).iter(f"{SVG}text")]
    assert not any(text == "11" for text in narrow)
    assert "1f1b, bubble 7.7%" in narrow
