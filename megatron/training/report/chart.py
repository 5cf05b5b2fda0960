"""A line chart as inline SVG: axes with round ticks, a legend, hover titles. Pure; colours come from CSS."""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Callable, Sequence

MAX_POINTS = 500  # per line: more than there are pixels; keeps a page of a million iterations under 2 MB
MAX_HOVER = 120  # hover targets per line
MAX_MARKS = 100
MAX_GAPS = 100  # with more interruptions by NaN the line is drawn through; the caption counts them
MARGIN_LEFT, MARGIN_RIGHT, MARGIN_TOP, MARGIN_BOTTOM = 62, 14, 14, 40
COLOURS = 6

LARGEST, SMALLEST = 1e200, 1e-200  # beyond these differences and powers of ten leave a float's range

Point = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Series:
    """One named curve. points: drawn as dots on a line (few, as evaluations are)."""

    name: str
    values: Sequence[tuple[int, float]]
    points: bool = False


@dataclasses.dataclass(frozen=True)
class Mark:
    """Something that happened at an iteration: kind "checkpoint" (a triangle) or "resume" (a dashed line)."""

    at: int
    kind: str
    text: str


def thin(values: Sequence[tuple[int, float]], limit: int = MAX_POINTS) -> list[tuple[int, float]]:
    """At most `limit` points in order: of each stretch its lowest and highest, so that no spike is lost.

    The first and the last point always stay.
    """
    if len(values) <= limit:
        return list(values)
    stretches = max(1, (limit - 2) // 2)
    kept = {0, len(values) - 1}
    for k in range(stretches):
        indices = range(k * len(values) // stretches, (k + 1) * len(values) // stretches)
        kept.add(min(indices, key=lambda i: values[i][1]))
        kept.add(max(indices, key=lambda i: values[i][1]))
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
    if value == 0:
        return "0"
    size = abs(value)
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if 1e15 > size >= limit:
            unit = 1e3 if suffix == "k" else limit
            return f"{value / unit:.6g}{suffix}"
    if size < 1e-3 or size >= 1e15:
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
    width, height = (1080, 340) if wide else (520, 260)
    drawable = [[(float(x), y) for x, y in s.values if _is_drawable(y, log_y)] for s in series]
    missing = sum(len(s.values) - len(points) for s, points in zip(series, drawable, strict=True))
    name = html.escape(title)
    kind = ' class="wide"' if wide else ""
    caption = f"<figcaption>{name}{_legend(series)}{_missing(missing)}</figcaption>"
    everything = [point for points in drawable for point in points]
    if not everything:
        return f'<figure{kind}>{caption}<div class="empty">no values</div></figure>'
    scale = _Scale.of(everything, width, height, log_y=log_y, from_zero=from_zero)
    parts = [
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{html.escape(title, quote=True)}">',
        *_axes(scale, log_y),
        *_marks(marks, scale),
    ]
    for index, s in enumerate(series):
        parts += _series(s, index % COLOURS, scale, log_y)
    return f"<figure{kind}>{caption}{''.join(parts)}</svg></figure>"


def _is_drawable(value: float, log_y: bool) -> bool:
    return abs(value) <= LARGEST and (value >= SMALLEST or not log_y)  # NaN is not


@dataclasses.dataclass(frozen=True)
class _Scale:
    """Data to pixels."""

    x_ticks: Sequence[float]
    y_ticks: Sequence[float]
    x_low: float
    x_high: float
    width: int
    height: int
    map_y: Callable[[float], float]

    @classmethod
    def of(cls, points: Sequence[Point], width: int, height: int, *, log_y: bool, from_zero: bool) -> _Scale:
        xs, ys = [x for x, _ in points], [y for _, y in points]
        x_low, x_high = min(xs), max(xs)
        x_high = x_high if x_high > x_low else x_low + 1
        low, high = min(ys), max(ys)
        if from_zero:
            low, high = min(0.0, low), max(0.0, high)
        if log_y:
            y_ticks = log_ticks(low, high)
            map_y: Callable[[float], float] = math.log10
        else:
            if high - low <= max(1e-12 * max(abs(high), abs(low)), SMALLEST):
                pad = abs(high) * 0.1 or 1.0
                low, high = low - pad, high + pad
            y_ticks = nice_ticks(low, high)
            map_y = float
        count = 10 if width > 800 else 6
        x_ticks = [t for t in nice_ticks(x_low, x_high, count) if x_low <= t <= x_high and t == int(t)]
        return cls(x_ticks, y_ticks, x_low, x_high, width, height, map_y)

    def x(self, value: float) -> float:
        share = (value - self.x_low) / (self.x_high - self.x_low)
        return round(MARGIN_LEFT + share * (self.width - MARGIN_LEFT - MARGIN_RIGHT), 1)

    def y(self, value: float) -> float:
        low, high = self.map_y(self.y_ticks[0]), self.map_y(self.y_ticks[-1])
        share = (self.map_y(value) - low) / (high - low)
        return round(self.bottom - share * (self.bottom - MARGIN_TOP), 1)

    @property
    def bottom(self) -> int:
        return self.height - MARGIN_BOTTOM

    @property
    def right(self) -> int:
        return self.width - MARGIN_RIGHT


def _axes(scale: _Scale, log_y: bool) -> list[str]:
    parts = []
    for tick in scale.y_ticks:
        y = scale.y(tick)
        parts.append(f'<line class="grid" x1="{MARGIN_LEFT}" y1="{y}" x2="{scale.right}" y2="{y}"/>')
        parts.append(f'<text x="{MARGIN_LEFT - 8}" y="{y + 4}" text-anchor="end">{tick_text(tick)}</text>')
    for tick in scale.x_ticks:
        x = scale.x(tick)
        parts.append(f'<line class="axis" x1="{x}" y1="{scale.bottom}" x2="{x}" y2="{scale.bottom + 5}"/>')
        parts.append(f'<text x="{x}" y="{scale.bottom + 19}" text-anchor="middle">{tick_text(tick)}</text>')
    bottom = scale.bottom
    parts.append(f'<line class="axis" x1="{MARGIN_LEFT}" y1="{bottom}" x2="{scale.right}" y2="{bottom}"/>')
    middle = (MARGIN_LEFT + scale.right) / 2
    label = "iteration (logarithmic vertical axis)" if log_y else "iteration"
    parts.append(f'<text x="{middle}" y="{scale.height - 4}" text-anchor="middle">{label}</text>')
    return parts


def _marks(marks: Sequence[Mark], scale: _Scale) -> list[str]:
    shown = [mark for mark in marks if scale.x_low <= mark.at <= scale.x_high]
    stride = max(1, math.ceil(len(shown) / MAX_MARKS))
    parts = []
    for mark in shown[::stride]:
        x, text = scale.x(mark.at), html.escape(mark.text)
        if mark.kind == "resume":
            line = f'<line class="resume" x1="{x}" y1="{MARGIN_TOP}" x2="{x}" y2="{scale.bottom}">'
            parts.append(f"{line}<title>{text}</title></line>")
        else:
            low, high = scale.bottom - 1, scale.bottom - 9
            path = f"M{x - 4} {low}L{x + 4} {low}L{x} {high}Z"
            parts.append(f'<path class="checkpoint" d="{path}"><title>{text}</title></path>')
    return parts


def _series(series: Series, colour: int, scale: _Scale, log_y: bool) -> list[str]:
    runs: list[list[tuple[int, float]]] = [[]]
    for x, y in series.values:
        if _is_drawable(y, log_y):
            runs[-1].append((x, y))
        elif runs[-1]:
            runs.append([])
    runs = [run for run in runs if run]
    if len(runs) > MAX_GAPS:
        runs = [[point for run in runs for point in run]]
    total = sum(map(len, runs))
    if not total:
        return []
    parts, kept = [], []
    for run in runs:
        points = thin(run, max(4, MAX_POINTS * len(run) // total))
        kept += points
        line = "L".join(f"{scale.x(x)} {scale.y(y)}" for x, y in points)
        parts.append(f'<path class="line" d="M{line}"/>')
    lonely = [run[0] for run in runs if len(run) == 1]
    for x, y in kept if series.points else lonely:
        parts.append(f'<circle class="dot" cx="{scale.x(x)}" cy="{scale.y(y)}" r="3"/>')
    stride = max(1, math.ceil(len(kept) / MAX_HOVER))
    name = html.escape(series.name)
    for x, y in [*kept[:-1:stride], kept[-1]]:
        title = f"<title>iteration {x}: {name} {y:.6g}</title>"
        parts.append(f'<circle class="hit" cx="{scale.x(x)}" cy="{scale.y(y)}" r="5">{title}</circle>')
    return [f'<g class="s{colour}">', *parts, "</g>"]


def _legend(series: Sequence[Series]) -> str:
    return "".join(
        f'<span class="key s{index % COLOURS}"><i{_dot(s)}></i>{html.escape(s.name)}</span>'
        for index, s in enumerate(series)
    )


def _dot(series: Series) -> str:
    return ' class="dot"' if series.points else ""


def _missing(count: int) -> str:
    return f'<span class="key">{count} values are not drawable (NaN or infinite)</span>' if count else ""
