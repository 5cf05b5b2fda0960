"""Which charts a report has: curves of metrics.jsonl by subject, of one run or of several."""

from __future__ import annotations

import dataclasses
import itertools
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from megatron.core.safe_files import read_rows
from megatron.core.words import unit_of_bytes
from tools.drawing.charts import LARGEST, Mark, Points, Series, line_chart
from tools.drawing.page import COLOURS, Key, Picture
from tools.reports.run_record import HELD_OUT, RunRecord, layout

Runs = Sequence[tuple[str, RunRecord]]  # by name; one run has no need of its name

PIPELINE, MEMORY = "Pipeline", "Memory"  # subjects
MARKS = {
    "resume": "dashes: resumed",
    "plan": "dashes and dots: new plan by measured costs",
    "checkpoint": "triangles: checkpoints",
}


_HERE = Path(__file__)
# A chart a row. title: with the unit that `units_of` chooses. tags: a pattern. words: "log", the vertical axis is
# logarithmic where values span more than a factor of 50; "zero", it starts at 0; "varied", there is a chart only where
# values change.
CHARTS = read_rows(_HERE.with_name("charts.csv"))
_WORDS = {row["tag"]: row["words"] for row in read_rows(_HERE.with_name("words.csv"))}


def words_of(tag: str) -> str:
    """What a curve is called on the page, for its name in metrics.jsonl: `validation loss` for `lm loss validation`."""
    if found := HELD_OUT.search(tag):
        loss, (split, one, perplexity) = tag[: found.start()], found.groups()
        what = "perplexity" if perplexity else "loss" if loss == "lm loss" else words_of(loss)
        return f"{split} {what}" + (f" ({one[1:]})" if one else "")
    kind = _kind(tag)
    stage = f", {tag.partition('-')[0]}" if kind != tag else ""
    return _WORDS.get(kind, re.sub("[-_]", " ", kind.removesuffix("-time"))) + stage


def units_of(runs: Runs) -> dict[str, tuple[float, str]]:
    """Of all charts of a page: what values are multiplied by, and what the unit is called then, by its name in
    charts.csv."""

    def largest(pattern: str) -> float:
        curves = ((run, tag) for _, run in runs for tag in run.curves if re.fullmatch(pattern, tag))
        return max((max(run.finite(tag), default=0.0) for run, tag in curves), default=0.0)

    size, name = unit_of_bytes(largest(".*-bytes"))
    rate = (1, "TFLOP/s") if largest("throughput") >= 1 else (1e3, "GFLOP/s")
    return {"bytes": (1 / size, name), "FLOP/s": rate, "share": (100, "% of a step")}


def loss_chart(runs: Runs, *, title: str = "Loss", hover: bool = True) -> Picture:
    """Training losses, raw and smoothed, and those on held-out data. With several runs a colour is a run."""
    series, windows = [], set[int]()
    for number, (run_name, run) in enumerate(runs):
        for place, tag in enumerate([*run.losses, *run.validation_losses]):
            values, held_out = run.curves[tag], tag in run.validation_losses
            name = f"{run_name}: {words_of(tag)}" if run_name else words_of(tag)
            colour = number if run_name else place
            if (window := smoothing_window(len(values))) and not held_out:
                windows.add(window)
                series.append(Series(name, values, pale=True, colour=colour))
                series.append(Series(f"{name}, smoothed", smoothed(values, window), colour=colour))
            else:
                series.append(Series(name, values, points=held_out, colour=colour))
    over = " or ".join(map(str, sorted(windows)))
    marks = marks_of(runs)
    note = f"Smoothed: means over {over} records around each." if over else ""
    drawn = line_chart(title, series, marks=marks, note=note, height=260, hover=hover)
    keys = [Key(text) for kind, text in MARKS.items() if any(mark.kind == kind for mark in marks)]
    return dataclasses.replace(drawn, keys=(*drawn.keys, *keys))


def sections(runs: Runs) -> Iterator[tuple[str, list[Picture]]]:
    """Subjects, each with its charts, but those that no run has values for."""
    units = units_of(runs)
    reach = [at for _, run in runs for curve in run.curves.values() for at in (curve[0][0], curve[-1][0])]
    for subject, rows in itertools.groupby(CHARTS, lambda row: row["subject"]):
        yield subject, [picture for row in rows for picture in _drawn(row, units, reach, runs)]


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


