import json
import xml.etree.ElementTree as ET

import pytest

from megatron.core.pipeline_parallel.plan.build import build_plan
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import Kind, Plan, op_text, parse_row
from megatron.core.pipeline_parallel.plan.measuring.timeline_files import MeasuredStep, OpTimes
from megatron.core.pipeline_parallel.plan.passes.lower import lower
from megatron.core.pipeline_parallel.plan.placement import Placement
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.plan.simulate import simulate
from tools.schedules.overlay import figures_of_ranks, measured_costs, measured_simulation, median_times
from tools.schedules.picture import beside_svg
from tools.schedules.text import overlay_figures, overlay_text
from tools.schedules.trace import overlay_trace


def as_run(plan, costs, *, begin=100.0):
    """Spans of a run that keeps to the simulation, on a clock of its own; computations wait for their inputs."""
    simulation = simulate(plan, costs)
    spans = []
    for rank, row in enumerate(plan.rows):
        free, here = begin, []
        for place in range(len(row)):
            start = begin + simulation.timeline.starts[rank][place]
            end = begin + simulation.timeline.ends[rank][place]
            here.append(OpTimes(free, end, start - free))
            free = end
        spans.append(here)
    return simulation, spans


def figures_of(plan, spans):
    ranks = tuple(range(len(plan.rows)))
    return figures_of_ranks(MeasuredStep(1, ranks, plan, None, tuple(map(tuple, spans)), None))


def medians_of(plan, spans):
    return median_times(figures_of(plan, spans), plan.placement.num_stages)


def lowered(name, request):
    plan = build_plan(name, request)
    return lower(plan, CostModel.of_ranks(plan.placement))


@pytest.mark.parametrize(
    ("name", "request_"),
    [
        ("1f1b", Request(3, 5)),
        ("gpipe", Request(2, 3)),
        ("interleaved", Request(2, 5, 2)),
        ("1f1b", Request(1, 2)),
    ],
)
def test_a_run_that_keeps_to_its_plan_has_the_plans_figures(name, request_):
    plan = lowered(name, request_)
    costs = CostModel.of_ranks(plan.placement, time_f=[2.0], time_b=[1.5], time_w=[0.5])
    simulation, spans = as_run(plan, costs)
    medians = medians_of(plan, spans)
    assert set(medians) == {Kind.F, Kind.BW}
    assert medians[Kind.F] == pytest.approx(costs.f)
    assert medians[Kind.BW] == pytest.approx([2 / plan.placement.num_chunks] * plan.placement.num_stages)
    planned = simulate(plan, measured_costs(figures_of(plan, spans), plan))
    measured = measured_simulation(plan, spans, planned.costs)
    for one in (planned, measured):
        for figure in ("makespan", "cost", "bubble_time", "bubble_rate", "idle", "peak_activation"):
            assert getattr(one, figure) == pytest.approx(getattr(simulation, figure), abs=1e-9), figure


def test_medians_are_by_stage_and_kind():
    plan = Plan("split", Placement("linear", 1), 2, (parse_row("0F0 0B0 0F1 0W0 0BW1".split()),))
    spans = [[OpTimes(0, 1), OpTimes(1, 2, 0.5), OpTimes(2, 5), OpTimes(5, 6), OpTimes(6, 10)]]
    medians = medians_of(plan, spans)
    assert medians == {
        Kind.F: (1,),  # the lower one of two
        Kind.B: (0.5,),
        Kind.W: (1,),
        Kind.BW: (4,),
    }
    costs = measured_costs(figures_of(plan, spans), plan, 0.25)
    assert (costs.f, costs.b, costs.w, costs.comm) == ((1,), (0.5,), (1,), 0.25)


