import itertools
import math
import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.drawing.charts import (
    MAX_POINTS,
    Mark,
    Series,
    line_chart,
    log_ticks,
    nice_ticks,
    thin,
    tick_text,
)


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9), st.integers(2, 12))
def test_ticks_are_round_and_cover(low, span, count):
    high = low + span
    if not high > low or span < abs(low) * 1e-9:
        return
    ticks = nice_ticks(low, high, count)
    slack = 1e-6 * (ticks[-1] - ticks[0])
    assert ticks[0] <= low + slack
    assert ticks[-1] >= high - slack
    assert 2 <= len(ticks) <= count + 2
    steps = [b - a for a, b in itertools.pairwise(ticks)]
    assert max(steps) == pytest.approx(min(steps), rel=1e-3)


def test_tick_examples():
    assert nice_ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    assert nice_ticks(1.1, 1.9, 5) == [1.0, 1.2, 1.4, 1.6, 1.8, 2.0]
    assert log_ticks(0.5, 200) == [0.1, 1, 10, 100, 1000]
    assert log_ticks(1, 1) == [1, 10]
    texts = [tick_text(v) for v in (0, 0.002, 0.000015, 3, 1234.0, 12500, 3e6, 2.5e9, -0.25)]
    assert texts == ["0", "0.002", "0.000015", "3", "1,234", "12.5k", "3M", "2.5G", "-0.25"]


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=3000))
def test_thinning_keeps_ends_and_extremes(values):
    points = list(enumerate(values))
    kept = thin(points, 50)
    assert len(kept) <= max(50, 4)
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert min(y for _, y in kept) == min(values)
    assert max(y for _, y in kept) == max(values)
    assert [x for x, _ in kept] == sorted({x for x, _ in kept})


def parse(picture):
    return ET.fromstring(picture.figure())


def path_points(root):
    return [
        [tuple(map(float, p.split())) for p in path.get("d")[1:].split("L")]
        for path in root.iter("path")
        if path.get("class") == "line"
    ]


def test_chart_places_values_inside_and_upwards():
    root = parse(line_chart("Loss <b>", [Series("lm loss", [(1, 4.0), (2, 2.0), (3, 1.0)])]))
    (line,) = path_points(root)
    (x0, y0), (x1, y1), (x2, y2) = line
    assert x0 < x1 < x2
    assert y0 < y1 < y2, "a falling loss goes down on the page"
    svg = root.find(".//svg[@role='img']")
    _, _, width, height = map(int, svg.find(".//svg[@viewBox]").get("viewBox").split())
    assert all(0 <= x <= width and 0 <= y <= height for x, y in line)
    texts = [t.text for t in root.iter("text")]
    assert {"1", "2", "3", "4", "iteration"} <= set(texts)
    titles = [t.text for t in svg.iter("title")]
    assert "iteration 2: lm loss 2" in titles
    assert "Loss <b>" in "".join(root.find("figcaption").itertext())


def test_nan_interrupts_the_line_and_is_counted():
    values = [(i, math.nan if i in (5, 6) else 1.0 / i) for i in range(1, 11)]
    root = parse(line_chart("t", [Series("a", values)]))
    assert [len(p) for p in path_points(root)] == [4, 4]
    assert "2 values are not drawable" in "".join(root.itertext())


def test_log_axis_leaves_zeros_out():
    root = parse(line_chart("t", [Series("a", [(1, 0.0), (2, 1.0), (3, 1000.0)])], log_y=True))
    (line,) = path_points(root)
    assert len(line) == 2
    assert "logarithmic" in "".join(root.itertext())


@pytest.mark.parametrize(
    "values", [[], [(1, math.nan)], [(7, 2.0)], [(1, 3.0), (2, 3.0)], [(1, 0.0), (2, 0.0)]]
)
def test_degenerate_series(values):
    root = parse(line_chart("t", [Series("a", values)], from_zero=True))
    drawable = [v for v in values if math.isfinite(v[1])]
    assert (root.find(".//svg[@role='img']") is None) == (not drawable)


def test_marks_and_legend():
    marks = [
        Mark(2, "checkpoint", "at 2 & <ok>"),
        Mark(3, "resume", "resumed"),
        Mark(99, "resume", "outside"),
    ]
    series = [Series("a", [(1, 1.0), (4, 2.0)]), Series("b", [(2, 3.0)], points=True)]
    root = parse(line_chart("t", series, marks=marks))
    titles = [t.text for t in root.iter("title")]
    assert "at 2 & <ok>" in titles
    assert "resumed" in titles
    assert "outside" not in titles
    keys = [s for s in root.iter("span") if "key" in s.get("class")]
    assert ["".join(k.itertext()) for k in keys] == ["a", "b"]
    assert len({swatch.get("fill") for k in keys for swatch in k.find("svg")}) == 2, "a colour each"


def test_size_is_bounded():
    values = [(i, math.sin(i) if i % 7 else math.nan) for i in range(1, 200_000)]
    picture = line_chart("t", [Series("a", values)])
    assert len(picture.figure()) < 100_000
    assert sum(len(re.findall("L", p.get("d"))) for p in parse(picture).iter("path")) <= MAX_POINTS + 10


def test_many_checkpoints_hide_no_resume():
    marks = [Mark(at, "checkpoint", f"checkpoint {at}") for at in range(1, 1000)]
    marks.insert(500, Mark(500, "resume", "resumed", label="resumed: DP 2"))
    root = parse(line_chart("t", [Series("a", [(1, 1.0), (1000, 2.0)])], marks=marks))
    assert "resumed: DP 2" in [text.text for text in root.iter("text")]
    assert sum(path.get("class") == "checkpoint" for path in root.iter("path")) <= 101