def _drawn(
    row: Mapping[str, str], units: Mapping[str, tuple[float, str]], reach: Sequence[int], runs: Runs
) -> list[Picture]:
    """One chart, and of more kinds than there are colours the largest. Of several runs, which have a colour each, one
    for each kind."""
    unit = re.search(r"\{(.*)\}", title := row["title"])
    factor, unit_name = units[unit[1]] if unit else (1.0, "")
    title = title.replace(unit[0], unit_name) if unit else title
    having = [one for one in runs if any(re.fullmatch(row["tags"], tag) for tag in one[1].curves)]
    if len(having) == 1 < len(runs):
        title, runs = f"{title} ({having[0][0]} only)", [("", having[0][1])]
    largest: dict[str, float] = {}  # of each kind
    for _, run in runs:
        for tag in sorted(tag for tag in run.curves if re.fullmatch(row["tags"], tag)):
            if "varied" not in row["words"] or any(run.curves[tag].values):
                largest[_kind(tag)] = max([largest.get(_kind(tag), -LARGEST), *run.finite(tag)])
    kinds = sorted(largest, key=lambda kind: -largest[kind])
    rest, note = ", ".join(map(words_of, kinds[COLOURS:])), row["note"]
    note = f"Left out, as they are smaller: {rest}. {note}".rstrip() if rest else note
    alone = len(runs) > 1 and len(kinds) > 1
    every = [[kind] for kind in kinds[:COLOURS]] if alone else [kinds[:COLOURS]]
    made: list[Picture] = []
    for some in every:
        series = _series(some, factor, runs)
        numbers = {y for one in series for _, y in one.values if abs(y) <= LARGEST}
        if not series or ("varied" in row["words"] and len(numbers) < 2):
            continue
        positive = [value for value in numbers if value > 0] if "log" in row["words"] else []
        drawn = line_chart(
            f"{title}: {words_of(some[0])}" if alone else title,
            series,
            marks=marks_of(runs),
            log_y=bool(positive) and max(positive) > 50 * min(positive),
            from_zero="zero" in row["words"],
            note="" if made else note,
            reach=reach,
        )
        keys = drawn.keys[1:] if len(series) == len(runs) == 1 else drawn.keys  # the title says it
        made.append(dataclasses.replace(drawn, keys=keys))
    return made


def _series(kinds: Sequence[str], factor: float, runs: Runs) -> list[Series]:
    """Curves of some kinds; planned ones lie broad and pale behind those that were measured."""
    series: list[Series] = []
    for number, (name, run) in enumerate(runs):
        for tag in (tag for tag in sorted(run.curves) if _kind(tag) in kinds):
            values = [(x, y * factor) for x, y in run.curves[tag]] if factor != 1 else run.curves[tag]
            planned, measured = (tag.startswith(start) for start in ("planned-", "measured-"))
            stage = ", planned" if planned else ", measured" if measured else ""
            told = f"{name}{stage}" if name else words_of(tag)
            colour = number if name else kinds.index(_kind(tag))
            series.append(Series(told, values, measured, planned, planned, colour))
    return series


def _kind(tag: str) -> str:
    return tag.removeprefix("planned-").removeprefix("measured-")


def marks_of(runs: Runs) -> list[Mark]:
    """Resumes, with what is new of the layout, new plans, and of one run without a name its checkpoints."""
    marks: list[Mark] = []
    for number, (name, run) in enumerate(runs):
        now, whose, colour = "", f"{name}: " if name else "", number if name else None
        for event in run.events:
            at = event["iteration"]
            if event["event"] == "checkpoint" and not name:
                marks.append(Mark(at, "checkpoint", f"checkpoint at iteration {at}: {event.get('path', '')}"))
            elif event["event"] == "plan" and event.get("kept") is None:
                told = (
                    f"{event.get('schedule')} solved again after iteration {at} by measured costs: a new plan"
                )
                marks.append(Mark(at, "plan", whose + told, f"{whose}new plan", colour))
            elif event["event"] == "start":
                before, now = now, layout(event)
                told = f"{whose}resumed after iteration {at}"
                if before not in ("", now):
                    new = [part for part in now.split(", ") if part not in before.split(", ")]
                    label = f"{whose}resumed: {', '.join(new) or now}"
                    marks.append(Mark(at, "resume", f"{told}: layout {before} -> {now}", label, colour))
                elif at > 0:
                    marks.append(Mark(at, "resume", told, f"{whose}resumed", colour))
    return marks
