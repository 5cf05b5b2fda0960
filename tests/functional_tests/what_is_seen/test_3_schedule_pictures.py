"""Pictures of schedules: microbatch numbers on two chunks, an axis of time, a full legend, memory as a curve,
how the bubble is counted, the report's style; as SVG and as an HTML page, and README's own picture."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tools import report, show_schedule
from tools.drawing.page import PLOT_STYLE, ZOOM

ROOT = Path(__file__).resolve().parents[3]
TIME = "time: a rank's F takes 1"
ZBV = "--schedule zbv --stages 4 --microbatches 8"
KEYS = [
    *("F: forward", "B: input gradient", "W: weight gradient", "pale grey: not counted"),
    *("number: microbatch", "light: second chunk", "memory: activations"),
]


def drawn(words, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert show_schedule.main(words.split()) == 0
    return capsys.readouterr().out


def without_names(text):
    """An SVG file as an element, its names without the namespace."""
    return ET.fromstring(text.replace(' xmlns="http://www.w3.org/2000/svg"', ""))


@pytest.fixture(params=["svg", "html"])
def picture(request, monkeypatch, capsys, tmp_path):
    """The same plan as a file and as a page: (text, element)."""
    text = drawn(f"{ZBV} --format {request.param}", monkeypatch, capsys, tmp_path)
    if request.param == "svg":
        return text, without_names(text)
    root = ET.fromstring(text.removeprefix("<!DOCTYPE html>"))
    assert root.find(".//h1").text == "4 pipeline ranks, 8 microbatches"
    return text, root


def texts_of(element):
    return [text.text for text in element.iter("text")]


def test_a_picture_is_in_the_one_style_and_asks_for_nothing(picture):
    text, root = picture
    assert PLOT_STYLE in root.find(".//style").text.replace("&gt;", ">")
    assert "prefers-color-scheme: dark" in text
    assert not re.findall(
        r"https?:|@import|url\(|<script|<img",
        text.replace(ZOOM, "").replace("http://www.w3.org/2000/svg", ""),
    )
    assert not [one for one in root.iter() if {"src", "href"} & set(one.attrib)]


def test_both_chunks_have_microbatch_numbers(picture):
    _, root = picture
    inside = [text.text for group in root.iter("g") if group.get("class") == "in" for text in group]
    for microbatch in "01234567":  # F, B and W of two chunks on four ranks
        assert inside.count(microbatch) == 3 * 2 * 4
    fills = {path.get("fill") for group in root.iter("g") if group.get("class") == "bars" for path in group}
    assert len([fill for fill in fills if fill.startswith("#")]) == 6, "F, B and W, dark and light"


def test_it_has_an_axis_of_time_and_a_full_legend(picture):
    _, root = picture
    texts = texts_of(root)
    assert texts[texts.index(TIME) - 6 : texts.index(TIME)] == ["0", "5", "10", "15", "20", "25"]
    legend = root.find(".//figcaption")
    shown = texts if legend is None else ["".join(key.itertext()) for key in legend.iter("span")]
    assert [key for key in shown if key in KEYS] == KEYS
    assert "grey: idle (bubble)" not in shown, "zbv waits for nothing within its step"


def test_every_colour_in_a_lane_has_a_swatch_and_no_other(picture):
    _, root = picture
    drawn = {path.get("fill") for group in root.iter("g") if group.get("class") == "bars" for path in group}
    swatches = {rect.get("fill") for svg in root.iter("svg") for rect in svg.findall("rect")} - {None}
    assert swatches == {*drawn, "#86b1e8"}, "and that of memory"
    assert len(drawn) == 7, "F, B and W of two chunks, and pale grey"


def test_the_step_time_and_the_longer_makespan_are_both_named(picture):
    _, root = picture
    texts = texts_of(root)
    assert {"step time 24 (rank 0)", "makespan 25.5 (all ranks)"} <= set(texts)
    told = "".join(root.itertext())
    assert "step time 24 (longest rank), makespan 25.5 (all ranks), bubble 0 (0.00%)" in told


def test_memory_is_a_curve_below_each_rank(picture):
    _, root = picture
    curves = [path.get("d") for path in root.iter("path") if path.get("class") == "held"]
    assert len(curves) == 4
    assert all(curve.count("V") > 10 for curve in curves), "it rises and falls"
    assert texts_of(root).count("memory") == texts_of(root).count("peak 4") == 4


def test_no_bubble_beside_visible_grey_says_how_it_is_counted(picture):
    _, root = picture
    fills = [path.get("fill") for group in root.iter("g") if group.get("class") == "bars" for path in group]
    assert "var(--outside)" in fills
    assert "var(--idle)" not in fills, "zbv waits for nothing within its step"
    told = " ".join("".join(root.itertext()).split())
    assert "Step time 24, of which the busiest rank computes 24: bubble 0.00%." in told
    assert told.count("the longest that a rank takes from its first start to its last end") == 1
    assert (
        told.count("step time less what the busiest rank computes, as a share of the step time. Pale grey")
        == 1
    )
    assert "is not counted" in told


def test_idle_time_within_the_step_is_grey_and_named(monkeypatch, capsys, tmp_path):
    root = without_names(
        drawn("--schedule 1f1b --stages 4 --microbatches 8 --format svg", monkeypatch, capsys, tmp_path)
    )
    inside = [text for group in root.iter("g") if group.get("class") == "in" for text in group]
    assert {text.get("class") for text in inside if text.text == "bubble"} == {"gap"}


def test_several_on_one_page_and_under_one_another_on_one_axis(monkeypatch, capsys, tmp_path):
    words = "--schedule 1f1b zbv --stages 4 --microbatches 8 --format "
    page = drawn(f"{words}html", monkeypatch, capsys, tmp_path)
    figures = [*ET.fromstring(page.removeprefix("<!DOCTYPE html>")).iter("figure")]
    assert len(figures) == 2
    hints = [hint for figure in figures for hint in figure.find("figcaption").iter("i")]
    assert [hint.get("style").split(":")[0] for hint in hints] == ["--needs"] * 2, "shown where it scrolls"
    assert page.count("Bubble is the step time less") == 1, "once a page"
    assert "remark" not in page, "nothing is to be remarked"
    assert texts_of(figures[1])[-1] == texts_of(figures[0])[-1] == TIME
    assert texts_of(figures[1])[-2] == texts_of(figures[0])[-2] == "30", "one axis"
    together = drawn(f"{words}svg", monkeypatch, capsys, tmp_path)
    assert "1f1b: step time 33, bubble 27.3%, peak activation 4" in together
    assert (
        "zbv: step time 25.5, bubble 5.9%; with optimizer post-validation step time 24, bubble 0.0%, peak activation 4"
        in together
    )


def test_gathers_reductions_and_limits_are_on_the_page(monkeypatch, capsys, tmp_path):
    words = (
        "--schedule zbv --stages 2 --microbatches 3 --data-parallel-size 2 --num-layers 8 --time-gather 0.1"
    )
    page = drawn(f"{words} --format html", monkeypatch, capsys, tmp_path)
    for key in ("wire: gather", "wire: reduction", "memory: gathered weights", "memory: whole gradients"):
        assert f"{key}<" in page


def test_the_pictures_of_readme_are_those_of_the_tools(monkeypatch, capsys, tmp_path):
    """`docs/img/timeline.svg` by tools/show_schedule.py, `docs/img/loss.svg` by tools/report.py of the losses
    beside it; small, for both themes."""
    made = drawn(
        "--schedule 1f1b zbv --stages 4 --microbatches 8 --format svg", monkeypatch, capsys, tmp_path
    )
    assert (ROOT / "docs/img/timeline.svg").read_text() == made
    title, loss = "make quickstart: loss of a byte-level GPT on 4 CPU ranks", tmp_path / "loss.svg"
    words = [str(ROOT / "docs/img/loss.jsonl"), "--loss-svg", str(loss), "--title", title]
    assert report.main(words) == 0
    assert (ROOT / "docs/img/loss.svg").read_text() == loss.read_text()
    for name in ("timeline", "loss"):
        text = (ROOT / f"docs/img/{name}.svg").read_text()
        ET.fromstring(text)
        assert PLOT_STYLE in text
        assert len(text) < 30_000
