"""One self-contained HTML page about a run, from its metrics.jsonl: inline SVG, no script, no request.

`write_report(metrics_path, out_path)`; `python tools/report.py` does it from the command line.
"""

from __future__ import annotations

import dataclasses
import html
import json
import math
import os
import re
import statistics
import time
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.core import safe_files
from megatron.core.pipeline_parallel.plan.drawing import overlay
from megatron.core.pipeline_parallel.plan.drawing.svg import MOST_BOXES, Strips, beside_svg, to_picture
from megatron.core.pipeline_parallel.plan.simulate import simulate
from megatron.training.guard.exit_status import ExitRecord, ExitStatus, read_exit_json
from megatron.training.report import chart
from megatron.training.report.chart import Mark, Series, element, line_chart
from megatron.training.report.metrics import MEMORY_TAGS, TAGS, perplexity
from megatron.training.report.metrics_file import read_metrics
from megatron.training.report.progress import format_duration

NOT_LOSSES = {*TAGS.values(), *MEMORY_TAGS, "world-size"}
SUMMARY_SETTINGS = (
    *("num_layers", "hidden_size", "num_attention_heads", "seq_length", "padded_vocab_size"),
    *("micro_batch_size", "global_batch_size", "train_iters", "lr", "lr_decay_style", "optimizer"),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    *("data_parallel_sharding_strategy", "bf16", "fp16", "seed", "data_path", "save", "load"),
)
# Charts of one curve below the losses: tag, title, whether the vertical axis may be logarithmic, starts at 0.
CHARTS = (
    ("learning-rate", "Learning rate", False, True),
    ("grad-norm", "Gradient norm", True, False),
    ("tokens-per-second", "Tokens/s", False, True),
    ("iteration-time", "Seconds per iteration", False, True),
    ("throughput", "TFLOP/s per device", False, True),
    ("params-norm", "Parameter norm", False, False),
    ("loss-scale", "Loss scale", True, False),
)
MAX_CURVES = 1000
MAX_METRICS_BYTES = 1 << 32
MAX_EVENTS = 200  # shown
_TILE = ("name", "value", "note")
_HELD_BY_KIND = re.compile(r"^(planned|measured)(-.*)?-(at-rest|gathered|gradients|activations)-bytes$")
_HELD_OUT = re.compile(r" (validation|test)(-\S+)?( ppl)?$")
_NO_LOSS = re.compile(rf"-time$|^(planned|measured)-|{_HELD_OUT.pattern}")


class Curve(Sequence[tuple[int, float]]):
    """(iteration, value), 16 bytes a pair: a long run has millions."""

    def __init__(self) -> None:
        self.iterations, self.values = array("q"), array("d")

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, i: Any) -> Any:
        return self.iterations[i], self.values[i]


@dataclasses.dataclass
class RunRecord:
    """A metrics file, read: curves by tag and what happened."""

    curves: dict[str, Curve]
    events: list[dict[str, Any]]
    first_time: float = math.nan
    last_time: float = math.nan
    consumed_samples: int = 0

    @property
    def last_iteration(self) -> int:
        return max((points[-1][0] for points in self.curves.values()), default=0)

    @property
    def starts(self) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == "start"]

    @property
    def losses(self) -> list[str]:
        """Tags of training losses."""
        return [tag for tag in self.curves if not (tag in NOT_LOSSES or _NO_LOSS.search(tag))]

    @property
    def validation_losses(self) -> list[str]:
        """Tags of losses on validation and test sets, without their perplexities."""
        return [tag for tag in self.curves if _HELD_OUT.search(tag) and not tag.endswith(" ppl")]

    def finite(self, tag: str) -> list[float]:
        """Values of a curve that are numbers."""
        return [value for _, value in self.curves.get(tag, ()) if math.isfinite(value)]


