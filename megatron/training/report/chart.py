"""A line chart as inline SVG: axes with round ticks, a legend, hover titles. Pure; colours come from CSS."""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Sequence

MAX_POINTS = 500  # per line: more than there are pixels; keeps a page of a million iterations under 2 MB
MAX_HOVER = 120  # hover targets per line
MAX_MARKS = 100
MAX_GAPS = 100  # with more interruptions by NaN the line is drawn through; the caption counts them
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 14, 40  # margins
COLOURS = 6

LARGEST, SMALLEST = 1e200, 1e-200  # beyond these differences and powers of ten leave a float's range

Points = Sequence[tuple[int, float]]  # (iteration, value)


@dataclasses.dataclass(frozen=True)
class Series:
    """One named curve. points: drawn as dots on a line (few, as evaluations are)."""

    name: str
    values: Points
    points: bool = False


@dataclasses.dataclass(frozen=True)
class Mark:
    """Something that happened at an iteration: kind "checkpoint" (a triangle) or "resume" (a dashed line)."""

    at: int
    kind: str
    text: str


def thin(values: Points, limit: int = MAX_POINTS) -> list[tuple[int, float]]:
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
    """Short and exact: 0, 0.002, 1.5e-05, 12.5k, 3M."""
    size = abs(value)
    for limit, unit, suffix in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if 1e15 > size >= limit:
            return f"{value / unit:.6g}{suffix}"
    if 0 < size < 1e-3 or size >= 1e15:
        mantissa, exponent = f"{value:.3e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    return f"{value:.6g}"


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    marks: Sequence[Mark] = (),
    log_y: bool = False,
    from_zero: bool = False,
    wide: bool = False,
) -> str:
    """A `<figure>` with the chart of one or more series over the iteration.

    Values that are not finite, above 1e200 (with log_y: not positive) interrupt their line and are counted in the
    caption.
    """
    everything = [(x, y) for s in series for x, y in s.values if _is_drawable(y, log_y)]
    keys = ""
    for i, s in enumerate(series):
        dot = ' class="dot"' if s.points else ""
        keys += f'<span class="key s{i % COLOURS}"><i{dot}></i>{html.escape(s.name)}</span>'
    missing = sum(len(s.values) for s in series) - len(everything)
    if missing:
        keys += f'<span class="key">{missing} values are not drawable (NaN or infinite)</span>'
    kind = ' class="wide"' if wide else ""
    head = f"<figure{kind}><figcaption>{html.escape(title)}{keys}</figcaption>"
    if not everything:
        return f'{head}<div class="empty">no values</div></figure>'
    axes = _Axes(everything, 1080 if wide else 520, 340 if wide else 260, log_y=log_y, from_zero=from_zero)
    label = html.escape(title, quote=True)
    svg = f'<svg viewBox="0 0 {axes.width} {axes.height}" role="img" aria-label="{label}">'
    lines = "".join(axes.curve(s, i % COLOURS) for i, s in enumerate(series))
    return f"{head}{svg}{axes.grid()}{axes.marks(marks)}{lines}</svg></figure>"


def _is_drawable(value: float, log_y: bool) -> bool:
    return abs(value) <= LARGEST and (value >= SMALLEST or not log_y)  # NaN is not


