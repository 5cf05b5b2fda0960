"""Pictures of a simulated plan: a grid of text, an SVG, a trace for Chrome's and Perfetto's viewers."""

from __future__ import annotations

import json
from typing import Any

from megatron.core.pipeline_parallel.plan.ir import (
    LAST_COMPUTE,
    RECV_B,
    RECV_F,
    SEND_B,
    SEND_F,
    F,
    Kind,
    op_text,
)
from megatron.core.pipeline_parallel.plan.simulate import Simulation

_COLOURS = ("#4c8bd6", "#5fb58a", "#e0b04a", "#4fa3a0")  # F, B, W, BW
_TRACE_UNIT_US = 1000.0  # one unit of time in a trace
_MAX_COLUMNS = 20_000  # of the bar of a rank in text


def summary(simulation: Simulation) -> str:
    """One line of figures."""
    plan = simulation.plan
    return (
        f"{plan.schedule}: {plan.placement.num_ranks} stages x {plan.placement.num_chunks} chunks, "
        f"{plan.num_microbatches} microbatches, makespan {simulation.makespan:g}, "
        f"bubble {simulation.bubble_time:g} ({simulation.bubble_rate:.2%}), "
        f"peak activation {max(simulation.peak_activation):g}"
    )


def to_text(simulation: Simulation) -> str:
    """A row a rank; the width of an operation is its time, dots are idle time, idle and peak stand behind.

    A bar has at most 20,000 columns: where that is too few for every label, labels are cut and the shortest
    operations may not show.
    """
    plan = simulation.plan
    bars = [_bars(simulation, rank) for rank in range(len(plan.rows))]
    # Columns for one unit of time, so that every label fits and a column is left between two.
    scale = max(
        ((len(label) + 1) / (end - start) for row in bars for start, end, _, label in row if end > start),
        default=1.0,
    )
    if simulation.makespan * scale > _MAX_COLUMNS:
        scale = _MAX_COLUMNS / simulation.makespan
    width = round(simulation.makespan * scale)
    lines = [summary(simulation)]
    name_width = len(str(len(plan.rows) - 1))
    for rank, row in enumerate(bars):
        cells = ["."] * width
        for start, end, _, label in row:
            first, last = round(start * scale), round(end * scale)
            if last > first:
                cells[first:last] = label.ljust(last - first - 1, "-")[: last - first - 1] + " "
        idle, peak = simulation.idle[rank], simulation.peak_activation[rank]
        lines.append(f"{rank:>{name_width}} |{''.join(cells)}| idle {idle:g}, peak {peak:g}")
    return "\n".join(lines) + "\n"


def to_svg(simulation: Simulation, *, width: int = 1200, row_height: int = 22) -> str:
    """A self-contained picture: a lane a rank, a box a computation, its text and times as tooltip."""
    plan = simulation.plan
    left, top = 40, 46
    scale = (width - left - 10) / (simulation.makespan or 1.0)
    height = top + row_height * len(plan.rows) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="10">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{left}" y="16" font-size="13">{summary(simulation)}</text>',
    ]
    for place, colour in enumerate(_COLOURS):
        x = left + 60 * place
        parts.append(f'<rect x="{x}" y="24" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 16}" y="34">{Kind(place).name}</text>')
    chunks = plan.placement.num_chunks
    for rank in range(len(plan.rows)):
        y = top + rank * row_height
        parts.append(f'<text x="4" y="{y + row_height * 0.65:.1f}">{rank}</text>')
        parts.append(
            f'<rect x="{left}" y="{y}" width="{simulation.makespan * scale:.2f}" height="{row_height - 2}" '
            'fill="#eee"/>'
        )
        for start, end, place, label in _bars(simulation, rank):
            kind, stage = plan.rows[rank][place][:2]
            shade = 1 - 0.5 * plan.placement.chunk_of(stage) / chunks
            at, box = left + start * scale, (end - start) * scale
            parts.append(
                f'<g><title>{label}: {start:g} to {end:g}</title><rect x="{at:.2f}" y="{y}" width="{box:.2f}" '
                f'height="{row_height - 2}" fill="{_COLOURS[kind]}" fill-opacity="{shade:.2f}" stroke="white" '
                f'stroke-width="0.5"/>'
            )
            if box > 6 * len(label):
                parts.append(f'<text x="{at + 2:.2f}" y="{y + row_height * 0.65:.1f}">{label}</text>')
            parts.append("</g>")
    return "\n".join([*parts, "</svg>"]) + "\n"


