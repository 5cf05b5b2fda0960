"""Several schedules for one pipeline beside each other: who is how fast, who holds how much, who cannot, and why; as
a table and as one HTML page that needs nothing else: no network, no script."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.drawing.held_over_time import activation_text, summary
from megatron.core.pipeline_parallel.plan.drawing.svg import (
    MOST_BOXES,
    Strips,
    beside_svg,
    lanes_of,
    lanes_svg,
    to_picture,
)
from megatron.core.pipeline_parallel.plan.ir import IS_COMPUTE, PlanError
from megatron.core.pipeline_parallel.plan.passes.lower import lower
from megatron.core.pipeline_parallel.plan.placement import Placement
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.plan.schedules import build_plan
from megatron.core.pipeline_parallel.plan.simulate import Simulation, over_limit, simulate

_MOST_RANKS_IN_A_CELL = 8
_MOST_NOTES = 20  # of more, the page shows none until asked
_STYLE = """body { font-family: sans-serif; margin: 24px; max-width: 1260px; color: #222; background: #fff; }
table { border-collapse: collapse; } td, th { border: 1px solid #ccc; padding: 3px 8px; text-align: left; }
td { font-variant-numeric: tabular-nums; } h2 { margin: 28px 0 6px; } details { margin: 8px 0; }
.over { color: #b00; } pre { font-size: 12px; }"""


@dataclass(frozen=True)
class Entry:
    """One schedule of a comparison.

    simulation: planned; None if the schedule cannot be had, and `problem` says why. problem: also what is wrong with
    one that can be had but not run (memory). measured: the step of a run, where there is one. remarks: lines to add.
    """

    name: str
    simulation: Simulation | None
    problem: str = ""
    measured: Simulation | None = None
    remarks: tuple[str, ...] = ()


def entry_of(
    schedule: str, request: Request, costs: CostModel, limits: Sequence[float] | None = None
) -> Entry:
    """A registered schedule, planned with its transfers and simulated. limits: by rank, what its plan may hold."""
    try:
        simulation = simulate(lower(build_plan(schedule, request), costs), costs)
    except PlanError as error:
        return Entry(schedule, None, str(error))
    over = over_limit(simulation, limits)
    if over is None or limits is None:
        return Entry(schedule, simulation)
    rank, peak = over
    problem = f"needs {peak:g} activations on rank {rank}, the limit is {limits[rank]:g}"
    return Entry(schedule, simulation, problem)


def of_rank_totals(costs: CostModel, ran: Placement, placement: Placement) -> CostModel:
    """Costs of another placement: what a rank takes stays with the rank."""

    def totals(values: Sequence[float]) -> list[float]:
        pairs = [*zip(ran.ranks(), values, strict=True)]
        return [sum(value for own, value in pairs if own == rank) for rank in range(ran.num_ranks)]

    held = totals(costs.held_after_b)
    made = CostModel.of_ranks(
        placement,
        time_f=totals(costs.f),
        time_b=totals(costs.b),
        time_w=totals(costs.w),
        comm=costs.comm,
        activation=totals(costs.activation),
    )
    shares = tuple(held[rank] / placement.num_chunks for rank in placement.ranks())
    return dataclasses.replace(made, held_after_b=shares)


def longest(entries: Sequence[Entry]) -> float:
    """The makespan of the slowest one, planned or measured: the axis on which all can be drawn."""
    both = (one for entry in entries for one in (entry.simulation, entry.measured) if one is not None)
    return max((one.makespan for one in both), default=0.0)


HEADINGS = ("schedule", "step time", "bubble", "activations by rank", "transfers", "remark")


def table_rows(entries: Sequence[Entry]) -> list[tuple[str, ...]]:
    """Cells below `HEADINGS`; a measured step is a row of its own."""
    rows: list[tuple[str, ...]] = []
    for entry in entries:
        figures = ("",) * 4 if entry.simulation is None else _figures(entry.simulation)
        rows.append((entry.name, *figures, entry.problem))
        if entry.measured is not None:
            rows.append((f"{entry.name}, measured", *_figures(entry.measured), ""))
    return rows


def table(entries: Sequence[Entry]) -> str:
    """Markdown, in columns."""
    rows = [HEADINGS, *table_rows(entries)]
    if not any(row[-1] for row in rows[1:]):
        rows = [row[:-1] for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        f"| {' | '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))} |"
        for row in rows
    ]
    lines.insert(1, f"|{'|'.join('-' * (width + 2) for width in widths)}|")
    return "\n".join(lines) + "\n"


def _figures(simulation: Simulation) -> tuple[str, str, str, str]:
    peaks = simulation.peak_activation
    held = " ".join(activation_text(simulation, peak) for peak in peaks)
    if len(peaks) > _MOST_RANKS_IN_A_CELL:
        held = " to ".join(activation_text(simulation, peak) for peak in (min(peaks), max(peaks)))
    return f"{simulation.cost:.5g}", f"{simulation.bubble_rate:.2%}", held, str(simulation.num_messages)


def to_html(
    title: str,
    entries: Sequence[Entry],
    limits: Sequence[float] | None = None,
    *,
    unit: str = "whole-stage activations of a microbatch",
    units_in: str = "layers",
    notes: Sequence[str] = (),
) -> str:
    """Figures of all, then each one's timeline on one axis of time: computations of each rank, gathers and reductions
    where the plan has them, and what it holds over time, against its limit.

    limits: by rank, in `unit`, what activations are counted in. units_in: what gathered weights are counted in, where
    the plan was not made for a limit in bytes. notes: lines above the figures, as of the choice.
    """
    strips = {
        entry.name: Strips(entry.simulation, limits, units_in if entry.simulation.timeline.lanes else unit)
        for entry in entries
        if entry.simulation is not None
    }
    for drawn in strips.values():  # all on one axis of memory, too
        drawn.most = max(other.most for other in strips.values())
    plans = [one.plan for entry in entries for one in (entry.simulation, entry.measured) if one is not None]
    boxes = sum(IS_COMPUTE[op[0]] for plan in plans for row in plan.rows for op in row)
    body = [f"<h1>{html.escape(title)}</h1>"]
    if notes:
        few = len(notes) <= _MOST_NOTES
        body.append(f"<details{' open' * few}><summary>{len(notes)} lines on the choice</summary>")
        body.append(f"<pre>{html.escape(chr(10).join(notes))}</pre></details>")
    head = "".join(f"<th>{heading}</th>" for heading in HEADINGS)
    cells = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in table_rows(entries))
    body.append(f"<table><tr>{head}</tr>\n" + "\n".join(f"<tr>{row}</tr>" for row in cells) + "</table>")
    for entry in entries:
        body.append(f'<h2 id="{html.escape(entry.name)}">{html.escape(entry.name)}</h2>')
        if entry.problem:
            body.append(f'<p class="over">{html.escape(entry.problem)}</p>')
        body += [f"<p>{html.escape(remark)}</p>" for remark in entry.remarks]
        if entry.simulation is not None:
            body.append(f"<p>Memory over time is in {html.escape(strips[entry.name].unit)}.</p>")
            body.append(_timeline(entry, longest(entries), strips[entry.name], small=boxes > MOST_BOXES))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _timeline(entry: Entry, span: float, strips: Strips, *, small: bool) -> str:
    planned, measured = entry.simulation, entry.measured
    assert planned is not None, entry.name
    if small:
        both = [one for one in (planned, measured) if one is not None]
        return "\n".join(to_picture(one, span=span, width=1200, strips=strips) for one in both)
    if measured is not None:
        return beside_svg(planned, measured, span=span, strips=strips)
    return lanes_svg([summary(planned)], lanes_of(planned), span=span, strips=strips)
