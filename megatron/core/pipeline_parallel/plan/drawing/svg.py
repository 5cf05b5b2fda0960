"""Simulated plans as SVG: a lane a rank, a box a computation; below a rank's computations its gathers and reductions,
and what it holds over time."""

from __future__ import annotations

import html
import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron.core.pipeline_parallel.plan.drawing.held_over_time import (
    bars,
    counts_bytes,
    held_over_time,
    limits_in_bytes,
    summary,
)
from megatron.core.pipeline_parallel.plan.ir import HSDP_ALL_REDUCE, REDUCE, UNSHARD, Kind
from megatron.core.pipeline_parallel.plan.simulate import Simulation
from megatron.core.pipeline_parallel.plan.text import size_text

COLOURS = ("#4c8bd6", "#5fb58a", "#e0b04a", "#4fa3a0")  # F, B, W, BW
MOST_BOXES = 6000  # that are drawn with a tooltip each
_LETTER = 5.5  # pixels of a digit
_LANE_HEIGHT, _MEMORY_HEIGHT, _GAP = 10, 60, 14
_WIRE = {
    UNSHARD: ("gather", "#e08a3c"),
    REDUCE: ("reduction", "#b03a5b"),
    HSDP_ALL_REDUCE: ("sum over instances", "#7a4fa3"),
}
_MEMORY = (  # from below
    ("states at rest", "#8d99a6"),
    ("activations", "#9fc3ea"),
    ("gathered weights", "#f3c08f"),
    ("whole gradients", "#cf6f8a"),
    ("gradients under way", "#7d2340"),
)
_LIMIT = "#c0392b"


@dataclass(frozen=True)
class Lane:
    """One horizontal strip of a picture: a rank of a simulation, and what stands before it."""

    label: str
    simulation: Simulation
    rank: int