def to_trace(simulation: Simulation) -> str:
    """Chrome trace JSON: per rank lanes for computation, sends and receives, and a counter of activations."""
    events: list[dict[str, Any]] = []
    for rank in range(len(simulation.plan.rows)):
        events.append({"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"stage {rank}"}})
        for lane, name in enumerate(("compute", "send", "receive")):
            events.append(
                {"ph": "M", "pid": rank, "tid": lane, "name": "thread_name", "args": {"name": name}}
            )
        for start, end, place, label in _bars(simulation, rank):
            events.append(_slice(rank, 0, label, Kind(simulation.plan.rows[rank][place][0]).name, start, end))
        events += _memory(simulation, rank)
    events += _transfers(simulation)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, allow_nan=False) + "\n"


def _bars(simulation: Simulation, rank: int) -> list[tuple[float, float, int, str]]:
    """(start, end, place in the row, text) of a rank's computations; overlapped ones share their time in parts."""
    row = simulation.plan.rows[rank]
    starts, ends = simulation.timeline.starts[rank], simulation.timeline.ends[rank]
    durations = simulation.costs.durations()
    bars = []
    for place, op in enumerate(row):
        if op[0] > LAST_COMPUTE:
            continue
        start, end = starts[place], ends[place]
        if op[7] >= 0:
            own = durations[op[0]][op[1]]
            second = place > 0 and row[place - 1][0] <= LAST_COMPUTE and row[place - 1][7] == op[7]
            start, end = (end - own, end) if second else (start, start + own)
        bars.append((start, end, place, op_text(op)))
    return bars


def _slice(rank: int, lane: int, name: str, category: str, start: float, end: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": rank,
        "tid": lane,
        "name": name,
        "cat": category,
        "ts": start * _TRACE_UNIT_US,
        "dur": (end - start) * _TRACE_UNIT_US,
    }


def _memory(simulation: Simulation, rank: int) -> list[dict[str, Any]]:
    costs, held, events = simulation.costs, 0.0, []
    for start, end, place, _ in _bars(simulation, rank):
        kind, stage = simulation.plan.rows[rank][place][:2]
        size = costs.activation[stage]
        change = {
            Kind.F: size,
            Kind.B: -size * (1 - costs.memory_after_b),
            Kind.W: -size * costs.memory_after_b,
            Kind.BW: -size,
        }[Kind(kind)]
        held += change
        events.append(
            {
                "ph": "C",
                "pid": rank,
                "name": "activation",
                "ts": (start if kind == F else end) * _TRACE_UNIT_US,
                "args": {"microbatches": round(held, 9)},
            }
        )
    return events


def _transfers(simulation: Simulation) -> list[dict[str, Any]]:
    """A slice at both ends, from the time that both are posted."""
    ends: dict[int, list[tuple[int, int, float, str]]] = {}
    for rank, row in enumerate(simulation.plan.rows):
        for place, op in enumerate(row):
            if op[0] in (SEND_F, SEND_B, RECV_F, RECV_B):
                lane = 1 if op[0] in (SEND_F, SEND_B) else 2
                at = simulation.timeline.starts[rank][place]
                ends.setdefault(op[7], []).append((rank, lane, at, op_text(op)))
    return [
        _slice(rank, lane, label, "transfer", start, start + simulation.costs.comm)
        for both in ends.values()
        for start in [max(at for _, _, at, _ in both)]
        for rank, lane, _, label in both
    ]
