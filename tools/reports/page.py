"""One self-contained HTML page about a run, or about several side by side, from their metrics.jsonl: inline SVG, no
script, no request.

`write_report(metrics_path, out_path)`; `python tools/report.py` does it from the command line.
"""

from __future__ import annotations

import html
import json
import math
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.core import safe_files
from megatron.core.words import brief, counted, duration, plain, share_text
from megatron.training.guard.exit_status import ExitRecord, ExitStatus, read_exit_json
from megatron.training.report.metrics import perplexity
from tools.drawing import page as drawing
from tools.drawing.page import Picture, element
from tools.reports.charts import MEMORY, PIPELINE, Runs, loss_chart, sections, words_of
from tools.reports.memory import planned_and_measured
from tools.reports.run_record import RunRecord, layout, read_run

SUMMARY_SETTINGS = (
    *("num_layers", "hidden_size", "num_attention_heads", "seq_length", "padded_vocab_size"),
    *("micro_batch_size", "global_batch_size", "train_iters", "lr", "lr_decay_style", "optimizer"),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    *("data_parallel_sharding_strategy", "bf16", "fp16", "seed", "data_path", "save", "load"),
)
MAX_EVENTS = 200  # shown


def write_report(
    metrics_path: str | Path,
    out_path: str | Path,
    *,
    title: str = "Training report",
    facts: Mapping[str, Any] | None = None,
    exit_record: ExitRecord | None = None,
    pipeline: Picture | None = None,
) -> Path:
    """Write the page of a run to `out_path` (atomically) and return it.

    facts: further rows of the summary, name -> value. exit_record: default, `exit.json` beside the metrics. pipeline: a
    timeline to be shown, as `tools/report.py` draws it.
    Raises ValueError for damaged metrics, OSError.
    """
    run = read_run(metrics_path)
    record = exit_record or read_exit_json(Path(metrics_path).parent)
    start = run.starts[-1] if run.starts else {}
    summary = {"ranks": start["world_size"]} if "world_size" in start else {}
    summary |= {name: run.config[name] for name in SUMMARY_SETTINGS if run.config.get(name) is not None}
    summary |= facts or {}
    if record is not None:
        ended = {"exit status": int(record.status), "exit reason": record.reason}
        summary |= {**ended, "checkpoint": record.checkpoint}
    try:
        parts = [
            element("header", element("h1", html.escape(title)), _status(record)),
            drawing.tiles(totals(run)),
            charts([("", run)], {PIPELINE: pipeline, MEMORY: planned_and_measured(run)}),
            _history(run),
            _settings("Summary", summary, is_open=True),
            _settings("Whole configuration", run.config),
            curve_names([("", run)]),
        ]
    except RecursionError:  # JSON may be nested more deeply than it can be written
        raise ValueError(f"{metrics_path}: an event holds lists in lists without end") from None
    return publish(out_path, title, parts)


def publish(out_path: str | Path, title: str, parts: Sequence[str]) -> Path:
    """Write a page with a line on when it was made. Raises OSError."""
    footer = element("footer", f"megatron-zero, {_moment(time.time())}")
    return written(out_path, drawing.page(title, [*parts, footer]))


def written(out_path: str | Path, content: str) -> Path:
    """Write a file, atomically. Raises OSError."""
    out = Path(out_path)
    out.parent.mkdir(parents=True, exist_ok=True)
    with safe_files.published(out, mode=safe_files.SHARED_MODE) as file:
        file.write(content.encode(errors="backslashreplace"))  # half a surrogate pair, which JSON can spell
    return out


def charts(runs: Runs, last: Mapping[str, Picture | None] | None = None, more: Sequence[Picture] = ()) -> str:
    """Charts by subject. last: by subject, one that stands behind its curves. more: of losses."""
    parts = [drawing.heading("Loss"), loss_chart(runs).figure(wide=True), *(chart.figure() for chart in more)]
    for subject, drawn in sections(runs):
        own = (last or {}).get(subject)
        behind = [] if own is None else [own.figure(wide=True)]
        if drawn or behind:
            odd = drawn[-1:] if len(drawn) % 2 else []  # leaves no hole where there are two columns
            figures = (chart.figure(wide=chart in odd) for chart in drawn)
            parts += [drawing.heading(subject), *figures, *behind]
    return element("main", *parts, class_="charts")


