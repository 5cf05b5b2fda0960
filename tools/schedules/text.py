"""Simulated plans as a grid of text, and a measured step beside its plan as text and figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.core.pipeline_parallel.plan.ir import Kind
from megatron.core.pipeline_parallel.plan.simulate import Simulation
from megatron.core.words import plain
from tools.schedules.held_over_time import activation_text, bars, summary
from tools.schedules.overlay import Times

_MAX_COLUMNS = 20_000  # of the bar of a rank


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
    lines = [summary(simulation)]
    name_width = len(str(len(simulation.plan.rows) - 1))
    for rank in range(len(simulation.plan.rows)):
        cells = ["."] * round(simulation.makespan * scale)
        for start, end, _, label in bars(simulation, rank):
            first, last = round(start * scale), round(end * scale)
            if last > first:
                cells[first:last] = label.ljust(last - first - 1, "-")[: last - first - 1] + " "
        idle, peak = simulation.idle[rank], activation_text(simulation, simulation.peak_activation[rank])
        lines.append(f"{rank:>{name_width}} |{''.join(cells)}| idle {plain(idle, 5)}, peak {peak}")
    return "\n".join(lines) + "\n"


def overlay_text(planned: Simulation, measured: Simulation) -> str:
    """Two grids to one scale, planned above measured; times in seconds."""
    scale = columns_per_unit(planned)
    return f"planned {to_text(planned, scale)}measured {to_text(measured, scale)}"


def overlay_figures(
    planned: Simulation, measured: Simulation, medians: Mapping[Kind, Times]
) -> dict[str, Any]:
    """Both bubbles, costs and idle times, and the median times; seconds."""
    names = "makespan", "cost", "bubble_time", "bubble_rate", "idle"
    plan = planned.plan
    return {
        "schedule": plan.schedule,
        "stages": plan.placement.num_ranks,
        "chunks": plan.placement.num_chunks,
        "microbatches": plan.num_microbatches,
        "planned": {name: getattr(planned, name) for name in names},
        "measured": {name: getattr(measured, name) for name in names},
        "median_time": {kind.name: list(times) for kind, times in medians.items()},
        "peak_activation": list(planned.peak_activation),
    }
