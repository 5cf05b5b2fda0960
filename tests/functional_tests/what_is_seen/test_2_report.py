"""The report: charts by subject, the bubble in a chart of its own; timeline and memory; totals; each resume and layout
change labelled; smoothed loss; two runs compared. One page, light and dark, that asks nobody for anything."""

import json
import math
import random
import re
import xml.etree.ElementTree as ET

import pytest

from tools import report
from tools.drawing.page import ZOOM

SVG = "{http://www.w3.org/2000/svg}"
MODEL = {
    "seq_length": 128,
    "micro_batch_size": 1,
    "global_batch_size": 8,
    "log_interval": 10,
    "data_parallel_sharding_strategy": "no_shard",
    "context_parallel_size": 1,
}


def start(at, parameters, *, tp=1, pp=1, world=2, **more):
    sizes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
    config = {**MODEL, **sizes, "pipeline_schedule": "zbv" if pp > 1 else "1f1b", **more}
    event = {"event": "start", "iteration": at, "time": 1000.0 + at, "world_size": world}
    return {**event, "parameters": parameters, "config": config}


def steps(first, last, *, slope=1.0):
    noise = random.Random(first)
    for at in range(first, last + 1):
        numbers = {
            "lm loss": 2 + 4 * math.exp(-slope * at / 30) + noise.uniform(-0.3, 0.3),
            "grad-norm": 1 + noise.random(),
            "learning-rate": 1e-3,
            "iteration-time": 0.5,
            "tokens-per-second": 2048.0,
            "throughput": 0.01,
            "loss-scale": 1.0,
            "mem-allocated-bytes": 5e7,
            "planned-bubble": 0.02,
            "measured-bubble": 0.05,
        }
        yield {"iteration": at, "consumed_samples": 8 * at, "time": 1000.0 + at, **numbers}


