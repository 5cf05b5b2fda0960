"""Number 14: a page has a contents list, charts that zoom by a script it can do without, long notes folded, numbers
that fit their operations; a terminal shows the learning rate, and colours where they are wanted."""

import json
import math
import re
import subprocess
import xml.etree.ElementTree as ET

import pytest

from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.placement import Placement
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.training.guard.colours import painted
from tests.harness import launch
from tests.harness.node import node
from tests.harness.screen import log_of, on_terminal, seen
from tools.drawing import charts, lanes, page
from tools.drawing.charts import Series, line_chart
from tools.drawing.page import ZOOM, heading
from tools.schedules.page import Entry, entry_of, to_html

STEPS = [*launch.TINY, "--train-iters", "2", "--log-interval", "1", "--save", "ck", "--save-interval", "2"]


def parsed(text):
    return ET.fromstring(text.removeprefix("<!DOCTYPE html>"))


def test_the_contents_list_leads_to_every_part():
    curve = line_chart("A curve", [Series("loss", [(at, 1 / (at + 1)) for at in range(9)])])
    parts = [
        heading("Loss"),
        curve.figure(),
        heading("Bubbles & memory"),
        page.fold("Settings (3)", "<p>x</p>"),
    ]
    root = parsed(page.page("t", ["<header><h1>t</h1></header>", *parts]))
    links = {link.text: link.get("href") for link in root.find("body/nav")}
    assert links == {"Loss": "#loss", "Bubbles & memory": "#bubbles-memory", "Settings": "#settings"}
    anchors = {one.get("id") for one in root.iter() if one.get("id")}
    assert {link[1:] for link in links.values()} <= anchors
    assert parsed(page.page("t", [heading("one")])).find("body/nav") is None, "one part needs no list"


def test_a_schedule_page_lists_its_schedules():
    costs = CostModel.of_ranks(Placement("linear", 2))
    names = ("gpipe", "1f1b", "zb-h1")
    text = to_html("x", [entry_of(name, Request(2, 4), costs) for name in names] + [Entry("zbv", None, "no")])
    assert [link.text for link in parsed(text).find("body/nav")] == ["Figures", *names, "zbv"]


def test_a_page_shows_all_of_it_without_its_script():
    values = [(at, math.exp(-at)) for at in range(30)]
    picture = line_chart("t", [Series("loss", values)], log_y=True)
    text = page.page("t", [picture.figure()])
    assert text.count("<script") == 1
    without = parsed(text.replace(ZOOM, ""))
    assert len([path for path in without.iter("path") if path.get("class") == "line"]) == 1
    assert not list(without.iter("button")), "no button that does nothing"
    assert "<script" not in page.page("t", [heading("x")]), "nothing to zoom"
    assert "<script" not in picture.svg()
    left, right = map(float, picture.axes["data_x"].split())
    assert (left, right) == (0, 29)
    low, lowest, high, highest, is_log = map(float, picture.axes["data_y"].split())
    assert (low <= values[-1][1], high, lowest > highest, is_log) == (True, 10.0, True, 1)


def test_what_the_script_computes():
    """Ticks, axes and reach of a zoomed chart, by node; the ends of curves as the page draws them."""
    values = [(at, 2.0 if at < 50 else 1.0 + at / 1000) for at in range(101)]
    picture = line_chart("t", [Series("loss", values)])
    path = re.search(r'<path class="line" d="([^"]+)"', picture.plot)[1]
    low, lowest, high, highest, _ = map(float, picture.axes["data_y"].split())
    script = (
        ZOOM.removeprefix("<script>").removesuffix("</script>").rpartition("document.querySelectorAll")[0]
    )
    script += f"""
    const {{valueAt, yOf}} = axisOf({low}, {lowest}, {high}, {highest}, 0), log = axisOf(0.01, 220, 10, 30, 1);
    const [top, bottom] = reachOf([{json.dumps(path)}], 0.5, 1);
    console.log(JSON.stringify([
      [valueAt(bottom), valueAt(top)], yOf(valueAt(100)), log.valueAt(log.yOf(0.37)), log.valueAt(30),
      ticksWithin(0.13, 0.87, 5), ticksWithin(1050, 1100, 6), ticksWithin(3, 3.01, 6).length,
      tickText(0.30000000000000004, 0.1), tickText(12500, 3000), reachOf([], 0, 1),
    ]));"""
    done = subprocess.run([node(), "-e", script], capture_output=True, text=True, check=True)
    reach, back, log, top, ticks, more, many, *texts, none = json.loads(done.stdout)
    assert reach == pytest.approx([1.05, 1.1], abs=0.001), "the second half alone"
    assert (back, log, top) == pytest.approx((100, 0.37, 10))
    assert ticks == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert more == pytest.approx([1050, 1060, 1070, 1080, 1090, 1100])
    assert many >= 4
    assert texts == ["0.3", "12,500"]
    assert none is None


