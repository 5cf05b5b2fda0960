"""Simulated plans as SVG: lanes with a tooltip a computation, or a small picture whose boxes of one colour are one
path; below a rank's computations its gathers and reductions, and what it holds over time."""

from __future__ import annotations

import html
import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core.pipeline_parallel.plan.drawing.grid import bars, summary
from megatron.core.pipeline_parallel.plan.drawing.held_over_time import (
    counts_bytes,
    held_over_time,
    limits_in_bytes,
)
from megatron.core.pipeline_parallel.plan.ir import HSDP_ALL_REDUCE, REDUCE, UNSHARD, Kind
from megatron.core.pipeline_parallel.plan.simulate import Simulation
from megatron.core.pipeline_parallel.plan.sizes import size_text

COLOURS = ("#4c8bd6", "#5fb58a", "#e0b04a", "#4fa3a0")  # F, B, W, BW
MOST_BOXES = 6000  # that are drawn with a tooltip each
_LETTER = 5.5  # pixels of a digit of a picture
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
        for rank in range(len(self.rows)):
            of_units = self.lanes[rank].units.shard_bytes if self.lanes else 0.0
            rest = float(of_units if at_rest is None else at_rest[rank])
            moments = [(0.0, [rest] * len(_MEMORY))]
            for at, one in held_over_time(simulation, rank):
                kinds = (rest, one.activation, one.gathered, one.gradients, one.under_way)
                moments.append((at, [*itertools.accumulate(kinds)]))
            self._held.append(moments)
        self.peaks = [max(sums[-1] for _, sums in held) for held in self._held]
        self.most = max(*self.peaks, *(self.limits or (0.0,))) or 1.0
        self.height = (_LANE_HEIGHT if self.lanes else 0) + _MEMORY_HEIGHT + _GAP

    def legend(self, x: float, y: float) -> list[str]:
        """Of what is drawn, one line from x on, 10 pixels high."""
        kinds = {op[0] for row in self.rows for op in row}
        found = [one for kind, one in _WIRE.items() if self.lanes and kind in kinds]
        every = [[0.0, *sums] for held in self._held for _, sums in held]
        found += [one for at, one in enumerate(_MEMORY) if any(sums[at + 1] > sums[at] for sums in every)]
        parts = []
        for name, colour in found:
            parts.append(f'<path fill="{colour}" d="M{x:.0f} {y:g}h10v10h-10z"/>')
            parts.append(f'<text x="{x + 13:.0f}" y="{y + 8.5:g}">{name}</text>')
            x += 26 + 5.3 * len(name)
        return parts

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
    lanes = [Lane(str(rank), simulation, rank) for rank in range(len(simulation.plan.rows))]
    return lanes_svg([summary(simulation)], lanes)


def beside_svg(
    planned: Simulation, measured: Simulation, *, span: float | None = None, strips: Strips | None = None
) -> str:
    """Two lanes a rank on one axis, planned above measured. strips: of the planned one, drawn below it."""
    lanes = [
        Lane(f"{rank} {name}", simulation, rank)
        for rank in range(len(planned.plan.rows))
        for name, simulation in (("planned", planned), ("measured", measured))
    ]
    titles = [f"planned {summary(planned)}", f"measured {summary(measured, held=False)}"]
    return lanes_svg(titles, lanes, span=span, strips=strips)


def lanes_svg(
    titles: Sequence[str],
    lanes: Sequence[Lane],
    *,
    span: float | None = None,
    width: int = 1200,
    row_height: int = 22,
    strips: Strips | None = None,
) -> str:
    """Lanes under one another on one axis of time, with lines of text and the colours of kinds above them.

    span: the time at the right end, for several pictures on one axis; by default the longest makespan. strips: what is
    drawn below each lane of their simulation.
    """
    left = max(20 + 5 * max(len(lane.label) for lane in lanes), strips.left if strips else 0)
    top = 30 + 16 * len(titles)
    room = width - left - (strips.right if strips else 10)
    scale = room / (span or max(lane.simulation.makespan for lane in lanes) or 1.0)
    below = [strips if strips and lane.simulation is strips.simulation else None for lane in lanes]
    height = top + row_height * len(lanes) + sum(one.height for one in below if one) + 10
    parts = _begin(width, height, font_size=10)
    for line, title in enumerate(titles):
        parts.append(f'<text x="{left}" y="{16 + 16 * line}" font-size="13">{html.escape(title)}</text>')
    for place, colour in enumerate(COLOURS):
        x = left + 60 * place
        parts.append(f'<rect x="{x}" y="{top - 22}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 16}" y="{top - 12}">{Kind(place).name}</text>')
    if strips:
        parts += strips.legend(left + 60 * len(COLOURS), top - 21)
    y = top
    for lane, own in zip(lanes, below, strict=True):
        parts += _draw_lane(lane, left, y, scale, row_height)
        y += row_height
        if own:
            parts += own.draw(lane.rank, left, y, scale)
            y += own.height
    return "\n".join([*parts, "</svg>"]) + "\n"


