"""A simulated plan as a grid of text, and what every drawing of one starts from: its bars and its line of figures."""

from __future__ import annotations

from megatron.core.pipeline_parallel.plan.drawing.held_over_time import activation_text
from megatron.core.pipeline_parallel.plan.ir import op_text, partner_of
from megatron.core.pipeline_parallel.plan.kinds import IS_COMPUTE
from megatron.core.pipeline_parallel.plan.simulate import Simulation

_MAX_COLUMNS = 20_000  # of the bar of a rank

Bar = tuple[float, float, int, str]  # start, end, place in the row, text


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
        lines.append(f"{rank:>{name_width}} |{''.join(cells)}| idle {idle:g}, peak {peak}")
    return "\n".join(lines) + "\n"
