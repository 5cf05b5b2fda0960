"""The page: well formed, self-contained, small, and it says what the metrics say."""

import dataclasses
import importlib.util
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.held.lanes import LaneCosts, Lanes
from megatron.core.pipeline_parallel.plan.passes.add_residency import add_residency
from megatron.core.pipeline_parallel.plan.simulate import simulate
from megatron.training.guard.exit_status import ExitRecord, ExitStatus, write_exit_json
from megatron.training.report.metrics_file import MetricsFile
from tests.harness.measured_runs import lowered, write_timeline
from tests.harness.unit_stages import asked, model
from tools.drawing.page import ZOOM
from tools.reports.page import read_run, write_report
from tools.reports.pipeline import measured_step

ROOT = Path(__file__).resolve().parents[3]
VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """Checks nesting, collects text by tag and everything that could cause a request."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.texts, self.requests = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == [], f"not closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.requests += [
            (tag, k, v)
            for k, v in attrs
            if k in ("src", "href", "action", "data", "poster") and not v.startswith("#")
        ]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.texts.append(data)

    @property
    def text(self):
        return " ".join(self.texts)


def write_metrics(folder, iterations=40):
    file = MetricsFile(folder / "metrics.jsonl")
    config = {"num_layers": 4, "lr": 3e-4, "log_interval": 10, "data_path": ["<script>x"], "long": "y" * 999}
    file.event("start", 0, world_size=2, config=config)
    for i in range(1, iterations + 1):
        file.record(
            {
                "lm loss": 8.0 / i,
                "learning-rate": 1e-4,
                "grad-norm": 100.0 if i == 3 else 1.0,
                "planned-held-bytes": 1000,
                "measured-bubble": 0.1,
                "tokens-per-second": 1000.0 + i,
                "loss-scale": 1.0,
            },
            i,
            i * 8,
        )
        if i % 10 == 0:
            file.record({"lm loss validation": 9.0 / i, "lm loss validation ppl": 3.0}, i, i * 8)
            file.event("checkpoint", i, path=f"out/iter_{i:07d}")
    file.event("start", 20, world_size=2, config=config)
    file.close()
    return folder / "metrics.jsonl"


def test_page_is_well_formed_and_asks_for_nothing(tmp_path):
    write_exit_json(tmp_path, ExitRecord.of(ExitStatus.DONE, "done", rank=1, iteration=40, checkpoint="out"))
    metrics, facts = write_metrics(tmp_path), {"machine": "2 cores"}
    out = write_report(metrics, tmp_path / "r" / "report.html", title="A & <B>", facts=facts)
    text = out.read_text()
    page = Page(text)
    assert page.requests == []
    assert not {"link", "iframe", "img"} & set(page.tags)
    assert page.tags.count("script") == text.count(ZOOM) == 1
    assert re.findall(r"https?://|@import|url\(", text) == []
    assert "<script>" not in text.replace(ZOOM, "")
    titles = re.findall(r"<figcaption><b>(.*?)</b>", text)
    assert [title.split(":")[0] for title in titles] == [
        *("Loss", "Gradient norm", "Learning rate", "Perplexity on held-out data", "Tokens/s of all ranks"),
        "Bubble, % of a step",
        "Weights, gradients and optimizer states on the fullest rank, without activations",
    ]
    assert "prefers-color-scheme: dark" in text
    for expected in (
        *("A & <B>", "Loss", "Learning rate", "Gradient norm", "validation loss", "lm loss validation"),
        *("exit status 0: done", "2 cores", "num_layers", "checkpoint at iteration 20: out/iter_0000020"),
        *(
            "resumed after iteration 20",
            f"{sum(8 / i for i in range(31, 41)) / 10:.4g}",
            "1,020",
            "320 samples",
            "2 starts",
        ),
        # The last loss is 0.2; the console's last line has the mean of its interval.
        *("mean of iterations 31 to 40; 3% of the first, 8", "(999 characters)"),
    ):
        assert expected in page.text, expected


def test_plan_above_the_measured_step_and_memory_by_kind(tmp_path):
    bare = lowered("zbv", 2, 4)
    stages, residency = model(bare.placement, 1), asked("optim_grads_params", "memory", 2)
    stages = tuple(
        dataclasses.replace(one, units=tuple(dataclasses.replace(unit, activation=5e6) for unit in one.units))
        for one in stages
    )
    held = tuple(5e6 * len(stage.units) for stage in stages)
    costs = CostModel.of_ranks(bare.placement, time_f=[3.0], time_b=[3.0], time_w=[3.0])
    costs = dataclasses.replace(costs, activation=held, held_after_b=(0.0,) * len(held))
    ran = simulate(add_residency(bare, stages, residency, costs), costs)
    write_timeline(tmp_path, ran, Lanes(stages, residency, LaneCosts(1e9, 1.0)), at_rest=10_000_000)
    file = MetricsFile(tmp_path / "metrics.jsonl")
    kinds = {"planned-gathered-bytes": 9, "measured-gathered-bytes": 9, "rollbacks": 1}
    file.record({"lm loss": 2.0, **kinds}, 1, 8)
    file.close()
    assert read_run(file.path).losses == ["lm loss"]
    page = Page(
        write_report(file.path, tmp_path / "report.html", pipeline=measured_step(tmp_path)).read_text()
    )
    assert page.requests == []
    for expected in (
        *(
            "gathered weights, measured",
            "gathered weights, planned",
            *list(kinds)[:2],
            "The step of iteration 1, as planned",
            "0 planned",
            "rank 1 planned",
            "gather",
            "reduction",
        ),
        *(
            "states at rest",
            "activations",
            "gathered weights",
            "whole gradients",
            "measured zbv: 2 ranks x 2",
        ),
    ):
        assert expected in page.text, expected
    peaks = [2**20 * float(told) for told in re.findall(r"peak (\d+(?:\.\d+)?) MiB", page.text)]
    assert peaks == pytest.approx([10e6 + most for most in ran.peak_activation], rel=1e-3), (
        "the rest is small"
    )


@pytest.mark.grid
def test_size_stays_small_for_long_runs(tmp_path):
    out = write_report(write_metrics(tmp_path, 30_000), tmp_path / "report.html")
    assert out.stat().st_size < 2_000_000


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (None, "still running, or killed"),
        (ExitRecord.of(ExitStatus.NON_FINITE, "the loss is NaN", rank=0), "exit status 5: the loss is NaN"),
        (ExitRecord(143, "second SIGTERM", 1, None, 0, False), "exit status 143"),
    ],
)
def test_how_it_ended(tmp_path, record, expected):
    out = write_report(write_metrics(tmp_path, 3), tmp_path / "report.html", exit_record=record)
    assert expected in Page(out.read_text()).text


def test_a_run_that_has_hardly_begun(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("")
    assert "no values" in Page(write_report(path, tmp_path / "a.html").read_text()).text
    path.write_text('{"iteration": 1, "time": 5.0, "lm loss": "nan"}\n')
    assert "1 values are not drawable" in Page(write_report(path, tmp_path / "a.html").read_text()).text


def test_read_run(tmp_path):
    run = read_run(write_metrics(tmp_path, 20))
    assert run.losses == ["lm loss"]
    assert run.validation_losses == ["lm loss validation"]
    assert run.curves["lm loss"][1] == (2, 4.0)
    assert (run.last_iteration, run.consumed_samples) == (20, 160)
    assert [event["event"] for event in run.events] == ["start", "checkpoint", "checkpoint", "start"]
    assert math.isfinite(run.last_time - run.first_time)


@pytest.fixture
def tool():
    spec = importlib.util.spec_from_file_location("report_tool", ROOT / "tools" / "report.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tool(tmp_path, tool, capsys):
    assert tool.main([str(tmp_path)]) == 2
    assert "does not exist" in capsys.readouterr().err
    metrics = write_metrics(tmp_path, 3)
    assert tool.main([str(tmp_path)]) == 0
    assert "KiB" in capsys.readouterr().out
    assert tool.main([str(metrics), "--out", str(tmp_path / "x.html"), "--title", "T1"]) == 0
    assert "<title>T1</title>" in (tmp_path / "x.html").read_text()
    assert tool.main([str(metrics), "--timeline", str(tmp_path)]) == 2
    assert f"{tmp_path}: no timeline" in capsys.readouterr().err
    metrics.write_text("nonsense\n{}\n")
    assert tool.main([str(metrics)]) == 2
    assert "line 1" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "not a record\n", '{"iteration": 1'])
def test_tool_refuses_a_file_without_a_record(tmp_path, tool, capsys, content):
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(content)
    assert tool.main([str(metrics)]) == 2
    assert f"{metrics} holds no record" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [metrics]


def test_tool_names_the_output_it_cannot_write(tmp_path, tool, capsys):
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"iteration": 1, "time": 1.0, "lm loss": 2.0}\n')
    assert tool.main([str(metrics), "--out", str(metrics / "x.html")]) == 2
    assert f"report.py: {metrics}: File exists" in capsys.readouterr().err
    assert tool.main([str(metrics), "--out", str(tmp_path)]) == 2
    assert f"--out {tmp_path}: is a directory" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [metrics]
