"""Lanes on one axis of time: boxes of what is done, with idle time between them, and curves of what is held meanwhile
(floor 0, pure)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tools.drawing.charts import nice_ticks, tick_text
from tools.drawing.page import (
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

WIDEST = 1040  # pixels: a plot is at most this wide for the text of its shortest box
_DIGIT, _AROUND = 6.4, 4  # pixels of a digit in a box, and beside its number
_THIN = 4  # pixels: a line around a narrower box would cover it

Share = Callable[[float], float]  # of the width, from the left, where a time is
Drawn = tuple[str, str, str]  # labels, stretched paths, texts


class Box(NamedTuple):
    """colour: as CSS has it. text: drawn where there is room. title: under the pointer."""

    start: float
    end: float
    colour: str
    text: str = ""
    title: str = ""


@dataclass(frozen=True)
class Lane:
    """Boxes in one row. gaps: idle time, behind them. heading: of the lanes from here on, instead of boxes."""

    label: str
    boxes: Sequence[Box] = ()
    gaps: Sequence[Box] = ()
    height: int = 20
    heading: str = ""

    def draw(self, y: float, share: Share, width: float) -> Drawn:
        """width: of the plot where it is narrowest, in pixels."""
        titled, plain, said = [], defaultdict[tuple[str, str | None], list[str]](list), []
        for box in [*self.gaps, *self.boxes]:
            left, right = round(WIDE * share(box.start)), round(WIDE * share(box.end))
            path = f"M{left} {y:g}H{max(right, left + 1)}V{y + self.height:g}H{left}z"
            room = width * share(box.end - box.start)
            stroke = "none" if room < _THIN else None
            if box.title:
                title = element("title", box.title)
                titled.append(element("path", title, fill=box.colour, stroke=stroke, d=path))
            else:
                plain[box.colour, stroke].append(path)
            if box.text and room >= _DIGIT * len(box.text) + _AROUND:
                style = ' class="gap"' if box.colour.startswith("var(") else ""
                x, middle = percent(share((box.start + box.end) / 2)), y + self.height / 2 + 3.5
                said.append(f'<text x="{x}" y="{middle:g}"{style}>{box.text}</text>')
        behind = (
            element("path", fill=colour, stroke=stroke, d="".join(paths))
            for (colour, stroke), paths in plain.items()
        )
        heading = text(self.heading, "0%", y + self.height - 6, class_="title") if self.heading else ""
        label = text(self.label, 0, y + self.height / 2 + 4)
        boxes = element("g", *behind, *titled, class_="bars")
        return label, boxes, heading + element("g", *said, class_="in")


@dataclass(frozen=True)
class Stack:
    """What is held over time, kinds on top of each other, their sum as a curve. moments: (from this time on, sums of
    kinds from below). most: what is as high as the strip. limit: a dashed line. said: lines at the end. alarm: the
    limit is exceeded."""

    label: str
    moments: Sequence[tuple[float, Sequence[float]]]
    colours: Sequence[str]
    most: float
    end: float
    limit: float | None = None
    said: Sequence[str] = ()
    alarm: bool = False
    height: int = 48

    def draw(self, y: float, share: Share, width: float) -> Drawn:
        """As a lane."""
        base, end, unit = y + self.height, round(WIDE * share(self.end)), (self.height - 4) / self.most
        # Of what is within a pixel or so, the most, and behind it the last.
        points: dict[int, Sequence[float]] = {}
        for at, sums in self.moments:
            x = round(WIDE * share(at) / 16) * 16
            points[x] = max(points.get(x, sums), sums, key=lambda one: one[-1])
            points[x + 8] = sums
        parts, outline = [], ""
        for kind, colour in reversed([*enumerate(self.colours)]):  # what lies above is behind
            path, before = f"M0 {base:g}", 0.0
            for x, sums in points.items():
                if sums[kind] != before:
                    before = sums[kind]
                    path += f"H{min(x, end)}V{base - before * unit:.1f}"
            outline = outline or element("path", class_="held", d=f"{path}H{end}")
            parts.append(element("path", fill=colour, d=f"{path}H{end}V{base:g}z"))
        parts.append(outline)
        baselines = [y + 11, y + 24]
        if self.limit is not None:
            line = base - self.limit * unit
            parts.append(element("path", class_="limit", d=f"M0 {line:.1f}H{WIDE}"))
            if line < y + 28:  # not across the words
                baselines = [line + 12, line + 25] if line < y + 12 else [line - 3, line + 12]
        outside = share(self.end) < 0.7  # there is room for words behind the end
        where = {"dx": 4, "text_anchor": "start"} if outside else {"dx": -4, "text_anchor": "end"}
        words = [
            text(
                said,
                percent(share(self.end)),
                baseline,
                class_=f"said{' over' * self.alarm}",
                **where,
            )
            for baseline, said in zip(baselines, self.said, strict=False)
        ]
        return text(self.label, 0, y + self.height / 2 + 4), "".join(parts), "".join(words)


@dataclass(frozen=True)
class Bracket:
    """A time from its start to its end, in words."""

    said: str
    start: float
    end: float
    label: str = ""
    height: int = 16

    def draw(self, y: float, share: Share, width: float) -> Drawn:
        """As a lane."""
        left, right = round(WIDE * share(self.start)), round(WIDE * share(self.end))
        path = f"M{left} {y + 9:g}v6m0 -3H{right}m0 -3v6"
        words = text(self.said, percent(share(self.start)), y + 9, dx=8, class_="said")
        return "", element("path", class_="axis", fill="none", d=path), words


Strip = Lane | Stack | Bracket


def lanes(
    title: str,
    strips: Sequence[Strip],
    *,
    span: float,
    time_name: str,
    keys: Iterable[Key] = (),
    note: str = "",
) -> Picture:
    """Strips under one another on one axis of time from 0 to `span`, wide enough for texts of the shortest boxes."""
    span = span or 1.0
    boxes = [box for strip in strips if isinstance(strip, Lane) for box in strip.boxes if box.end > box.start]
    needs = max(
        (span * (_DIGIT * len(box.text) + _AROUND) / (box.end - box.start) for box in boxes), default=0.0
    )
    least = math.ceil(min(max(needs, NARROWEST), WIDEST))
    drawn: list[Drawn] = []
    y = 2.0
    for strip in strips:
        drawn.append(strip.draw(y, lambda at: at / span, least))
        y += strip.height + (8 if isinstance(strip, Stack) else 3)
    labels, paths, texts = map("".join, zip(*drawn, strict=True))
    ticks = [(at / span, tick_text(at)) for at in nice_ticks(0, span, 9) if at <= span * (1 + 1e-9)]
    grid = (
        element("line", class_="grid tick", x1=percent(at), x2=percent(at), y1=0, y2=y) for at, _ in ticks
    )
    plot = "".join(grid) + stretched(y, paths) + texts + x_axis(ticks, y, time_name, left=True)
    label_width = 14 + round(LETTER * max(len(strip.label) for strip in strips))
    reach = {"data_x": f"0 {span!r}"}
    return Picture(title, labels, plot, round(y + 36), tuple(keys), label_width, least, note, reach)
