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
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.core import safe_files
from megatron.training.guard.exit_status import ExitRecord, ExitStatus, read_exit_json
from megatron.training.report.chart import Mark, Points, Series, line_chart
from megatron.training.report.metrics import MEMORY_TAGS, TAGS, perplexity
from megatron.training.report.metrics_file import read_metrics
from megatron.training.report.progress import format_duration
from megatron.training.report.report_pipeline import pipeline_section

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
_OF_A_PLAN = ("planned-", "measured-")
_KINDS_HELD = ("-at-rest-bytes", "-gathered-bytes", "-gradients-bytes", "-activations-bytes")
_HELD_OUT = re.compile(r" (validation|test)(-\S+)?( ppl)?$")


class Curve(Sequence[tuple[int, float]]):
    """(iteration, value), 16 bytes a pair: a long run has millions."""

    def __init__(self) -> None:
        self._iterations, self._values = array("q"), array("d")

    def append(self, iteration: int, value: float) -> None:
        self._iterations.append(iteration)
        self._values.append(value)

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, i: Any) -> Any:
        return self._iterations[i], self._values[i]


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
        return max((points[-1][0] for points in self.curves.values() if points), default=0)

    @property
    def starts(self) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == "start"]

    @property
    def losses(self) -> list[str]:
        """Tags of training losses."""
        others = [tag for tag in self.curves if tag.endswith("-time") or tag.startswith(_OF_A_PLAN)]
        return [t for t in self.curves if not (t in NOT_LOSSES or t in others or _HELD_OUT.search(t))]

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
            run.curves.setdefault(tag, Curve()).append(record["iteration"], value)
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
    try:
        pipeline = "" if timeline is None else pipeline_section(timeline)
        page = _page(run, title, facts or {}, record, pipeline)
    except RecursionError:  # JSON may be nested more deeply than it can be written
        raise ValueError(f"{metrics_path}: an event holds lists in lists without end") from None
    out = Path(out_path)
    out.parent.mkdir(parents=True, exist_ok=True)
    with safe_files.published(out, mode=safe_files.SHARED_MODE) as file:
        file.write(page.encode(errors="backslashreplace"))  # half a surrogate pair, which JSON can spell
    return out


def _page(
    run: RunRecord, title: str, facts: Mapping[str, Any], record: ExitRecord | None, pipeline: str
) -> str:
    start = run.starts[-1] if run.starts else {}
    config = start.get("config", {})
    summary = {"ranks": start["world_size"]} if "world_size" in start else {}
    summary |= {name: config[name] for name in SUMMARY_SETTINGS if config.get(name) is not None}
    summary |= facts
    if record is not None:
        ended = {"exit status": int(record.status), "exit reason": record.reason}
        summary |= {**ended, "checkpoint": record.checkpoint}
    body = [
        f"<header><h1>{html.escape(title)}</h1>{_status(record)}</header>",
        _tiles(run),
        '<main class="charts">',
        *_charts(run),
        "</main>",
        pipeline,
        _history(run),
        _settings("Summary", summary, is_open=True),
        _settings("Whole configuration", config),
        f"<footer>megatron-zero, {time.strftime('%Y-%m-%d %H:%M:%S')}</footer>",
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(part for part in body if part)
        + "\n</body>\n</html>\n"
    )


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
        points: Points = run.curves.get(tag, ())
        if points and not (tag == "loss-scale" and len({value for _, value in points}) == 1):
            positive = [value for value in run.finite(tag) if value > 0] if may_be_log else []
            log_y = bool(positive) and max(positive) > 50 * min(positive)
            curve = [Series(tag, points)]
            charts.append(line_chart(name, curve, marks=marks, log_y=log_y, from_zero=from_zero))
    held = sorted(tag for tag in run.curves if tag.startswith(_OF_A_PLAN) and tag.endswith(_KINDS_HELD))
    if held:
        memory = [Series(tag, run.curves[tag], points=tag.startswith("measured-")) for tag in held]
        title = "Memory by kind: the most on the fullest rank"
        charts.append(line_chart(title, memory, marks=marks, from_zero=True, wide=True))
    return charts


def _tiles(run: RunRecord) -> str:
    tiles: list[tuple[str, str, str]] = []
    for tag in run.losses[:1]:
        if values := run.finite(tag):
            share = f"{100 * values[-1] / values[0]:.0f}% of the first, {values[0]:.4g}" if values[0] else ""
            tiles.append((f"final {tag}", f"{values[-1]:.4g}", share))
    for tag in run.validation_losses[:1]:
        if values := run.finite(tag):
            tiles.append((tag, f"{values[-1]:.4g}", f"perplexity {perplexity(values[-1]):.4g}"))
    tiles.append(("iterations", f"{run.last_iteration:,}", f"{run.consumed_samples:,} samples"))
    if speed := run.finite("tokens-per-second"):
        tiles.append(("tokens/s", f"{statistics.median(speed):,.0f}", f"median; best {max(speed):,.0f}"))
    if math.isfinite(run.last_time - run.first_time):
        note = f"{len(run.starts)} starts" if len(run.starts) > 1 else ""
        tiles.append(("wall time", format_duration(run.last_time - run.first_time), note))
    cells = ""
    for name, value, note in (map(html.escape, tile) for tile in tiles):
        cells += f'<div class="tile"><div class="name">{name}</div><div class="value">{value}</div>'
        cells += f'<div class="note">{note}</div></div>'
    return f'<section class="tiles">{cells}</section>'


