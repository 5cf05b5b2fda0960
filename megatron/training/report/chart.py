"""What a page is drawn with: its style, elements of HTML and SVG, line charts. Pure; colours come from CSS alone."""

from __future__ import annotations

import dataclasses
import html
import itertools
import math
from collections.abc import Iterable, Sequence

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


def element(name: str, *content: str, **attributes: object) -> str:
    """An element of HTML or SVG. content: markup. attributes: texts, which are escaped here; None is left out, `class_`
    is class, other `_` are `-`."""
    said = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{said}>{''.join(content)}</{name}>"


def page(title: str, body: Iterable[str]) -> str:
    """A whole page in this style, which asks nobody for anything. body: markup; empty parts are left out."""
    head = (
        '<meta charset="utf-8"/>\n<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>"
    )
    inside = "\n".join(filter(None, body))
    return f'<!DOCTYPE html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n{inside}\n</body>\n</html>\n'


def table(title: str, rows: Iterable[Iterable[str]], *, note: str = "", is_open: bool = False) -> str:
    """A table that can be folded. rows: cells, with their tags."""
    lines = (element("tr", *row) for row in rows)
    summary = element("summary", html.escape(title))
    return element("details", summary, note, element("table", *lines), open="open" if is_open else None)


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
    keys = [
        element(
            "span",
            element("i", class_="dot" if s.points else None),
            html.escape(s.name),
            class_=f"key s{i % COLOURS}",
        )
        for i, s in enumerate(series)
    ]
    if missing := sum(len(s.values) for s in series) - len(everything):
        keys.append(element("span", f"{missing} values are not drawable (NaN or infinite)", class_="key"))
    drawn = element("div", "no values", class_="empty")
    if everything:
        size = (1080, 340) if wide else (520, 260)
        axes = _Axes(everything, *size, log_y=log_y, from_zero=from_zero)
        lines = (axes.curve(s, i % COLOURS) for i, s in enumerate(series))
        box = "0 0 {} {}".format(*size)
        drawn = element(
            "svg", axes.grid(), axes.marks(marks), *lines, viewBox=box, role="img", aria_label=title
        )
    caption = element("figcaption", html.escape(title), *keys)
    return element("figure", caption, drawn, class_="wide" if wide else None)


def _is_drawable(value: float, log_y: bool) -> bool:
    return abs(value) <= LARGEST and (value >= SMALLEST or not log_y)  # NaN is not


class _Axes:
    """Data to pixels, and the parts of the drawing."""

    def __init__(self, points: Points, width: int, height: int, *, log_y: bool, from_zero: bool) -> None:
        self._log_y, self._height = log_y, height
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
        return round(LEFT + share * (self._right - LEFT), 1)

    def y(self, value: float) -> float:
        values = self._y_ticks[0], self._y_ticks[-1], value
        low, high, at = map(math.log10, values) if self._log_y else values
        return round(self._bottom - (at - low) / (high - low) * (self._bottom - TOP), 1)

    def grid(self) -> str:
        bottom, right = self._bottom, self._right
        parts = [element("line", class_="axis", x1=LEFT, y1=bottom, x2=right, y2=bottom)]
        for tick in self._y_ticks:
            y = self.y(tick)
            parts.append(element("line", class_="grid", x1=LEFT, y1=y, x2=right, y2=y))
            parts.append(element("text", tick_text(tick), x=LEFT - 8, y=y + 4, text_anchor="end"))
        for tick in self._x_ticks:
            x = self.x(tick)
            parts.append(element("line", class_="axis", x1=x, y1=bottom, x2=x, y2=bottom + 5))
            parts.append(element("text", tick_text(tick), x=x, y=bottom + 19, text_anchor="middle"))
        label = "iteration (logarithmic vertical axis)" if self._log_y else "iteration"
        parts.append(element("text", label, x=(LEFT + right) / 2, y=self._height - 4, text_anchor="middle"))
        return "".join(parts)

    def marks(self, marks: Sequence[Mark]) -> str:
        shown = [mark for mark in marks if self._x_low <= mark.at <= self._x_high]
        parts = []
        for mark in shown[:: max(1, math.ceil(len(shown) / MAX_MARKS))]:
            x, bottom, title = self.x(mark.at), self._bottom, element("title", html.escape(mark.text))
            if mark.kind == "resume":
                parts.append(element("line", title, class_="resume", x1=x, y1=TOP, x2=x, y2=bottom))
            else:
                path = f"M{x - 4} {bottom - 1}L{x + 4} {bottom - 1}L{x} {bottom - 9}Z"
                parts.append(element("path", title, class_="checkpoint", d=path))
        return "".join(parts)

    def curve(self, series: Series, colour: int) -> str:
        """A line for each run of drawable values; dots; hover targets."""
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
            line = "L".join(f"{self.x(x)} {self.y(y)}" for x, y in points)
            parts.append(element("path", class_="line", d=f"M{line}"))
        for x, y in kept if series.points else [run[0] for run in runs if len(run) == 1]:
            parts.append(element("circle", class_="dot", cx=self.x(x), cy=self.y(y), r=3))
        name = html.escape(series.name)
        for x, y in [*kept[: -1 : max(1, math.ceil(len(kept) / MAX_HOVER))], kept[-1]]:
            title = element("title", f"iteration {x}: {name} {y:.6g}")
            parts.append(element("circle", title, class_="hit", cx=self.x(x), cy=self.y(y), r=5))
        return element("g", *parts, class_=f"s{colour}")


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