def write(folder, records):
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run under three layouts, and one that learns faster on one rank."""
    folder = tmp_path_factory.mktemp("runs")
    checkpoint = {"event": "checkpoint", "iteration": 40, "time": 1041.0, "path": "a/iter_0000040"}
    first = [start(0, 213_568, pp=2), *steps(1, 40), checkpoint]
    second = [start(40, 213_568), *steps(41, 80), start(80, 213_568, tp=2), *steps(81, 100)]
    held_out = {"iteration": 100, "consumed_samples": 800, "time": 1101.0, "lm loss validation": 2.1}
    one = write(folder / "one", [*first, *second, held_out])
    return one, write(folder / "two", [start(0, 213_568, world=1, lr=0.004), *steps(1, 60, slope=2)])


def page_of(*words):
    """The text of a page, and the page read as XML: every element is closed."""
    out = words[0] / "page.html"
    assert report.main([*map(str, words), "--out", str(out)]) == 0
    text = out.read_text()
    return text, ET.fromstring(text.removeprefix("<!DOCTYPE html>"))


def charts_of(root):
    return {figure.find("figcaption/b").text: figure for figure in root.iter("figure")}


def keys_of(figure):
    return ["".join(key.itertext()) for key in figure.find("figcaption").iter("span")]


@pytest.fixture(scope="module")
def page(runs):
    return page_of(runs[0])


def test_a_page_is_for_light_and_dark_and_any_width_and_asks_for_nothing(page):
    text, root = page
    assert "prefers-color-scheme: dark" in text
    assert 'content="width=device-width' in text
    assert "@media (max-width: 600px)" in text
    assert text.count(ZOOM) == 1, "the script that it can do without"
    assert not re.findall(r"https?:|@import|url\(|<script|<link|<img|<iframe", text.replace(ZOOM, ""))
    assert not re.findall(r"https?:|import|fetch|XMLHttp|url\(|src|eval", ZOOM)
    asked = [one.get(name) for one in root.iter() for name in ("src", "href", "action") if one.get(name)]
    assert all(one.startswith("#") for one in asked), "its own parts"
    for svg in root.iter("svg"):  # a plot is as wide as there is room, and its letters are not scaled
        assert not svg.get("viewBox") or not list(svg.iter("text"))


def test_charts_are_by_subject_and_the_bubble_has_its_own(page):
    _, root = page
    charts = charts_of(root)
    assert [heading.text for heading in root.iter("h2")] == [
        *("Loss", "Optimization", "Throughput", "Pipeline", "Memory"),
    ]
    assert [*charts] == [
        *(
            "Loss",
            "Gradient norm",
            "Learning rate",
            "Tokens/s of all ranks",
            "Seconds per iteration",
            "Model GFLOP/s of a rank",
        ),
        *("Bubble, % of a step", "The step as planned, at equal times of F, B and W"),
        "The last rank's process, with all that it holds, MiB",
    ]
    assert keys_of(charts["Gradient norm"]) == [], "its title says it"
    assert keys_of(charts["Bubble, % of a step"]) == ["bubble, measured", "broad and pale: planned"]
    assert "waits for late messages" in charts["Bubble, % of a step"].find("details/p").text
    titles = [title.text for title in charts["Bubble, % of a step"].iter("title")]
    assert {"iteration 7: bubble, measured 5", "iteration 7: bubble, planned 2"} <= {*titles}
    assert not any("bubble" in key for key in keys_of(charts["Loss"]))
    assert "bubble" not in "".join(charts["Loss"].itertext())


def test_all_charts_of_a_run_are_over_the_same_iterations(tmp_path):
    records = [*steps(1, 20), {"iteration": 15, "world-size": 2.0}, {"iteration": 16, "world-size": 4.0}]
    charts = charts_of(page_of(write(tmp_path / "run", records))[1])
    line = next(path for path in charts["Ranks"].iter("path") if path.get("class") == "line")
    first, last = (float(point.split()[0]) for point in line.get("d")[1:].split("L"))
    assert first == pytest.approx(10_000 * 14 / 19, abs=1)
    assert last == pytest.approx(10_000 * 15 / 19, abs=1)


def test_the_smoothed_loss_is_beside_the_raw(page):
    loss = charts_of(page[1])["Loss"]
    assert keys_of(loss) == [
        *("training loss", "training loss, smoothed", "validation loss"),
        *("dashes: resumed", "triangles: checkpoints"),
    ]
    lines = {group.get("class"): group for group in loss.iter("g")}
    raw, smooth = (next(lines[name].iter("path")).get("d") for name in ("p0", "s0"))

    def wiggle(path):
        heights = [float(point.split()[1]) for point in path[1:].split("L")]
        return sum(abs(a + c - 2 * b) for a, b, c in zip(heights, heights[1:], heights[2:], strict=False))

    assert wiggle(smooth) < 0.3 * wiggle(raw)


def test_each_resume_and_layout_change_is_labelled_on_the_charts(page):
    charts = charts_of(page[1])
    for name in ("Loss", "Gradient norm", "Tokens/s of all ranks"):
        texts = [text.text for text in charts[name].iter("text")]
        assert {"resumed: DP 2", "resumed: TP 2"} <= {*texts}
        stories = [title.text for title in charts[name].iter("title")]
        assert "resumed after iteration 40: layout PP 2, zbv -> DP 2" in stories
        assert "resumed after iteration 80: layout DP 2 -> TP 2" in stories
        assert "checkpoint at iteration 40: a/iter_0000040" in stories
    text = page[0]
    assert "changed pipeline_model_parallel_size: 2 -&gt; 1, pipeline_schedule: zbv -&gt; 1f1b" in text


def test_totals(page):
    tiles = {
        tile[0].text: (tile[1].text, tile[2].text) for tile in page[1].find(".//section[@class='tiles']")
    }
    assert tiles["parameters"] == ("213.6k", "213,568")
    assert tiles["tokens"] == ("102.4k", "800 samples")
    assert tiles["iterations"] == ("100", None)
    assert tiles["ranks"] == ("2", "PP 2, zbv -> DP 2 -> TP 2")
    assert tiles["wall time"] == ("0:01:41", "in steps 0:00:50, 3 starts")


def test_the_pipelines_timeline_and_memory(page):
    """Of the newest start with a pipeline: its plan, where the run has left no timeline."""
    plan = charts_of(page[1])["The step as planned, at equal times of F, B and W"]
    texts = [text.text for text in plan.iter("text")]
    assert texts.count("memory") == 2
    assert {"7", "peak 2", "time: a rank's F takes 1"} <= {*texts}
    assert "light: second chunk" in keys_of(plan)
    for told in ("bubble 0 (0.00%)", "before a rank's first start and after its last end, is not counted"):
        assert told in plan.find("details/p").text


@pytest.mark.parametrize("setting", [{"rank_memory_limit": 2**30}, {"rampup_batch_size": [4, 4, 100]}])
def test_no_other_plan_than_the_runs_is_drawn(tmp_path, setting):
    """What the schedule's name alone does not say is in --timeline only."""
    run = write(tmp_path / "limited", [start(0, 213_568, pp=2, **setting), *steps(1, 5)])
    text, _ = page_of(run)
    assert "The step as planned" not in text


