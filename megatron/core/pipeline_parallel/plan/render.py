"""Pictures of a simulated plan: a grid of text, an SVG, a trace for Chrome's and Perfetto's viewers."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.pipeline_parallel.plan.held_over_time import activation_text
from megatron.core.pipeline_parallel.plan.ir import (
    SEND_B,
    SEND_F,
    F,
    Kind,
    op_text,
    partner_of,
)
from megatron.core.pipeline_parallel.plan.kinds import IS_COMPUTE, IS_TRANSFER
from megatron.core.pipeline_parallel.plan.placement import Placement
from megatron.core.pipeline_parallel.plan.render_strips import Strips
from megatron.core.pipeline_parallel.plan.simulate import Simulation

COLOURS = ("#4c8bd6", "#5fb58a", "#e0b04a", "#4fa3a0")  # F, B, W, BW
TRACE_UNIT_US = 1000.0  # one unit of time in a trace, where times have no unit
_MAX_COLUMNS = 20_000  # of the bar of a rank in text

_LANES = ("compute", "send", "receive")  # of a process in a trace
COMPUTE_LANE, SEND_LANE, RECEIVE_LANE = range(len(_LANES))

Bar = tuple[float, float, int, str]  # start, end, place in the row, text


@dataclass(frozen=True)
class Lane:
    """One horizontal strip of a picture: a rank of a simulation, and what stands before it."""

    label: str
    simulation: Simulation
    rank: int


def summary(simulation: Simulation, *, held: bool = True) -> str:
    """One line of figures. held: with what is held, which a measured step does not know."""
    plan = simulation.plan
    most = activation_text(simulation, max(simulation.peak_activation))
    return (
        f"{plan.schedule}: {plan.placement.num_ranks} stages x {plan.placement.num_chunks} chunks, "
        f"{plan.num_microbatches} microbatches, makespan {simulation.makespan:g}, "
        f"bubble {simulation.bubble_time:g} ({simulation.bubble_rate:.2%})"
        + (f", peak activation {most}" if held else "")
    )


def columns_per_unit(simulation: Simulation) -> float:
    """The smallest scale of a text grid at which every label fits and a column is left between two."""
    every = (bar for rank in range(len(simulation.plan.rows)) for bar in bars(simulation, rank))
    return max(
        ((len(label) + 1) / (end - start) for start, end, _, label in every if end > start), default=1.0
    )


def to_text(simulation: Simulation, scale: float | None = None) -> str:
    """A row a rank; the width of an operation is its time, dots are idle time, idle and peak stand behind.

    scale: columns for one unit of time, by default such that every label fits. A bar has at most 20,000 columns:
    where that is too few, labels are cut and the shortest operations may not show.
    """
    if scale is None:
        scale = columns_per_unit(simulation)
    if simulation.makespan * scale > _MAX_COLUMNS:
        scale = _MAX_COLUMNS / simulation.makespan
    width = round(simulation.makespan * scale)
    lines = [summary(simulation)]
    name_width = len(str(len(simulation.plan.rows) - 1))
    for rank in range(len(simulation.plan.rows)):
        cells = ["."] * width
        for start, end, _, label in bars(simulation, rank):
            first, last = round(start * scale), round(end * scale)
            if last > first:
                cells[first:last] = label.ljust(last - first - 1, "-")[: last - first - 1] + " "
        idle, peak = simulation.idle[rank], activation_text(simulation, simulation.peak_activation[rank])
        lines.append(f"{rank:>{name_width}} |{''.join(cells)}| idle {idle:g}, peak {peak}")
    return "\n".join(lines) + "\n"


def to_svg(simulation: Simulation, *, width: int = 1200, row_height: int = 22) -> str:
    """A self-contained picture: a lane a rank, a box a computation, its text and times as tooltip."""
    lanes = [Lane(str(rank), simulation, rank) for rank in range(len(simulation.plan.rows))]
    return lanes_svg([summary(simulation)], lanes, width=width, row_height=row_height)


def shade_of(placement: Placement, stage: int) -> float:
    """How dark a computation is drawn: later chunks are lighter."""
    return 1 - 0.5 * placement.chunk_of(stage) / placement.num_chunks


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
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="10">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
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
        parts += _svg_lane(lane, left, y, scale, row_height)
        y += row_height
        if own:
            parts += own.draw(lane.rank, left, y, scale)
            y += own.height
    return "\n".join([*parts, "</svg>"]) + "\n"


def _svg_lane(lane: Lane, left: int, y: int, scale: float, row_height: int) -> list[str]:
    simulation, text_y = lane.simulation, y + row_height * 0.65
    placement = simulation.plan.placement
    parts = [
        f'<text x="4" y="{text_y:.1f}">{html.escape(lane.label)}</text>',
        f'<rect x="{left}" y="{y}" width="{simulation.makespan * scale:.2f}" height="{row_height - 2}" '
        'fill="#eee"/>',
    ]
    for start, end, place, label in bars(simulation, lane.rank):
        kind, stage = simulation.plan.rows[lane.rank][place][:2]
        shade = shade_of(placement, stage)
        at, box = left + start * scale, (end - start) * scale
        parts.append(
            f'<g><title>{label}: {start:g} to {end:g}</title><rect x="{at:.2f}" y="{y}" width="{box:.2f}" '
            f'height="{row_height - 2}" fill="{COLOURS[kind]}" fill-opacity="{shade:.2f}" stroke="white" '
            f'stroke-width="0.5"/>'
        )
        if box > 6 * len(label):
            parts.append(f'<text x="{at + 2:.2f}" y="{text_y:.1f}">{label}</text>')
        parts.append("</g>")
    return parts


def to_trace(simulation: Simulation) -> str:
    """Chrome trace JSON: per rank lanes for computation, sends and receives, and a counter of activations."""
    return trace_json(trace_events(simulation))


def trace_json(events: Sequence[Mapping[str, Any]]) -> str:
    """The file that Chrome's and Perfetto's viewers read."""
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, allow_nan=False) + "\n"


def trace_events(
    simulation: Simulation,
    *,
    first_process: int = 0,
    prefix: str = "",
    unit_us: float = TRACE_UNIT_US,
    transfers: bool = True,
) -> list[dict[str, Any]]:
    """Events of one process a rank, numbered from `first_process`; a unit of time takes `unit_us` microseconds."""
    draw = _Trace(simulation, first_process, unit_us)
    for rank in range(len(simulation.plan.rows)):
        draw.rank(rank, f"{prefix}stage {rank}")
    if transfers:
        draw.transfers()
    return draw.events


def trace_slice(
    process: int, lane: int, name: str, category: str, start: float, end: float, unit_us: float
) -> dict[str, Any]:
    """A box in a lane of a process."""
    return {
        "ph": "X",
        "pid": process,
        "tid": lane,
        "name": name,
        "cat": category,
        "ts": start * unit_us,
        "dur": (end - start) * unit_us,
    }


class _Trace:
    """Events under construction."""

    def __init__(self, simulation: Simulation, first_process: int, unit_us: float) -> None:
        self.simulation, self.first_process, self.unit_us = simulation, first_process, unit_us
        self.events: list[dict[str, Any]] = []

    def rank(self, rank: int, name: str) -> None:
        """Names of a rank's lanes, its computations, its counter."""
        process = self.first_process + rank
        self.events.append({"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}})
        self.events.append(
            {"ph": "M", "pid": process, "name": "process_sort_index", "args": {"sort_index": process}}
        )
        for lane, what in enumerate(_LANES):
            self.events.append(
                {"ph": "M", "pid": process, "tid": lane, "name": "thread_name", "args": {"name": what}}
            )
        held, costs = 0.0, self.simulation.costs
        for start, end, place, label in bars(self.simulation, rank):
            kind, stage = self.simulation.plan.rows[rank][place][:2]
            self._slice(rank, COMPUTE_LANE, label, Kind(kind).name, start, end)
            change = costs.activation[stage] if kind == F else -costs.released(kind, stage)
            held += change
            self._count(process, start if change > 0 else end, held)  # grows at once, shrinks at the end
            if self.simulation.plan.forward_only:  # nothing is kept for a backward
                held -= costs.activation[stage]
                self._count(process, end, held)

    def _count(self, process: int, at: float, held: float) -> None:
        counter = {"ph": "C", "pid": process, "name": "activation", "ts": at * self.unit_us}
        self.events.append({**counter, "args": {"microbatches": round(held, 9)}})

    def transfers(self) -> None:
        """A slice at both ends of each message, from the time that both are posted to its arrival."""
        ends: dict[int, list[tuple[int, int, int]]] = {}
        for rank, row in enumerate(self.simulation.plan.rows):
            for place, op in enumerate(row):
                if IS_TRANSFER[op[0]]:
                    lane = SEND_LANE if op[0] in (SEND_F, SEND_B) else RECEIVE_LANE
                    ends.setdefault(op[7], []).append((rank, lane, place))
        starts = self.simulation.timeline.starts
        for both in ends.values():
            start = max(starts[rank][place] for rank, _, place in both)
            for rank, lane, place in both:
                text = op_text(self.simulation.plan.rows[rank][place])
                self._slice(rank, lane, text, "transfer", start, start + self.simulation.costs.comm)

    def _slice(self, rank: int, lane: int, name: str, category: str, start: float, end: float) -> None:
        process = self.first_process + rank
        self.events.append(trace_slice(process, lane, name, category, start, end, self.unit_us))


def bars(simulation: Simulation, rank: int) -> list[Bar]:
    """A rank's computations in order; overlapped ones that were timed as one share the time in parts."""
    row = simulation.plan.rows[rank]
    starts, ends = simulation.timeline.starts[rank], simulation.timeline.ends[rank]
    durations = simulation.costs.durations()
    made: list[Bar] = []
    first, second = -1, -1  # places of an overlapped pair
    for place, op in enumerate(row):
        if not IS_COMPUTE[op[0]]:
            continue
        start, end = starts[place], ends[place]
        if op[7] >= 0 and place != second:
            first, second = place, partner_of(row, place)
        other = {first: second, second: first}.get(place, -1)
        if other >= 0 and (starts[other], ends[other]) == (start, end):
            own = min(durations[op[0]][op[1]], end - start)
            start, end = (start, start + own) if place == first else (end - own, end)
        made.append((start, end, place, op_text(op)))
    return made