def read_run(metrics_path: str | Path) -> RunRecord:
    """Read a metrics file. Raises ValueError for a damaged one, OSError for one that cannot be read."""
    run = RunRecord({}, [])
    if (size := os.stat(metrics_path).st_size) > MAX_METRICS_BYTES:
        raise ValueError(f"{metrics_path}: {size} bytes; at most {MAX_METRICS_BYTES} are read: give a part")
    for record in read_metrics(metrics_path):
        if (moment := record.get("time")) is not None:
            run.first_time = moment if math.isnan(run.first_time) else run.first_time
            run.last_time = moment
        if "event" in record:
            run.events.append(record)
            continue
        run.consumed_samples = record.get("consumed_samples", run.consumed_samples)
        for tag, value in record.items():
            if tag in ("iteration", "time", "consumed_samples"):
                continue
            if tag not in run.curves and len(run.curves) == MAX_CURVES:
                raise ValueError(
                    f"{metrics_path}: more than {MAX_CURVES} names of numbers: are these metrics?"
                )
            curve = run.curves.setdefault(tag, Curve())
            curve.iterations.append(record["iteration"])
            curve.values.append(value)
    return run


def write_report(
    metrics_path: str | Path,
    out_path: str | Path,
    *,
    title: str = "Training report",
    facts: Mapping[str, Any] | None = None,
    exit_record: ExitRecord | None = None,
    timeline: Path | None = None,
) -> Path:
    """Write the page of a run to `out_path` (atomically) and return it.

    facts: further rows of the summary, name -> value. exit_record: default, `exit.json` beside the metrics. timeline:
    the folder of --log-pipeline-timeline.
    Raises ValueError for damaged metrics and timelines, OSError.
    """
    run = read_run(metrics_path)
    record = exit_record or read_exit_json(Path(metrics_path).parent)
    start = run.starts[-1] if run.starts else {}
    config = start.get("config", {})
    summary = {"ranks": start["world_size"]} if "world_size" in start else {}
    summary |= {name: config[name] for name in SUMMARY_SETTINGS if config.get(name) is not None}
    summary |= facts or {}
    if record is not None:
        ended = {"exit status": int(record.status), "exit reason": record.reason}
        summary |= {**ended, "checkpoint": record.checkpoint}
    try:
        text = chart.page(
            title,
            [
                element("header", element("h1", html.escape(title)), _status(record)),
                _tiles(run),
                element("main", *_charts(run), class_="charts"),
                "" if timeline is None else _pipeline(timeline),
                _history(run),
                _settings("Summary", summary, is_open=True),
                _settings("Whole configuration", config),
                element("footer", f"megatron-zero, {_moment(time.time())}"),
            ],
        )
    except RecursionError:  # JSON may be nested more deeply than it can be written
        raise ValueError(f"{metrics_path}: an event holds lists in lists without end") from None
    out = Path(out_path)
    out.parent.mkdir(parents=True, exist_ok=True)
    with safe_files.published(out, mode=safe_files.SHARED_MODE) as file:
        file.write(text.encode(errors="backslashreplace"))  # half a surrogate pair, which JSON can spell
    return out


def _charts(run: RunRecord) -> list[str]:
    marks = []
    for event in run.events:
        at = event["iteration"]
        if event["event"] == "checkpoint":
            marks.append(Mark(at, "checkpoint", f"checkpoint at iteration {at}: {event.get('path', '')}"))
        elif event["event"] == "start" and at > 0:
            marks.append(Mark(at, "resume", f"resumed after iteration {at}"))
    losses = [Series(tag, run.curves[tag]) for tag in run.losses]
    losses += [Series(tag, run.curves[tag], points=True) for tag in run.validation_losses]
    charts = [line_chart("Loss", losses, marks=marks, wide=True)]
    for tag, name, may_be_log, from_zero in CHARTS:
        points = run.curves.get(tag)
        if points and not (tag == "loss-scale" and len(set(points.values)) == 1):
            positive = [value for value in run.finite(tag) if value > 0] if may_be_log else []
            log_y = bool(positive) and max(positive) > 50 * min(positive)
            curve = [Series(tag, points)]
            charts.append(line_chart(name, curve, marks=marks, log_y=log_y, from_zero=from_zero))
    if held := sorted(filter(_HELD_BY_KIND.search, run.curves)):
        memory = [Series(tag, run.curves[tag], points=tag.startswith("measured-")) for tag in held]
        title = "Memory by kind: the most on the fullest rank"
        charts.append(line_chart(title, memory, marks=marks, from_zero=True, wide=True))
    return charts


