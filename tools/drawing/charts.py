"""Line charts: curves over the iterations of a run, with marks of what happened (floor 0, pure)."""

from __future__ import annotations

import dataclasses
import html
import itertools
import math
from collections.abc import Sequence

from megatron.core.words import brief, plain
from tools.drawing.page import (
    COLOURS,
    LETTER,
    NARROWEST,
    WIDE,
    Key,
    Picture,
    element,
    percent,
    stretched,
    text,
    x_axis,
)

MAX_POINTS = 500  # per line: more than there are pixels; keeps a page of a million iterations under 2 MB
MAX_HOVER = 120  # hover targets per line
MAX_MARKS = 100
MAX_GAPS = 100  # with more interruptions by NaN the line is drawn through; the caption counts them
LARGEST, SMALLEST = 1e200, 1e-200  # beyond these differences and powers of ten leave a float's range
TOP, AXIS = 30, 34  # pixels above a chart's plot, for labels of marks, and below it

Points = Sequence[tuple[float, float]]  # (iteration or another x, value)


@dataclasses.dataclass(frozen=True)
class Series:
    """One named curve. points: drawn as dots on a line (few, as evaluations are). pale: behind another. broad: of what
    was planned, to be seen behind what was measured, in whose legend entry it is. colour: its number; None: its place
    among the series."""

    name: str
    values: Points
    points: bool = False
    pale: bool = False
    broad: bool = False
    colour: int | None = None


@dataclasses.dataclass(frozen=True)
class Mark:
    """Something that happened at an iteration or another x: kind "checkpoint" (a triangle), "resume" or "plan" (lines).
    label: drawn beside a line where there is room; text: the whole story, under the pointer. colour: of a curve."""

    at: float
    kind: str
    text: str
    label: str = ""
    colour: int | None = None


def thin(values: Points, limit: int = MAX_POINTS) -> list[tuple[float, float]]:
    """At most `limit` points in order: of each stretch its lowest and highest, so that no spike is lost.

    The first and the last point always stay.
    """
    if len(values) <= limit:
        return list(values)
    stretches = max(1, (limit - 2) // 2)
    kept = {0, len(values) - 1}
    for k in range(stretches):
        indices = range(k * len(values) // stretches, (k + 1) * len(values) // stretches)
        kept |= {min(indices, key=lambda i: values[i][1]), max(indices, key=lambda i: values[i][1])}
    return [values[i] for i in sorted(kept)]


def nice_ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten) that cover [low, high], about `count` of them."""
    assert low < high, f"[{low}, {high}] is empty"
    raw = (high - low) / max(1, count - 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(f * power for f in (1.0, 2.0, 5.0, 10.0) if f * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(k * step, 12 - math.floor(math.log10(step))) for k in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten that cover [low, high]; at most about eight."""
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    last = max(last, first + 1)
    stride = max(1, math.ceil((last - first) / 7))
    return [10.0**k for k in range(first, last + stride, stride)]


def tick_text(value: float) -> str:
    """Short and exact: 0, 0.002, 12.5k, 3M; on axes over so many powers of ten that letters end, 1e-9."""
    if not value or 1e-6 <= abs(value) < 1e15:
        return brief(value, 6)
    mantissa, exponent = f"{value:.3e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    marks: Sequence[Mark] = (),
    log_y: bool = False,
    from_zero: bool = False,
    x_name: str = "iteration",
    note: str = "",
    height: int = 190,
    hover: bool = True,
    reach: Sequence[float] = (),
) -> Picture:
    """One or more series over the iteration, or what else `x_name` says. hover: values under the pointer. reach: what
    the horizontal axis covers, whatever the series do.

    Values that are not finite, above 1e200 (with log_y: not positive) interrupt their line and are counted in the
    legend.
    """
    everything = [(x, y) for s in series for x, y in s.values if _is_drawable(y, log_y)]
    numbers = [(at if s.colour is None else s.colour) % COLOURS for at, s in enumerate(series)]
    keys = [
        Key(s.name, f"var(--{'p' if s.pale else 's'}{number})", "dot" if s.points else "line")
        for s, number in zip(series, numbers, strict=True)
        if not (s.broad and numbers.count(number) > 1)
    ]
    if len(keys) < len(series):
        keys.append(Key("broad and pale: planned"))
    if missing := sum(len(s.values) for s in series) - len(everything):
        keys.append(Key(f"{missing} values are not drawable (NaN or infinite)"))
    if not everything:
        return Picture(title, "", "", 0, tuple(keys), note=note)
    axes = _Axes(everything, reach, height, log_y=log_y, from_zero=from_zero)
    labels, grid = axes.grid(x_name)
    drawn = sorted(zip(series, numbers, strict=True), key=lambda pair: not pair[0].pale)  # pale ones behind
    curves = (axes.curve(s, number, x_name if hover else None) for s, number in drawn)
    plot = "".join([grid, axes.marks(marks), *curves])
    return Picture(title, labels, plot, TOP + height + AXIS, tuple(keys), note=note, axes=axes.facts)


def _is_drawable(value: float, log_y: bool) -> bool:
    return abs(value) <= LARGEST and (value >= SMALLEST or not log_y)  # NaN is not