def to_picture(
    simulation: Simulation, *, span: float | None = None, width: int = 760, strips: Strips | None = None
) -> str:
    """A lane a rank, a box a computation with its microbatch's number where there is room; first chunks are dark. A few
    kilobytes, for documents.

    span: the time at the right end, for several pictures on one axis; by default the makespan. strips: what is drawn
    below each lane, where they are of this simulation.
    """
    rows, top, box_height = simulation.plan.rows, 20, 16
    left, right = (strips.left, strips.right) if strips else (18, 4)
    scale = (width - left - right) / (span or simulation.makespan or 1.0)
    below = strips if strips and strips.simulation is simulation else None
    step = box_height + 2 + (below.height if below else 0)
    boxes: dict[tuple[str, str], list[str]] = defaultdict(list)  # colour, shade -> parts of a path
    numbers: list[str] = []
    ground = ""
    for rank, row in enumerate(rows):
        y = top + rank * step
        text_y = y + box_height * 0.5 + 3.5
        numbers.append(f'<text x="4" y="{text_y:g}">{rank}</text>')
        ground += f"M{left} {y}h{simulation.makespan * scale:.1f}v{box_height}H{left}z"
        for start, end, place, _ in bars(simulation, rank):
            kind, stage, microbatch = row[place][:3]
            x, box = left + start * scale, (end - start) * scale
            wide = max(box - 0.6, 0.2)
            shade = f"{_shade(simulation, stage):.2g}"
            boxes[COLOURS[kind], shade].append(f"M{x:.1f} {y}h{wide:.1f}v{box_height}h-{wide:.1f}z")
            if box > _LETTER * len(str(microbatch)) + 1:
                numbers.append(f'<text x="{x + 1.5:.1f}" y="{text_y:g}">{microbatch}</text>')
    parts = [*_begin(width, top + len(rows) * step, font_size=9), f'<path fill="#e6e6e6" d="{ground}"/>']
    for (colour, shade), paths in sorted(boxes.items()):
        parts.append(f'<path fill="{colour}" fill-opacity="{shade}" d="{"".join(paths)}"/>')
    parts += numbers
    drawn = [kind for kind, colour in enumerate(COLOURS) if any(colour == one for one, _ in boxes)]
    for place, kind in enumerate(drawn):
        x = left + 44 * place
        parts.append(f'<path fill="{COLOURS[kind]}" d="M{x} 4h10v10h-10z"/>')
        parts.append(f'<text x="{x + 13}" y="12.5">{Kind(kind).name}</text>')
    if below:
        parts += below.legend(left + 44 * len(drawn), 4)
        for rank in range(len(rows)):
            parts += below.draw(rank, left, top + rank * step + box_height + 2, scale)
    said = f"{simulation.plan.schedule}, bubble {simulation.bubble_rate:.1%}"
    parts.append(f'<text x="{width - 4}" y="12.5" text-anchor="end">{said}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _begin(width: int, height: int, font_size: int) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="{font_size}">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]


def _shade(simulation: Simulation, stage: int) -> float:
    """How dark a computation is drawn: later chunks are lighter."""
    placement = simulation.plan.placement
    return 1 - 0.5 * placement.chunk_of(stage) / placement.num_chunks


def _draw_lane(lane: Lane, left: int, y: int, scale: float, row_height: int) -> list[str]:
    simulation, text_y = lane.simulation, y + row_height * 0.65
    height, span = row_height - 2, simulation.makespan * scale
    parts = [
        f'<text x="4" y="{text_y:.1f}">{html.escape(lane.label)}</text>',
        f'<rect x="{left}" y="{y}" width="{span:.2f}" height="{height}" fill="#eee"/>',
    ]
    for start, end, place, label in bars(simulation, lane.rank):
        kind, stage = simulation.plan.rows[lane.rank][place][:2]
        at, box = left + start * scale, (end - start) * scale
        parts.append(
            f'<g><title>{label}: {start:g} to {end:g}</title><rect x="{at:.2f}" y="{y}" width="{box:.2f}" '
            f'height="{height}" fill="{COLOURS[kind]}" fill-opacity="{_shade(simulation, stage):.2f}" stroke="white" '
            f'stroke-width="0.5"/>'
        )
        if box > 6 * len(label):
            parts.append(f'<text x="{at + 2:.2f}" y="{text_y:.1f}">{label}</text>')
        parts.append("</g>")
    return parts