class Strips:
    """What is drawn below the lanes of one simulation. limits: by rank, in the unit of activations, for plans without
    gathers and reductions; others know what limit they were made for. unit: of what is held, where that is not bytes.
    at_rest: by rank, else as units say. height: of a rank's strips. left, right: room for their texts. peaks: by rank,
    the most that it holds. most: what is as high as a strip."""

    left, right = 52, 96

    def __init__(
        self,
        simulation: Simulation,
        limits: Sequence[float] | None,
        unit: str,
        at_rest: Sequence[float] | None = None,
    ) -> None:
        self.simulation, self.lanes = simulation, simulation.timeline.lanes
        self.limits = limits_in_bytes(simulation) if self.lanes else limits
        self.unit = "bytes" if counts_bytes(simulation) else unit
        self.rows = simulation.plan.rows
        self._held: list[list[tuple[float, list[float]]]] = []  # by rank: time, sums of kinds from below
        for rank, held in enumerate(held_over_time(simulation)):
            of_units = self.lanes[rank].units.shard_bytes if self.lanes else 0.0
            rest = float(of_units if at_rest is None else at_rest[rank])
            moments = [(0.0, [rest] * len(_MEMORY))]
            for at, one in held:
                kinds = (rest, one.activation, one.gathered, one.gradients, one.under_way)
                moments.append((at, [*itertools.accumulate(kinds)]))
            self._held.append(moments)
        self.peaks = [max(sums[-1] for _, sums in held) for held in self._held]
        self.most = max(*self.peaks, *(self.limits or (0.0,))) or 1.0
        self.height = (_LANE_HEIGHT if self.lanes else 0) + _MEMORY_HEIGHT + _GAP

    @property
    def kinds(self) -> list[tuple[str, str]]:
        """(name, colour) of what is drawn."""
        issued = {op[0] for row in self.rows for op in row} if self.lanes else ()
        every = [[0.0, *sums] for held in self._held for _, sums in held]
        held = (one for at, one in enumerate(_MEMORY) if any(sums[at + 1] > sums[at] for sums in every))
        return [*(one for kind, one in _WIRE.items() if kind in issued), *held]

    def draw(self, rank: int, x: float, y: float, scale: float) -> list[str]:
        """x: of time 0, scale: pixels in a unit of time."""
        parts = self._draw_wire(rank, x, y, scale) if self.lanes else []
        y += _LANE_HEIGHT if self.lanes else 0
        base, end = y + _MEMORY_HEIGHT, x + self.simulation.makespan * scale
        parts += self._draw_memory(rank, x, y, scale)
        peak, limit = self.peaks[rank], self.limits[rank] if self.limits else float("inf")
        over = peak > limit + 1e-9 * max(1.0, limit)
        texts = [(_LIMIT if over else "#222", f"peak {size_text(peak, self.unit)}{' !' * over}")]
        if self.limits is not None:
            path = f"M{x:g} {base - limit * self._pixels:.1f}H{end + 4:.1f}"
            parts.append(f'<path stroke="{_LIMIT}" stroke-dasharray="4 2" fill="none" d="{path}"/>')
            texts.insert(0, (_LIMIT, f"limit {size_text(limit, self.unit)}"))
        parts.append(f'<text x="4" y="{base - 16:g}" fill="#666">memory</text>')
        for line, (colour, text) in enumerate(texts):
            parts.append(f'<text x="{end + 8:.1f}" y="{y + 9 + 12 * line:g}" fill="{colour}">{text}</text>')
        if rank + 1 == len(self.rows):  # the axis of all
            for time in (self.simulation.makespan * quarter / 4 for quarter in range(5)):
                place = f'x="{x + time * scale:.1f}" y="{base + 10:g}" text-anchor="middle"'
                parts.append(f'<text {place} fill="#666">{time:.4g}</text>')
        return parts

    @property
    def _pixels(self) -> float:
        return (_MEMORY_HEIGHT - 4) / self.most

    def _draw_memory(self, rank: int, x: float, y: float, scale: float) -> list[str]:
        base, end = y + _MEMORY_HEIGHT, x + self.simulation.makespan * scale
        parts = [f'<path fill="#f4f4f4" d="M{x:g} {y + 2:g}H{end:.1f}V{base:g}H{x:g}z"/>']
        # Of what is within half a pixel, the most, and behind it the last.
        points: dict[float, list[float]] = {}
        for at, sums in self._held[rank]:
            column = round(2 * at * scale) / 2
            points[column] = max(points.get(column, sums), sums, key=lambda one: one[-1])
            points[column + 0.25] = sums
        for kind, (_, colour) in reversed([*enumerate(_MEMORY)]):  # what lies above is behind
            path, before = f"M{x:g} {base:g}", 0.0
            for column, sums in points.items():
                if sums[kind] != before:
                    before = sums[kind]
                    path += f"H{x + column:.1f}V{base - before * self._pixels:.1f}"
            path += f'H{end:.1f}V{base:g}z" shape-rendering="crispEdges'
            parts.append(f'<path fill="{colour}" d="{path}"/>')
        return parts

    def _draw_wire(self, rank: int, x: float, y: float, scale: float) -> list[str]:
        paths: dict[int, str] = defaultdict(str)
        for place, (start, end) in self.lanes[rank].times.items():
            if end > start:
                wide = max((end - start) * scale - 0.4, 0.2)
                box = f"M{x + start * scale:.1f} {y:g}h{wide:.1f}v{_LANE_HEIGHT - 2}h-{wide:.1f}z"
                paths[self.rows[rank][place][0]] += box
        right = x + self.simulation.makespan * scale
        parts = [f'<path fill="#eee" d="M{x:g} {y:g}H{right:.1f}v{_LANE_HEIGHT - 2}H{x:g}z"/>']
        parts += [f'<path fill="{_WIRE[kind][1]}" d="{path}"/>' for kind, path in paths.items()]
        return [*parts, f'<text x="4" y="{y + 7:g}" fill="#666">wire</text>']


def to_svg(simulation: Simulation) -> str:
    """A self-contained picture: a lane a rank, a box a computation, its text and times as tooltip."""
    return lanes_svg([summary(simulation)], lanes_of(simulation))


def to_picture(
    simulation: Simulation, *, span: float | None = None, width: int = 760, strips: Strips | None = None
) -> str:
    """A lane a rank, a box a computation with its microbatch's number where there is room; first chunks are dark. A few
    kilobytes, for documents. For the rest see `lanes_svg`."""
    said = f"{simulation.plan.schedule}, bubble {simulation.bubble_rate:.1%}"
    return lanes_svg([said], lanes_of(simulation), span=span, width=width, strips=strips, small=True)


def beside_svg(
    planned: Simulation, measured: Simulation, *, span: float | None = None, strips: Strips | None = None
) -> str:
    """Two lanes a rank on one axis, planned above measured. strips: of the planned one, drawn below it."""
    both = zip(lanes_of(planned, " planned"), lanes_of(measured, " measured"), strict=True)
    titles = [f"planned {summary(planned)}", f"measured {summary(measured, held=False)}"]
    return lanes_svg(titles, [*itertools.chain(*both)], span=span, strips=strips)


def lanes_of(simulation: Simulation, suffix: str = "") -> list[Lane]:
    """Every rank's."""
    return [Lane(f"{rank}{suffix}", simulation, rank) for rank in range(len(simulation.plan.rows))]