def _status(record: ExitRecord | None) -> str:
    if record is None:
        return '<span class="status">no exit record: still running, or killed</span>'
    kind = "good" if record.status in (ExitStatus.DONE, ExitStatus.STOPPED) else "bad"
    known = {int(status): status.description for status in ExitStatus}
    meaning = html.escape(known.get(record.status, "ended by a signal"), quote=True)
    text = f"exit status {int(record.status)}: {html.escape(str(record.reason))}"
    return f'<span class="status {kind}" title="{meaning}">{text}</span>'


def _history(run: RunRecord) -> str:
    if not run.events:
        return ""
    rows = "<tr><th>time</th><th>event</th><th>iteration</th><th></th></tr>"
    for event in run.events[-MAX_EVENTS:]:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.get("time", 0)))
        known = ("event", "iteration", "time", "config")
        text = ", ".join(f"{key}: {_cut(str(value))}" for key, value in event.items() if key not in known)
        cells = (when, html.escape(event["event"]), event["iteration"], html.escape(text))
        rows += f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
    left_out = len(run.events) - MAX_EVENTS
    note = f"<p>the {left_out} events before are left out</p>" if left_out > 0 else ""
    return _details(f"What happened ({len(run.events)} events)", [rows], note=note)


def _settings(title: str, values: Mapping[str, Any], *, is_open: bool = False) -> str:
    rows = []
    for name, value in values.items():
        text = _cut(value if isinstance(value, str) else json.dumps(value, default=str))
        rows.append(f"<tr><th>{html.escape(str(name))}</th><td>{html.escape(text)}</td></tr>")
    return _details(title, rows, is_open=is_open) if rows else ""


def _details(title: str, rows: Iterable[str], *, note: str = "", is_open: bool = False) -> str:
    opened = ' open="open"' if is_open else ""
    summary = f"<summary>{html.escape(title)}</summary>"
    return f"<details{opened}>{summary}{note}<table>{''.join(rows)}</table></details>"


def _cut(text: str) -> str:
    return text if len(text) <= 400 else f"{text[:400]}... ({len(text)} characters)"


STYLE = """
:root { color-scheme: light dark; --bg: #f6f7f9; --card: #fff; --fg: #1c2733; --dim: #647384; --grid: #e3e8ee;
  --axis: #aab6c2; --s0: #2563eb; --s1: #d9480f; --s2: #0f9d6c; --s3: #9333ea; --s4: #b8860b; --s5: #c2255c;
  --good: #0f9d6c; --bad: #c92a2a; }
@media (prefers-color-scheme: dark) { :root { --bg: #12171d; --card: #1b222b; --fg: #e3e9ef; --dim: #93a1b0;
  --grid: #2b3541; --axis: #526070; --s0: #6ea8fe; --s1: #ff9f68; --s2: #4fd1a1; --s3: #c4a0ff; --s4: #f1c453;
  --s5: #ff8cb3; --good: #4fd1a1; --bad: #ff8787; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1120px; padding: 28px 20px 48px; background: var(--bg); color: var(--fg);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
header { display: flex; flex-wrap: wrap; gap: 8px 16px; align-items: baseline;
  justify-content: space-between; }
h1 { font-size: 24px; margin: 0; }
.status { font-size: 13px; padding: 2px 10px; border: 1px solid var(--axis); border-radius: 12px;
  color: var(--dim); }
.status.good { color: var(--good); border-color: var(--good); }
.status.bad { color: var(--bad); border-color: var(--bad); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); gap: 14px;
  margin: 20px 0; }
.tile, figure, details { background: var(--card); border: 1px solid var(--grid); border-radius: 10px; }
.tile { padding: 12px 16px; }
.tile .name, .tile .note { color: var(--dim); font-size: 13px; }
.tile .value { font-size: 24px; font-weight: 600; font-variant-numeric: tabular-nums; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 14px; }
figure { margin: 0; padding: 14px 14px 6px; min-width: 0; }
figure.wide { grid-column: 1 / -1; }
figcaption { font-weight: 600; display: flex; flex-wrap: wrap; gap: 2px 16px; align-items: baseline; }
.key { color: var(--dim); font-weight: 400; font-size: 13px; }
.key i { display: inline-block; width: 14px; height: 3px; margin-right: 6px; vertical-align: middle; }
.key i.dot { width: 9px; height: 9px; border-radius: 50%; }
.plan { margin-top: 14px; } .plan svg { margin-top: 8px; background: #fff; }
svg { display: block; width: 100%; height: auto; }
.charts svg text { fill: var(--dim); font-size: 12px; font-family: inherit; }
svg .grid { stroke: var(--grid); } svg .axis { stroke: var(--axis); }
svg .line { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
svg .hit { fill: transparent; } svg .hit:hover { fill: var(--fg); fill-opacity: .75; }
svg .resume { stroke: var(--dim); stroke-dasharray: 3 4; } svg .checkpoint { fill: var(--dim); }
.s0 { --c: var(--s0); } .s1 { --c: var(--s1); } .s2 { --c: var(--s2); }
.s3 { --c: var(--s3); } .s4 { --c: var(--s4); } .s5 { --c: var(--s5); }
svg .line { stroke: var(--c); } svg .dot { fill: var(--c); } .key i { background: var(--c); }
.empty { color: var(--dim); padding: 24px 0; }
details { margin-top: 14px; padding: 10px 16px; } summary { cursor: pointer; font-weight: 600; }
table { border-collapse: collapse; margin: 10px 0 6px; font-size: 13px; width: 100%; }
th, td { text-align: left; padding: 4px 14px 4px 0; border-top: 1px solid var(--grid); vertical-align: top;
  overflow-wrap: anywhere; }
th { font-weight: 500; color: var(--dim); white-space: nowrap; width: 1%; }
footer { margin-top: 20px; color: var(--dim); font-size: 12px; }
"""