class _Axes:
    """Data to pixels, and the parts of the drawing."""

    def __init__(self, points: Points, width: int, height: int, *, log_y: bool, from_zero: bool) -> None:
        self.width, self.height, self._log_y = width, height, log_y
        self._right, self._bottom = width - RIGHT, height - BOTTOM
        xs, ys = [x for x, _ in points], [y for _, y in points]
        self._x_low, self._x_high = min(xs), max(max(xs), min(xs) + 1)
        low, high = min(ys), max(ys)
        if from_zero:
            low, high = min(0.0, low), max(0.0, high)
        if not log_y and high - low <= max(1e-12 * max(abs(high), abs(low)), SMALLEST):
            pad = abs(high) * 0.1 or 1.0
            low, high = low - pad, high + pad
        self._y_ticks = log_ticks(low, high) if log_y else nice_ticks(low, high)
        ticks = nice_ticks(self._x_low, self._x_high, 10 if width > 800 else 6)
        self._x_ticks = [t for t in ticks if self._x_low <= t <= self._x_high and t == int(t)]

    def x(self, value: float) -> float:
        share = (value - self._x_low) / (self._x_high - self._x_low)
        return round(LEFT + share * (self.width - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        values = self._y_ticks[0], self._y_ticks[-1], value
        low, high, at = map(math.log10, values) if self._log_y else values
        return round(self._bottom - (at - low) / (high - low) * (self._bottom - TOP), 1)

    def grid(self) -> str:
        bottom, right, parts = self._bottom, self._right, []
        for tick in self._y_ticks:
            y = self.y(tick)
            parts.append(f'<line class="grid" x1="{LEFT}" y1="{y}" x2="{right}" y2="{y}"/>')
            parts.append(f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{tick_text(tick)}</text>')
        for tick in self._x_ticks:
            x = self.x(tick)
            parts.append(f'<line class="axis" x1="{x}" y1="{bottom}" x2="{x}" y2="{bottom + 5}"/>')
            parts.append(f'<text x="{x}" y="{bottom + 19}" text-anchor="middle">{tick_text(tick)}</text>')
        parts.append(f'<line class="axis" x1="{LEFT}" y1="{bottom}" x2="{right}" y2="{bottom}"/>')
        label = "iteration (logarithmic vertical axis)" if self._log_y else "iteration"
        middle = (LEFT + right) / 2
        parts.append(f'<text x="{middle}" y="{self.height - 4}" text-anchor="middle">{label}</text>')
        return "".join(parts)

    def marks(self, marks: Sequence[Mark]) -> str:
        shown = [mark for mark in marks if self._x_low <= mark.at <= self._x_high]
        parts = []
        for mark in shown[:: max(1, math.ceil(len(shown) / MAX_MARKS))]:
            x, bottom, title = self.x(mark.at), self._bottom, f"<title>{html.escape(mark.text)}</title>"
            if mark.kind == "resume":
                line = f'<line class="resume" x1="{x}" y1="{TOP}" x2="{x}" y2="{bottom}">'
                parts.append(f"{line}{title}</line>")
            else:
                path = f"M{x - 4} {bottom - 1}L{x + 4} {bottom - 1}L{x} {bottom - 9}Z"
                parts.append(f'<path class="checkpoint" d="{path}">{title}</path>')
        return "".join(parts)

    def curve(self, series: Series, colour: int) -> str:
        """A line for each run of drawable values; dots; hover targets."""
        runs: list[list[tuple[int, float]]] = [[]]
        for x, y in series.values:
            if _is_drawable(y, self._log_y):
                runs[-1].append((x, y))
            elif runs[-1]:
                runs.append([])
        runs = [run for run in runs if run]
        if not runs:
            return ""
        if len(runs) > MAX_GAPS:
            runs = [[point for run in runs for point in run]]
        total, kept, parts = sum(map(len, runs)), [], []
        for run in runs:
            points = thin(run, max(4, MAX_POINTS * len(run) // total))
            kept += points
            line = "L".join(f"{self.x(x)} {self.y(y)}" for x, y in points)
            parts.append(f'<path class="line" d="M{line}"/>')
        for x, y in kept if series.points else [run[0] for run in runs if len(run) == 1]:
            parts.append(f'<circle class="dot" cx="{self.x(x)}" cy="{self.y(y)}" r="3"/>')
        name = html.escape(series.name)
        for x, y in [*kept[: -1 : max(1, math.ceil(len(kept) / MAX_HOVER))], kept[-1]]:
            title = f"<title>iteration {x}: {name} {y:.6g}</title>"
            parts.append(f'<circle class="hit" cx="{self.x(x)}" cy="{self.y(y)}" r="5">{title}</circle>')
        return f'<g class="s{colour}">{"".join(parts)}</g>'