def lanes_svg(
    titles: Sequence[str],
    lanes: Sequence[Lane],
    *,
    span: float | None = None,
    width: int = 1200,
    strips: Strips | None = None,
    small: bool = False,
) -> str:
    """Lanes under one another on one axis of time, with lines of text and the colours of kinds above them.

    span: the time at the right end, for several pictures on one axis; by default the longest makespan. strips: what is
    drawn below each lane of their simulation. small: boxes of one colour are one path, without tooltips, and the one
    title stands beside the colours.
    """
    left, right = (18, 4) if small else (20 + 5 * max(len(lane.label) for lane in lanes), 10)
    top, height = (20, 16) if small else (30 + 16 * len(titles), 20)
    if strips:
        left, right = max(left, strips.left), strips.right
    scale = (width - left - right) / (span or max(lane.simulation.makespan for lane in lanes) or 1.0)
    paths: dict[tuple[str, str], str] = defaultdict(str)  # of a small picture: (colour, shade) -> boxes
    boxes, texts, below, y = [], [], [], top
    for lane in lanes:
        text_y = y + 0.5 * height + 3.5
        if small:
            paths["#e6e6e6", ""] += f"M{left} {y}h{lane.simulation.makespan * scale:.1f}v{height}H{left}z"
        else:
            long = lane.simulation.makespan * scale
            boxes.append(f'<rect x="{left}" y="{y}" width="{long:.2f}" height="{height}" fill="#eee"/>')
        texts.append(f'<text x="4" y="{text_y:g}">{html.escape(lane.label)}</text>')
        for start, end, place, label in bars(lane.simulation, lane.rank):
            kind, stage, microbatch = lane.simulation.plan.rows[lane.rank][place][:3]
            x, long, shade = left + start * scale, (end - start) * scale, _shade(lane.simulation, stage)
            if small:
                wide, label = max(long - 0.6, 0.2), str(microbatch)
                paths[COLOURS[kind], shade] += f"M{x:.1f} {y}h{wide:.1f}v{height}h-{wide:.1f}z"
            else:
                boxes.append(
                    f'<g><title>{label}: {start:g} to {end:g}</title><rect x="{x:.2f}" y="{y}" width="{long:.2f}" '
                    f'height="{height}" fill="{COLOURS[kind]}"{shade} stroke="white" stroke-width="0.5"/></g>'
                )
            if long > _LETTER * len(label) + 1:
                texts.append(f'<text x="{x + 1.5:.1f}" y="{text_y:g}" pointer-events="none">{label}</text>')
        y += height + 2
        if strips and lane.simulation is strips.simulation:
            below += strips.draw(lane.rank, left, y, scale)
            y += strips.height
    boxes += [f'<path fill="{colour}"{shade} d="{path}"/>' for (colour, shade), path in paths.items()]
    drawn = {op[0] for lane in lanes for op in lane.simulation.plan.rows[lane.rank]}
    kinds = [(Kind(kind).name, colour) for kind, colour in enumerate(COLOURS) if kind in drawn]
    head = _key([*kinds, *(strips.kinds if strips else ())], left, 4 if small else top - 21)
    for line, title in enumerate(titles):
        where = f'x="{width - 4}" y="12.5" text-anchor="end"'
        where = where if small else f'x="{left}" y="{16 + 16 * line}" font-size="13"'
        head.append(f"<text {where}>{html.escape(title)}</text>")
    return _svg(width, y if small else y + 10, 9 if small else 10, [*boxes, *texts, *head, *below])


def _svg(width: int, height: int, font_size: int, parts: Sequence[str]) -> str:
    begin = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="{font_size}">'
    )
    return (
        "\n".join([begin, f'<rect width="{width}" height="{height}" fill="white"/>', *parts, "</svg>"]) + "\n"
    )


def _key(kinds: Iterable[tuple[str, str]], x: float, y: float) -> list[str]:
    """One line from x on: what has which colour."""
    parts = []
    for name, colour in kinds:
        parts.append(f'<path fill="{colour}" d="M{x:.0f} {y:g}h10v10h-10z"/>')
        parts.append(f'<text x="{x + 13:.0f}" y="{y + 8.5:g}">{name}</text>')
        x += 26 + 5.3 * len(name)
    return parts


def _shade(simulation: Simulation, stage: int) -> str:
    """How dark a computation is drawn: later chunks are lighter."""
    placement = simulation.plan.placement
    return f' fill-opacity="{1 - 0.5 * placement.chunk_of(stage) / placement.num_chunks:.2g}"'