def test_events_are_told_in_short_numbers_and_beginnings_of_digests(tmp_path):
    plan = {"hash": "ab" * 32, "f_ms": [5.786685, 4.0], "kept": None, "planned_bubble": 0.07136348783227384}
    event = {"event": "plan", "iteration": 4, "time": 1004.0, **plan}
    text, _ = page_of(write(tmp_path / "planned", [start(0, 213_568, pp=2), *steps(1, 5), event]))
    assert "hash: abababababab, f ms: 5.787, 4, planned bubble: 0.07136" in text
    assert "ab" * 32 not in text


def test_a_new_plan_is_marked_and_one_that_stays_is_not(tmp_path):
    plans = [
        {"event": "plan", "iteration": at, "time": 1000.0, "schedule": "zbv", "kept": kept}
        for at, kept in ((2, "a new one would take as long"), (4, None))
    ]
    run = write(tmp_path / "run", [start(0, 213_568, pp=2), *steps(1, 5), *plans])
    charts = charts_of(page_of(run)[1])
    assert "dashes and dots: new plan by measured costs" in keys_of(charts["Loss"])
    for name in ("Loss", "Bubble, % of a step"):
        lines = [line for line in charts[name].iter("line") if line.get("class") == "plan"]
        assert [line[0].text for line in lines] == [
            "zbv solved again after iteration 4 by measured costs: a new plan"
        ]
        assert [text.text for text in charts[name].iter("text")].count("new plan") == 1


@pytest.mark.parametrize(
    ("size", "rate", "units"),
    [
        (300 * 2**20, 0.02, ("MiB", "GFLOP/s", 300, 20)),
        (70 * 2**30, 400.0, ("GiB", "TFLOP/s", 70, 400)),
    ],
)
def test_one_unit_for_all_sizes_of_a_page_chosen_by_the_largest(tmp_path, size, rate, units):
    size_name, rate_name, most, speed = units
    numbers = {"mem-allocated-bytes": size, "planned-held-bytes": 2e6, "measured-held-bytes": 2e6}
    numbers |= {"planned-moved-bytes": 5e6, "throughput": rate}
    records = [{"iteration": at, "lm loss": 2.0, **numbers} for at in (1, 2)]
    charts = charts_of(page_of(write(tmp_path / "run", records))[1])
    sizes = [name for name in charts if name.endswith(f", {size_name}")]
    assert len(sizes) == 3
    assert not {"KiB", "MiB", "GiB"} - {size_name} & {name.split(", ")[-1] for name in charts}
    stories = {title.text for chart in charts.values() for title in chart.iter("title")}
    assert f"iteration 1: in use (CPU: heap) {most}" in stories
    assert f"iteration 1: model FLOP/s {speed}" in stories
    assert f"Model {rate_name} of a rank" in charts


def test_curves_have_plain_names_and_a_table_says_which_metric_each_is(page):
    text, root = page
    assert not re.search("lm loss|grad-norm|measured-bubble", text.split("Names of the curves")[0])
    names = {row[0].text: row[1].text for row in [*root.iter("table")][-1]}
    assert names["validation loss"] == "lm loss validation"
    assert names["bubble, measured"] == "measured-bubble"
    assert set(names.values()) == {*next(steps(1, 1)), "lm loss validation"} - {
        *("iteration", "consumed_samples", "time"),
    }


def test_of_many_timers_the_longest_are_drawn_and_the_others_named(tmp_path):
    timers = {f"phase-{number}-time": float(number) for number in range(8)}
    records = [{"iteration": at, "lm loss": 2.0, **timers} for at in (1, 2)]
    chart = charts_of(page_of(write(tmp_path / "run", records))[1])["Timers: seconds per iteration"]
    assert keys_of(chart) == [f"phase {number}" for number in range(2, 8)]
    assert chart.find("p").text == "Left out, as they are smaller: phase 1, phase 0."