def totals(run: RunRecord) -> list[tuple[str, str, str]]:
    """(name, value, note) of what one asks first."""
    made: list[tuple[str, str, str]] = []
    for loss in run.losses[:1]:
        if values := run.finite(loss):
            mean, first, last = run.last_mean(loss)
            over = f"mean of iterations {first:,} to {last:,}" if first < last else f"iteration {last:,}"
            part = values[0] and f"; {share_text(mean / values[0], 0)} of the first, {plain(values[0])}"
            made.append((f"final {words_of(loss)}", plain(mean), over + (part or "")))
    for loss in run.validation_losses[:1]:
        if values := run.finite(loss):
            ended = plain(values[-1]), f"perplexity {plain(perplexity(values[-1]))}"
            made.append((f"last {words_of(loss)}", *ended))
    if speed := run.finite("tokens-per-second"):
        made.append(("tokens/s", plain(statistics.median(speed)), f"median; best {plain(max(speed))}"))
    if math.isfinite(run.last_time - run.first_time):
        steps = run.seconds()
        note = f"in steps {duration(steps[-1][1])}" if steps and steps[-1][1] < 1e12 else ""
        starts = counted(len(run.starts), "start") if len(run.starts) > 1 else ""
        wall = duration(run.last_time - run.first_time)
        made.append(("wall time", wall, ", ".join(filter(None, (note, starts)))))
    samples = counted(run.consumed_samples, "sample")
    made.append(("iterations", f"{run.last_iteration:,}", samples if run.tokens is None else ""))
    if run.tokens is not None:
        made.append(("tokens", brief(run.tokens), samples))
    if run.parameters is not None:
        made.append(("parameters", brief(run.parameters), f"{run.parameters:,}"))
    if run.starts and type(ranks := run.starts[-1].get("world_size")) is int:
        made.append(("ranks", f"{ranks:,}", run.layouts))
    return made


def curve_names(runs: Runs) -> str:
    """What curves are called on the page, and in metrics.jsonl."""
    tags = dict.fromkeys(tag for _, run in runs for tag in run.curves)
    rows = [(words_of(tag), tag) for tag in tags]
    return drawing.fold("Names of the curves in metrics.jsonl", drawing.table(rows)) if rows else ""


def _status(record: ExitRecord | None) -> str:
    if record is None:
        return element("span", "no exit record: still running, or killed", class_="status")
    kind = "good" if record.status in (ExitStatus.DONE, ExitStatus.STOPPED) else "bad"
    known = {int(status): status.description for status in ExitStatus}
    text = f"exit status {int(record.status)}: {html.escape(str(record.reason))}"
    meaning = known.get(record.status, "ended by a signal")
    return element("span", text, class_=f"status {kind}", title=meaning)


def _history(run: RunRecord) -> str:
    rows: list[tuple[str, ...]] = []
    before: Mapping[str, Any] = {}
    for event in run.events:
        known = ("event", "iteration", "time", "config")
        told = ((key, value) for key, value in event.items() if key not in known and value is not None)
        said = [f"{key.replace('_', ' ')}: {_short(value)}" for key, value in told]
        if event["event"] == "start":
            config = event.get("config", {})
            changed = (
                f"{name}: {setting_text(before.get(name))} -> {setting_text(value)}"
                for name, value in config.items()
                if value != before.get(name)
            )
            said = [layout(event), *said, *([_cut(f"changed {', '.join(changed)}")] if before else [])]
            before = config
        rows.append((_moment(event.get("time", 0)), event["event"], str(event["iteration"]), ", ".join(said)))
    if not rows:
        return ""
    left_out = len(rows) - MAX_EVENTS
    note = f"<p>the {left_out} events before are left out</p>" if left_out > 0 else ""
    shown = drawing.table(rows[-MAX_EVENTS:], ("time", "event", "iteration", "what"))
    return drawing.fold(f"What happened ({counted(len(rows), 'event')})", note, shown)


def _settings(title: str, values: Mapping[str, Any], *, is_open: bool = False) -> str:
    rows = [(str(name), setting_text(value)) for name, value in values.items()]
    return drawing.fold(title, drawing.table(rows), is_open=is_open) if rows else ""


def setting_text(value: Any) -> str:
    """A setting on one line, at most 400 letters of it."""
    if value is None:
        return "not set"
    return _cut(value if isinstance(value, str) else json.dumps(value, default=str))


def _short(value: Any) -> str:
    """Of an event: numbers by four digits, the beginning of a digest."""
    if isinstance(value, list | tuple):
        return ", ".join(map(_short, value))
    text = plain(value) if isinstance(value, float) else str(value)
    return text[:12] if re.fullmatch("[0-9a-f]{64}", text) else _cut(text)


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _cut(text: str) -> str:
    return text if len(text) <= 400 else f"{text[:400]}... ({len(text)} characters)"