class _Axes:
    """Data to percent and pixels, and the parts of the drawing."""

    def __init__(
        self, points: Points, reach: Sequence[float], height: int, *, log_y: bool, from_zero: bool
    ) -> None:
        self._log_y, self._bottom = log_y, TOP + height
        xs, ys = [*reach, *(x for x, _ in points)], [y for _, y in points]
        self._low = min(xs)
        self._span = max(xs) - self._low or 1.0
        low, high = min(ys), max(ys)
        if from_zero:
            low, high = min(0.0, low), max(0.0, high)
        if not log_y and high - low <= max(1e-12 * max(abs(high), abs(low)), SMALLEST):
            pad = abs(high) * 0.1 or 1.0
            low, high = low - pad, high + pad
        self._y_ticks = log_ticks(low, high) if log_y else nice_ticks(low, high)

    @property
    def facts(self) -> dict[str, str]:
        """As zoom.js reads them."""
        ends = f"{self._y_ticks[0]!r} {self._bottom} {self._y_ticks[-1]!r} {TOP} {int(self._log_y)}"
        return {"data_x": f"{self._low!r} {self._low + self._span!r}", "data_y": ends}

    def share(self, x: float) -> float:
        """Of the width, from the left."""
        return (x - self._low) / self._span

    def y(self, value: float) -> float:
        values = self._y_ticks[0], self._y_ticks[-1], value
        low, high, at = map(math.log10, values) if self._log_y else values
        return round(self._bottom - (at - low) / (high - low) * (self._bottom - TOP), 2)

    def grid(self, x_name: str) -> tuple[str, str]:
        """Labels of the vertical axis; lines and the horizontal axis."""
        labels, lines = [], []
        for tick in self._y_ticks:
            y = self.y(tick)
            labels.append(text(tick_text(tick), 45, y + 4, text_anchor="end"))
            lines.append(element("line", class_="grid tick", x1="0%", x2="100%", y1=y, y2=y))
        ticks = nice_ticks(self._low, self._low + self._span, 6)
        ticks = [t for t in ticks if self._low <= t <= self._low + self._span]
        if x_name == "iteration":
            ticks = [t for t in ticks if t == int(t)]
        name = f"{x_name} (logarithmic vertical axis)" if self._log_y else x_name
        lines.append(x_axis([(self.share(t), tick_text(t)) for t in ticks], self._bottom, name))
        return "".join(labels), "".join(lines)

    def marks(self, marks: Sequence[Mark]) -> str:
        parts, labels, ends = [], [], [0.0, 0.0]  # ends: of the labels in two rows above the plot, as shares
        inside = sorted((mark for mark in marks if 0 <= self.share(mark.at) <= 1), key=lambda mark: mark.at)
        kinds = ([mark for mark in inside if (mark.kind == "checkpoint") is lower] for lower in (True, False))
        for mark in itertools.chain(*(of[:: max(1, math.ceil(len(of) / MAX_MARKS))] for of in kinds)):
            share, title = self.share(mark.at), element("title", html.escape(mark.text))
            x = percent(share)
            if mark.kind == "checkpoint":
                path = element("path", title, class_="checkpoint", d="M-4 0H4L0 -8Z")
                parts.append(element("svg", path, x=x, y=self._bottom, class_="plot"))
                continue
            kind = mark.kind if mark.colour is None else f"{mark.kind} s{mark.colour % COLOURS}"
            parts.append(element("line", title, class_=kind, x1=x, y1=4, x2=x, y2=self._bottom))
            long = LETTER * len(mark.label) / NARROWEST
            begin, anchor = (share, "start") if share + long <= 1 else (max(0.0, share - long), "end")
            row = next((row for row, end in enumerate(ends) if begin >= end), None)
            if mark.label and row is not None:
                ends[row] = begin + long
                where = {"dx": 4 if anchor == "start" else -4, "text_anchor": anchor}
                labels.append(text(mark.label, x, TOP - 18 + 12 * row, class_="said", **where))
        return "".join([*parts, *labels])

    def curve(self, series: Series, colour: int, hover: str | None) -> str:
        """A line for each run of drawable values; dots; targets of the pointer. hover: what x is; None: no targets."""
        groups = itertools.groupby(series.values, lambda point: _is_drawable(point[1], self._log_y))
        runs = [list(points) for drawable, points in groups if drawable]
        if not runs:
            return ""
        if len(runs) > MAX_GAPS:
            runs = [[point for run in runs for point in run]]
        total, kept, parts = sum(map(len, runs)), [], []
        for run in runs:
            points = thin(run, max(4, MAX_POINTS * len(run) // total))
            kept += points
            line = "L".join(f"{round(self.share(x) * WIDE)} {self.y(y):g}" for x, y in points)
            parts.append(element("path", class_="line", d=f"M{line}"))
        parts = [stretched(self._bottom, *parts)]
        for x, y in kept if series.points else [run[0] for run in runs if len(run) == 1]:
            parts.append(element("circle", class_="dot", cx=percent(self.share(x)), cy=self.y(y), r=3))
        name = html.escape(series.name)
        targets = [] if hover is None else [*kept[: -1 : max(1, math.ceil(len(kept) / MAX_HOVER))], kept[-1]]
        for x, y in targets:
            title = element("title", f"{hover} {plain(x, 6)}: {name} {plain(y, 6)}")
            parts.append(element("circle", title, class_="hit", cx=percent(self.share(x)), cy=self.y(y), r=5))
        return element("g", *parts, class_=f"{'p' if series.pale else 's'}{colour}{' broad' * series.broad}")
