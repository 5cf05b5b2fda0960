from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from megatron.core.pipeline_parallel.plan.costs import CostModel
from tests.harness.measured_runs import lowered, simulate
from tools.drawing.page import WIDE
from tools.schedules.picture import COLOURS, several_svg, to_picture

SVG = "{http://www.w3.org/2000/svg}"
BOX = re.compile(r"M(\d+) \d+H(\d+)V\d+H\d+z")


def simulation(name, ranks, microbatches):
    plan = lowered(name, ranks, microbatches)
    return simulate(plan, CostModel.of_ranks(plan.placement))


def boxes_of(root):
    """Colour -> (left, right) of the boxes in lanes."""
    found = {}
    for group in root.iter(f"{SVG}g"):
        for path in group.iter(f"{SVG}path") if group.get("class") == "bars" else ():
            found.setdefault(path.get("fill"), []).extend(
                tuple(map(int, box)) for box in BOX.findall(path.get("d"))
            )
    return found


def numbers_of(root):
    """Texts inside boxes."""
    return [t.text for g in root.iter(f"{SVG}g") if g.get("class") == "in" for t in g]


def test_every_computation_is_a_box_of_its_time():
    made = simulation("zbv", 2, 3)
    root = ET.fromstring(to_picture(made))
    boxes = {colour: found for colour, found in boxes_of(root).items() if colour.startswith("#")}
    # F, B and W, of the first chunk dark and of the second light: 2 ranks x 3 microbatches each
    assert len(boxes) == 6
    assert set(COLOURS[:3]) < set(boxes)
    assert all(len(found) == 6 for found in boxes.values())
    widths = [right - left for found in boxes.values() for left, right in found]
    assert widths == pytest.approx([0.5 / made.makespan * WIDE] * 36, abs=1)
    assert numbers_of(root).count("2") == 2 * 2 * 3
    keys = [text.text for text in root.iter(f"{SVG}text") if re.match(r"\w+: ", text.text)]
    assert [key.split(":")[0] for key in keys if key[0] in "FBW"] == ["F", "B", "W"]


def test_an_axis_can_be_longer_and_numbers_need_room():
    made = simulation("1f1b", 2, 12)
    half = boxes_of(ET.fromstring(to_picture(made, span=2 * made.makespan)))
    assert max(right for found in half.values() for _, right in found) == pytest.approx(WIDE / 2, abs=1)
    crowded = ET.fromstring(to_picture(simulation("1f1b", 2, 120)))
    assert "119" not in numbers_of(crowded)
    texts = [text.text for text in ET.fromstring(to_picture(made)).iter(f"{SVG}text")]
    assert "1f1b, bubble 7.7%" in texts


def test_several_plans_are_on_one_axis_and_bubbles_are_named():
    slow, fast = simulation("1f1b", 4, 8), simulation("zbv", 4, 8)
    root = ET.fromstring(several_svg([slow, fast]))
    rights = [right for found in boxes_of(root).values() for _, right in found]
    assert max(rights) == WIDE
    assert any(abs(right - fast.makespan / slow.makespan * WIDE) <= 1 for right in rights)
    assert "bubble" in numbers_of(root)
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert "1f1b: step time 33, bubble 27.3%, peak activation 4" in texts
    assert (
        "zbv: step time 25.5, bubble 5.9%; with optimizer post-validation step time 24, bubble 0.0%, peak activation 4"
        in texts
    )
