"""Which charts a report has: curves of metrics.jsonl by subject, of one run or of several."""

from __future__ import annotations

import csv
import itertools
import re
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron.core.safe_files import read_text
from tools.drawing.charts import LARGEST, Mark, Points, Series, line_chart
from tools.drawing.page import COLOURS, Picture
from tools.reports.run_record import RunRecord, layout

Runs = Sequence[tuple[str, RunRecord]]  # by name; one run has no need of its name

PIPELINE = "Pipeline"
_MB, _PERCENT = ", MB", ", % of a step"  # at the ends of titles: what values are scaled to
# A chart a row. tags: a pattern. words: "log", the vertical axis is logarithmic where values span more than a factor of
# 50; "zero", it starts at 0; "varied", there is a chart only where values change.
CHARTS = [
    (row["subject"], row["title"], row["tags"], row["words"])
    for row in csv.DictReader(
        read_text(Path(__file__).with_name("charts.csv"), max_bytes=1 << 16, follow=True).splitlines()
    )
]


def loss_chart(runs: Runs, *, title: str = "Loss", hover: bool = True) -> Picture:
    """Training losses, raw and smoothed, and those on held-out data. With several runs a colour is a run."""
    series, windows = [], set[int]()
    for number, (run_name, run) in enumerate(runs):
        for place, tag in enumerate([*run.losses, *run.validation_losses]):
            values, held_out = run.curves[tag], tag in run.validation_losses
            name, colour = f"{run_name}: {tag}" if run_name else tag, number if run_name else place
            if (window := smoothing_window(len(values))) and not held_out:
                windows.add(window)
                series.append(Series(name, values, pale=True, colour=colour))
                series.append(Series(f"{name}, smoothed", smoothed(values, window), colour=colour))
            else:
                series.append(Series(name, values, points=held_out, colour=colour))
    over = " or ".join(map(str, sorted(windows)))
    marks = marks_of(runs)
    notes = [
        f"Smoothed: means over {over} records around each." if over else "",
        "Triangles: checkpoints." if any(mark.kind == "checkpoint" for mark in marks) else "",
    ]
    note = " ".join(filter(None, notes))
    return line_chart(title, series, marks=marks, note=note, height=260, hover=hover)


def sections(runs: Runs) -> Iterator[tuple[str, list[Picture]]]:
    """Subjects, each with its charts, but those that no run has values for."""
    for subject, rows in itertools.groupby(CHARTS, lambda row: row[0]):
        drawn = (_drawn(title, pattern, words, runs) for _, title, pattern, words in rows)
        yield subject, [picture for picture in drawn if picture is not None]


def smoothing_window(count: int) -> int:
    """Over how many records a loss is smoothed; 0: it is not, because there are few."""
    return min(count // 40, 100) * 2 + 1 if count >= 40 else 0


def smoothed(values: Points, window: int) -> list[tuple[float, float]]:
    """Means of what is finite over `window` records, as many before as behind; at both ends over fewer."""
    finite = [(x, y) for x, y in values if abs(y) <= LARGEST]  # NaN is not
    ys = [y for _, y in finite]
    halves = (min(at, window // 2) for at in range(len(ys)))
    return [
        (x, statistics.fmean(ys[at - half : at + half + 1]))
        for at, ((x, _), half) in enumerate(zip(finite, halves, strict=True))
    ]


def _drawn(title: str, pattern: str, words: str, runs: Runs) -> Picture | None:
    """One chart; planned curves lie pale behind those that were measured. Of more kinds than there are colours, the
    largest."""
    factor = 1e-6 if title.endswith(_MB) else 100 if title.endswith(_PERCENT) else 1
    largest: dict[str, float] = {}  # of each kind
    found = [(tag, run) for _, run in runs for tag in sorted(run.curves) if re.fullmatch(pattern, tag)]
    for tag, run in found:
        if "varied" not in words or any(run.curves[tag].values):
            largest[_kind(tag)] = max([largest.get(_kind(tag), -LARGEST), *run.finite(tag)])
    kinds = sorted(largest, key=lambda kind: -largest[kind])
    series: list[Series] = []
    for number, (name, run) in enumerate(runs):
        for tag in (tag for tag, of in found if of is run and _kind(tag) in kinds[:COLOURS]):
            values = [(x, y * factor) for x, y in run.curves[tag]] if factor != 1 else run.curves[tag]
            planned, measured = (tag.startswith(start) for start in ("planned-", "measured-"))
            colour = number if name else kinds.index(_kind(tag))
            series.append(Series(f"{name}: {tag}" if name else tag, values, measured, planned, colour))
    numbers = [y for one in series for _, y in one.values if abs(y) <= LARGEST]
    if not series or ("varied" in words and len(set(numbers)) < 2):
        return None
    positive = [value for value in numbers if value > 0] if "log" in words else []
    log_y = bool(positive) and max(positive) > 50 * min(positive)
    note = f"Left out, as they are smaller: {', '.join(kinds[COLOURS:])}." if kinds[COLOURS:] else ""
    marks, from_zero = marks_of(runs), "zero" in words
    return line_chart(title, series, marks=marks, log_y=log_y, from_zero=from_zero, note=note)


def _kind(tag: str) -> str:
    return tag.removeprefix("planned-").removeprefix("measured-")


def marks_of(runs: Runs) -> list[Mark]:
    """Resumes, with what is new of the layout, and of one run without a name its checkpoints."""
    marks: list[Mark] = []
    for name, run in runs:
        now, whose = "", f"{name}: " if name else ""
        for event in run.events:
            at = event["iteration"]
            if event["event"] == "checkpoint" and not name:
                marks.append(Mark(at, "checkpoint", f"checkpoint at iteration {at}: {event.get('path', '')}"))
            elif event["event"] == "start":
                before, now = now, layout(event)
                told = f"{whose}resumed after iteration {at}"
                if before not in ("", now):
                    new = [part for part in now.split(", ") if part not in before.split(", ")]
                    label = f"{whose}resumed: {', '.join(new) or now}"
                    marks.append(Mark(at, "resume", f"{told}: layout {before} -> {now}", label))
                elif at > 0:
                    marks.append(Mark(at, "resume", told, f"{whose}resumed"))
    return marks