def test_two_runs_compared(runs):
    text, root = page_of(*runs)
    charts = charts_of(root)
    assert keys_of(charts["Loss"])[:2] == ["one: training loss", "one: training loss, smoothed"]
    assert keys_of(charts["Gradient norm"]) == ["one", "two"]
    fills = [swatch.get("fill") for swatch in charts["Gradient norm"].find("figcaption").iter("rect")]
    assert fills == ["var(--s0)", "var(--s1)"], "a colour a run"
    assert {"Smoothed loss over millions of tokens", "Smoothed loss over minutes of steps"} <= set(charts)
    body = [*root.find("body")]
    assert body.pop(1).tag == "nav"
    assert [one[0].text for one in body[1:3]] == ["Settings that differ (3)", "Results side by side"]
    assert body[3].get("class") == "charts", "what differs comes first"
    rows = {row[0].text: [cell.text for cell in row[1:]] for part in body[1:3] for row in part.iter("tr")}
    for title in ("Loss", "Gradient norm", "Smoothed loss over millions of tokens"):
        texts = {text.text for text in charts[title].iter("text")}
        assert {"one: resumed: DP 2", "one: resumed: TP 2"} <= texts
        assert not any("checkpoint" in story.text for story in charts[title].iter("title"))
    assert rows["layout"] == ["PP 2, zbv -> DP 2 -> TP 2", "1 rank"]
    told = [cell.split(" · ")[1] for cell in rows["final training loss"]]
    assert [one.split(";")[0] for one in told] == [
        "mean of iterations 91 to 100",
        "mean of iterations 51 to 60",
    ]
    assert len(rows["training loss at iteration 60"]) == 2
    strokes = {line.get("class") for line in charts["Gradient norm"].iter("line")}
    assert "resume s0" in strokes, "in the colour of its run"
    assert rows["tokens"] == ["102.4k · 800 samples", "61.44k · 480 samples"]
    assert rows["lr"] == ["not set", "0.004"]
    assert rows["tensor_model_parallel_size"] == ["2", "1"]
    assert "seq_length" not in rows, "the same in both"
    assert not re.findall(r"https?:|<script", text.replace(ZOOM, ""))


def test_compared_kinds_have_a_chart_each_and_those_of_one_run_say_so(tmp_path):
    def run(name, **numbers):
        numbers |= {
            f"{stage}-{kind}-share": 0.1 for stage in ("planned", "measured") for kind in ("lane", "exposed")
        }
        records = [{"iteration": at, "lm loss": 2.0, **numbers} for at in (1, 2)]
        return write(tmp_path / name, records)

    root = page_of(run("one", **{"first-time": 1.0, "second-time": 2.0}), run("two"))[1]
    charts = charts_of(root)
    wire = "Wire to data parallel ranks, % of a step"
    assert {f"{wire}: wire busy", f"{wire}: computing waits for it"} <= {*charts}
    assert keys_of(charts[f"{wire}: wire busy"]) == [
        "one, measured",
        "two, measured",
        "broad and pale: planned",
    ]
    assert keys_of(charts["Timers: seconds per iteration (one only)"]) == ["first", "second"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("one", "one"), "a run is given twice"),
        (("one", "two", "--timeline", "x"), "are of one run"),
        (("one", "two", "--loss-svg", "x.svg"), "are of one run"),
        (("one", "missing"), "does not exist"),
        (("one", "--loss-svg", "x.svg", "--out", "y.html"), "--loss-svg with --out"),
    ],
)
def test_what_cannot_be_compared_is_refused(runs, words, told, capsys, monkeypatch):
    monkeypatch.chdir(runs[0].parent)
    assert report.main([*words]) == 2
    assert told in capsys.readouterr().err


def test_the_loss_alone_is_a_picture_for_documents(runs, tmp_path):
    out = tmp_path / "loss.svg"
    assert report.main([str(runs[0]), "--loss-svg", str(out), "--title", "Loss of <one>"]) == 0
    text = out.read_text()
    texts = [one.text for one in ET.fromstring(text).iter(f"{SVG}text")]
    assert {"Loss of <one>", "training loss, smoothed", "iteration", "resumed: DP 2"} <= {*texts}
    assert "prefers-color-scheme: dark" in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert len(text) < 20_000


def test_measured_beside_planned_by_kind(tmp_path):
    """The last event counts; a kind of one side alone has a dash; what is no size is passed over."""
    told = {"event": "memory", "iteration": 2, "time": 1003.0, "rank": 1}
    sizes = {"planned": {"weights": 2**20, "messages": 2**18, "odd": "x"}, "measured": {"weights": 2**19}}
    records = [start(0, 10), *steps(1, 2), {**told, "planned": {"weights": 1}, "measured": {}}, told | sizes]
    _, root = page_of(write(tmp_path / "run", records))
    title = "Pipeline rank 1, the fullest, by kind: planned / measured"
    figure = charts_of(root)[title]
    drawn = figure.find("div")
    words = [one.text for one in drawn.iter("text")]
    assert words == ["weights", "messages", "1 MiB / 512 KiB", "256 KiB / -"]
    widths = [one.get("width") for one in drawn.iter("rect")]
    assert widths == ["72.00%", "36.00%", "18.00%", "0.00%"]
    assert title not in charts_of(page_of(write(tmp_path / "without", [start(0, 10), *steps(1, 2)]))[1])