def test_parts_of_a_w_are_one_and_operations_of_data_parallelism_are_no_computation():
    row = parse_row("0UNSHARD 0F0 0UNSHARD 0B0 0W0[1:2] 0W0[0:1] 0REDUCE".split())
    plan = Plan("parts", Placement("linear", 1), 1, (row,))
    times = [
        OpTimes(0, 2, 1),
        OpTimes(1, 3, 0.25, 0.5),
        OpTimes(3, 3.5),
        OpTimes(4, 5),
        OpTimes(5, 7, 0, 1),
        OpTimes(7, 8),
        OpTimes(8, 9),
    ]
    spans = [times]
    medians = medians_of(plan, spans)
    assert medians == {Kind.F: (1.25,), Kind.B: (1,), Kind.W: (2,)}
    simulation = measured_simulation(plan, spans, measured_costs(figures_of(plan, spans), plan))
    assert simulation.makespan == pytest.approx(6.75)
    assert simulation.bubble_time == pytest.approx(6.75 - 4.25)


@pytest.fixture
def both():
    """Planned at the measured medians; the run waited 2 s longer for its first backward."""
    plan = lowered("1f1b", Request(2, 2))
    _, spans = as_run(plan, CostModel.of_ranks(plan.placement))
    late = {"1BW0", "1F1", "1BW1", "0BW0", "0BW1"}
    spans = [
        [
            OpTimes(
                one.start_s + 2 * (text in late and text != "1BW0"),
                one.end_s + 2 * (text in late),
                one.wait_s + 2 * (text == "1BW0"),
            )
            for text, one in zip(map(op_text, row), here, strict=True)
        ]
        for row, here in zip(plan.rows, spans, strict=True)
    ]
    medians = medians_of(plan, spans)
    planned = simulate(plan, measured_costs(figures_of(plan, spans), plan))
    return planned, measured_simulation(plan, spans, planned.costs), medians, spans


def test_text_has_two_grids_to_one_scale(both):
    planned, measured = both[:2]
    lines = overlay_text(planned, measured).splitlines()
    assert lines[0].startswith("planned 1f1b: 2 ranks x 1 chunk, 2 microbatches, step time 9, bubble 3")
    assert lines[3].startswith("measured 1f1b: 2 ranks x 1 chunk, 2 microbatches, step time 11, bubble 5")
    width = {len(line.split("|")[1]) for line in lines[1:3]}, {len(line.split("|")[1]) for line in lines[4:6]}
    assert width == ({36}, {44})
    assert lines[5] == "1 |....1F0 ........1BW0--- 1F1 1BW1--- ........| idle 5, peak 1"


def test_svg_has_two_lanes_a_rank(both):
    root = ET.fromstring(beside_svg(*both[:2]))
    titles = [one.text for one in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == 16
    assert {"1BW0: 2 to 4", "1BW0: 4 to 6"} <= set(titles)
    texts = [one.text for one in root.iter("{http://www.w3.org/2000/svg}text")]
    lanes = ["rank 0 planned", "measured", "rank 1 planned", "measured"]
    assert [text for text in texts if text in lanes] == lanes
    assert [text for text in texts if "step time" in text][1:3] == [
        "planned step time 9 (rank 0)",
        "measured step time 11 (rank 0)",
    ]


def test_trace_has_two_groups_of_processes_in_real_time(both):
    events = json.loads(overlay_trace(*both[:2], both[3]))["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"planned stage 0", "planned stage 1", "measured stage 0", "measured stage 1"}
    slices = {(event["pid"], event["name"]): event for event in events if event["ph"] == "X"}
    assert (slices[1, "1BW0"]["ts"], slices[3, "1BW0"]["ts"]) == (2e6, 4e6)
    assert slices[3, "1BW0"]["dur"] == 2e6
    # planned messages pass between lanes; measured, rank 1 waited for its first input and before its first backward
    assert slices[0, "0SEND_F0@1#0"]["tid"] == slices[2, "0SEND_F0@1#0"]["tid"] == 1
    assert [
        (slices[3, f"wait for {text}"][key] / 1e6) for text in ("1F0", "1BW0") for key in ("ts", "dur")
    ] == (pytest.approx([0, 1, 2, 2]))


def test_figures(both):
    figures = overlay_figures(*both[:3])
    assert figures["planned"]["bubble_rate"] == pytest.approx(3 / 9)
    assert figures["measured"]["bubble_rate"] == pytest.approx(5 / 11)
    assert figures["measured"]["idle"] == pytest.approx([5, 5])
    assert figures["median_time"] == {"F": pytest.approx([1, 1]), "BW": pytest.approx([2, 2])}
    json.dumps(figures, allow_nan=False)