def test_long_notes_are_folded_and_short_ones_are_not():
    points = [Series("a", [(0, 1), (1, 2)])]
    long, short = (line_chart("t", points, note=note).figure() for note in ("Sentence. " * 40, "Short."))
    assert ET.fromstring(long).find("details/summary").text == "What it shows"
    assert ET.fromstring(long).find("details").get("open") is None
    assert ET.fromstring(short).find("p").text == "Short."
    assert "details" not in short


@pytest.mark.parametrize("shortest", [0.2, 0.5, 1.0])
def test_numbers_fit_their_operations_or_are_left_out(shortest):
    boxes = [lanes.Box(at, at + (shortest if at % 2 else 1.0), "#5a96e6", str(number)) for at, number in
             zip(range(60), (*range(8, 14), *range(96, 150)), strict=True)]  # fmt: skip
    made = lanes.lanes("t", [lanes.Lane("rank 0", boxes)], span=60.0, time_name="s")
    shown = {text.text for text in ET.fromstring(f"<svg>{made.plot}</svg>").iter("text")}
    letter = 6.4  # pixels of a digit of DejaVu Sans at 10 pixels, the widest that a page asks for
    for box in boxes:
        room = made.least_width * (box.end - box.start) / 60
        if box.text in shown:
            assert letter * len(box.text) <= room, box
    paths = re.findall(r"<path [^>]*>", made.plot)
    thin = made.least_width * shortest / 60 < 4
    assert any('stroke="none"' in one for one in paths) == thin, "a line would cover a thin operation"


def test_charts_keep_what_zooming_needs():
    """Values in the script's axes are exact, and curves are finer than a pixel."""
    picture = line_chart("t", [Series("a", [(0, 0.0), (1, 1 / 3), (2, 1.0)])])
    y = float(re.search(r"L5000 ([\d.]+)L", picture.plot)[1])
    assert y == pytest.approx(charts.TOP + 190 * (2 / 3), abs=0.01)


@pytest.mark.parametrize(("env", "coloured"), [({"NO_COLOR": ""}, True), ({"NO_COLOR": "1"}, False)])
def test_a_terminal_shows_the_learning_rate_and_colours(tmp_path, monkeypatch, env, coloured):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with on_terminal(STEPS, 100, cwd=tmp_path) as (terminal, ranks):
        assert ranks.wait().statuses == (0,)
    written = terminal.written.decode()
    assert bool(re.search(r"\x1b\[\d+m", written)) == coloured
    steps = [line for line in seen(written) if line.startswith(" step")]
    assert [re.search(r"  lr (0\.\d+) +grad ", line)[1] for line in steps] == ["0.01"] * len(steps)
    assert steps
    assert "\x1b" not in log_of(tmp_path / "ck"), "the log file is for scripts"


def test_a_pipe_has_no_colours(tmp_path):
    run = launch.ok(launch.run_forked(STEPS, cwd=tmp_path))
    assert "\x1b" not in run.output


def test_colours_change_no_letter():
    rows = [
        " step  12,345/100,000  loss 3.2500  lr 0.0001     grad 1.500  12,346 tok/s  2 skipped (1 NaN)\n",
        " > plan: schedule 1f1b\n",
        "WARNING: x\n",
        "  successfully saved checkpoint from iteration 4 to ck\n",
        " ███░░░ 41.3% | 413/1,000\n",
        "[rank 0] error (data, exit status 4): c.idx: wrong\n",
        "a user's own line: loss of time\n",
    ]
    for row in rows:
        assert re.sub(r"\x1b\[\d+m", "", painted(row)) == row
    assert [("\x1b" in painted(row)) for row in rows] == [True] * 6 + [False]
    assert "\x1b[33m2 skipped (1 NaN)\x1b[0m" in painted(rows[0])
