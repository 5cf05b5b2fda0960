import json
import xml.etree.ElementTree as ET

import pytest

from megatron.core.pipeline_parallel.plan.build import build_plan
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import Plan, parse_row
from megatron.core.pipeline_parallel.plan.passes.lower import lower
from megatron.core.pipeline_parallel.plan.placement import Placement
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.plan.simulate import simulate
from tools.schedules.picture import to_svg
from tools.schedules.text import to_text
from tools.schedules.trace import to_trace


@pytest.fixture
def simulation():
    plan = build_plan("1f1b", Request(2, 2))
    costs = CostModel.of_ranks(plan.placement, comm=0.5)
    return simulate(lower(plan, costs), costs)


def test_grid_is_to_scale(simulation):
    lines = to_text(simulation).splitlines()
    assert lines[0].startswith("1f1b: 2 ranks x 1 chunk, 2 microbatches, step time 10, bubble 4 (40.00%)")
    assert lines[1] == "0 |0F0 0F1 ............0BW0--- ....0BW1--- | idle 4, peak 2"
    assert lines[2] == "1 |......1F0 1BW0--- 1F1 1BW1--- ..........| idle 4, peak 1"


def test_svg_is_xml_with_a_box_for_each_computation(simulation):
    root = ET.fromstring(to_svg(simulation))
    titles = [one.text for one in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == 8
    assert "1F0: 1.5 to 2.5" in titles


def test_trace_has_lanes_transfers_and_memory(simulation):
    events = json.loads(to_trace(simulation))["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert sum(event["tid"] == 0 for event in slices) == 8
    assert sum(event["tid"] == 1 for event in slices) == sum(event["tid"] == 2 for event in slices) == 4
    assert {event["dur"] for event in slices if event["tid"] in (1, 2)} == {500}
    first = next(event for event in slices if event["name"].startswith("1RECV_F0"))
    assert first["ts"] == 1000
    counters = [event["args"]["microbatches"] for event in events if event["ph"] == "C" and event["pid"] == 0]
    assert max(counters) == 2
    assert counters[-1] == 0


@pytest.mark.parametrize("pair", ["(0F1;0BW0)", "(0F1;0RESHARD;0BW0)"])
def test_overlapped_pairs_are_drawn_one_after_the_other(pair):
    plan = Plan("x", Placement("linear", 1), 2, (parse_row(f"0F0 {pair} 0BW1".split()),))
    simulation = simulate(plan, CostModel.of_ranks(plan.placement))
    titles = [one.text for one in ET.fromstring(to_svg(simulation)).iter("{http://www.w3.org/2000/svg}title")]
    assert titles == ["0F0: 0 to 1", "0F1: 1 to 2", "0BW0: 2 to 4", "0BW1: 4 to 6"]


def test_nothing_takes_time():
    plan = build_plan("gpipe", Request(2, 1))
    costs = CostModel.of_ranks(plan.placement, time_f=[0], time_b=[0], time_w=[0])
    simulation = simulate(plan, costs)
    assert "0 || idle 0" in to_text(simulation)
    ET.fromstring(to_svg(simulation))