def _tiles(run: RunRecord) -> str:
    tiles: list[tuple[str, str, str]] = []
    for loss in run.losses[:1]:
        if values := run.finite(loss):
            share = f"{100 * values[-1] / values[0]:.0f}% of the first, {values[0]:.4g}" if values[0] else ""
            tiles.append((f"final {loss}", f"{values[-1]:.4g}", share))
    for loss in run.validation_losses[:1]:
        if values := run.finite(loss):
            tiles.append((loss, f"{values[-1]:.4g}", f"perplexity {perplexity(values[-1]):.4g}"))
    tiles.append(("iterations", f"{run.last_iteration:,}", f"{run.consumed_samples:,} samples"))
    if speed := run.finite("tokens-per-second"):
        tiles.append(("tokens/s", f"{statistics.median(speed):,.0f}", f"median; best {max(speed):,.0f}"))
    if math.isfinite(run.last_time - run.first_time):
        note = f"{len(run.starts)} starts" if len(run.starts) > 1 else ""
        tiles.append(("wall time", format_duration(run.last_time - run.first_time), note))
    cells = [
        element(
            "div",
            *(element("div", html.escape(text), class_=kind) for kind, text in zip(_TILE, tile, strict=True)),
            class_="tile",
        )
        for tile in tiles
    ]
    return element("section", *cells, class_="tiles")


def _status(record: ExitRecord | None) -> str:
    if record is None:
        return element("span", "no exit record: still running, or killed", class_="status")
    kind = "good" if record.status in (ExitStatus.DONE, ExitStatus.STOPPED) else "bad"
    known = {int(status): status.description for status in ExitStatus}
    text = f"exit status {int(record.status)}: {html.escape(str(record.reason))}"
    meaning = known.get(record.status, "ended by a signal")
    return element("span", text, class_=f"status {kind}", title=meaning)


def _history(run: RunRecord) -> str:
    rows = [[element("th", name) for name in ("time", "event", "iteration", "")]]
    for event in run.events[-MAX_EVENTS:]:
        known = ("event", "iteration", "time", "config")
        text = ", ".join(f"{key}: {_cut(str(value))}" for key, value in event.items() if key not in known)
        cells = (_moment(event.get("time", 0)), event["event"], str(event["iteration"]), text)
        rows.append([element("td", html.escape(cell)) for cell in cells])
    left_out = len(run.events) - MAX_EVENTS
    note = f"<p>the {left_out} events before are left out</p>" if left_out > 0 else ""
    return chart.table(f"What happened ({len(run.events)} events)", rows, note=note) if run.events else ""


def _settings(title: str, values: Mapping[str, Any], *, is_open: bool = False) -> str:
    rows = []
    for name, value in values.items():
        text = _cut(value if isinstance(value, str) else json.dumps(value, default=str))
        rows.append([element("th", html.escape(str(name))), element("td", html.escape(text))])
    return chart.table(title, rows, is_open=is_open) if rows else ""


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _cut(text: str) -> str:
    return text if len(text) <= 400 else f"{text[:400]}... ({len(text)} characters)"


def _pipeline(timeline: Path) -> str:
    """The last measured step below the plan, and what that moves and holds over time. timeline: the folder of
    --log-pipeline-timeline. Raises PlanError for what is no timeline."""
    step = overlay.chosen_step(timeline, None)
    costs = overlay.measured_costs(step.plan, overlay.mean_times(step.plan, step.spans))
    stages = () if step.lanes is None else step.lanes.stages
    activation = tuple(sum(unit.activation for unit in stage.units) for stage in stages)
    if any(activation):  # the same times; activations in bytes, as the units have them
        held = tuple(sum(unit.held_after_b for unit in stage.units) for stage in stages)
        costs = dataclasses.replace(costs, activation=activation, held_after_b=held)
    planned = simulate(step.plan, costs, step.lanes)
    measured = overlay.measured_simulation(step.plan, step.spans, costs)
    strips = Strips(planned, None, "activations" if step.lanes is None else "bytes", step.at_rest)
    if step.plan.num_ops <= MOST_BOXES:
        svg = beside_svg(planned, measured, strips=strips)
    else:
        span = max(planned.makespan, measured.makespan)
        svg = to_picture(planned, span=span, width=1200, strips=strips)
        svg += to_picture(measured, span=span, width=1200)
    title = (
        f"Pipeline: iteration {step.iteration}, ranks {', '.join(map(str, step.pipeline))}, seconds. "
        "The step as planned, with what it moves and holds, and as measured"
    )
    inline = svg.replace(' xmlns="http://www.w3.org/2000/svg"', "")
    return element("figure", element("figcaption", html.escape(title)), inline, class_="plan")
