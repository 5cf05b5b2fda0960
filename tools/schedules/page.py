"""Several schedules for one pipeline beside each other: who is how fast, who holds how much, who cannot, and why; as
a table and as one HTML page that needs nothing else: no network, no script."""

from __future__ import annotations

import dataclasses
import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.core.pipeline_parallel.plan.build import build_plan
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.held.lanes import lane_of
from megatron.core.pipeline_parallel.plan.ir import IS_COMPUTE, REDUCE, PlanError
from megatron.core.pipeline_parallel.plan.passes.lower import lower
from megatron.core.pipeline_parallel.plan.placement import Placement
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.plan.simulate import Simulation, over_limit, simulate
from megatron.core.safe_files import read_text
from megatron.core.words import counted, plain, share_text
from tools.drawing.page import element, fold, heading, page
from tools.drawing.page import table as page_table
from tools.schedules.held_over_time import activation_text
from tools.schedules.picture import ACTIVATIONS, MOST_BOXES, HeldCurves, colours, general, plan_picture

_MOST_RANKS_IN_A_CELL = 8
_MOST_NOTES = 20  # of more, the page shows none until asked


@dataclass(frozen=True)
class Entry:
    """One schedule of a comparison.

    simulation: planned; None if the schedule cannot be had, and `problem` says why. problem: also what is wrong with
    one that can be had but not run (memory). measured: the step of a run, where there is one. remarks: lines to add.
    time_name: of the axis of time, where its unit is not F. held: over time, where more is known of it than the
    simulation says.
    """

    name: str
    simulation: Simulation | None
    problem: str = ""
    measured: Simulation | None = None
    remarks: tuple[str, ...] = ()
    time_name: str = ""
    held: HeldCurves | None = None


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
    problem = f"needs {plain(peak)} activations on rank {rank}, the limit is {plain(limits[rank])}"
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
    """`HEADINGS` and the cells below, without a column of no remarks; a measured step is a row of its own."""
    rows: list[tuple[str, ...]] = [HEADINGS]
    for entry in entries:
        figures = ("",) * 4 if entry.simulation is None else _figures(entry.simulation)
        rows.append((entry.name, *figures, entry.problem))
        if entry.measured is not None:
            rows.append((f"{entry.name}, measured", *_figures(entry.measured), ""))
    return rows if any(row[-1] for row in rows[1:]) else [row[:-1] for row in rows]


def table(entries: Sequence[Entry]) -> str:
    """Markdown, in columns."""
    rows = table_rows(entries)
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
    return (
        plain(simulation.cost, 5),
        share_text(simulation.bubble_rate, 2),
        held,
        str(simulation.num_messages),
    )


def playground() -> str:
    """A page with sliders and a planner of its own, in this style."""
    every = {**colours(), "exposed: waits for the wire": "var(--s3)"}
    body = read_text(Path(__file__).parent.with_name("playground.html"), max_bytes=1 << 16, follow=True)
    body = body.replace("/* text: colour */ {}", json.dumps(every))
    body = body.replace("/* lane: most under way */ 0", str(lane_of(REDUCE).most_under_way))
    return page("Playground: pipelines over sharded weights", [body])


def to_html(
    title: str,
    entries: Sequence[Entry],
    limits: Sequence[float] | None = None,
    *,
    unit: str = ACTIVATIONS,
    units_in: str = "layers",
    notes: Sequence[str] = (),
) -> str:
    """Figures of all, then each one's timeline on one axis of time: computations of each rank, gathers and reductions
    where the plan has them, and what it holds over time, against its limit.

    limits: by rank, in `unit`, what activations are counted in. units_in: what gathered weights are counted in, where
    the plan was not made for a limit in bytes. notes: lines above the figures, as of the choice.
    """
    held: dict[str, HeldCurves] = {}
    for entry in entries:
        if (found := entry.simulation) is not None:
            counted_in = units_in if found.timeline.lanes else unit
            held[entry.name] = entry.held or HeldCurves(found, limits, counted_in)
    for drawn in held.values():  # all of one unit on one axis of memory, too
        drawn.most = max(other.most for other in held.values() if other.unit == drawn.unit)
    drawn_ones = [one for entry in entries for one in (entry.simulation, entry.measured) if one is not None]
    boxes = sum(IS_COMPUTE[op[0]] for one in drawn_ones for row in one.plan.rows for op in row)
    body = [element("header", element("h1", html.escape(title)))]
    if notes:
        lines = element("pre", html.escape("\n".join(notes)))
        body.append(
            fold(f"{counted(len(notes), 'line')} on the choice", lines, is_open=len(notes) <= _MOST_NOTES)
        )
    head, *rows = table_rows(entries)
    unit_of_time = next((f"Times are in {entry.time_name}. " for entry in entries if entry.time_name), "")
    about = element("p", html.escape(unit_of_time + general(drawn_ones)), class_="note")
    body.append(fold("Figures", page_table(rows, head), about, is_open=True))
    for entry in entries:
        body.append(heading(entry.name))
        if entry.problem:
            body.append(element("p", html.escape(entry.problem), class_="over"))
        body += [element("p", html.escape(remark)) for remark in entry.remarks]
        if entry.simulation is not None:
            both, span = (entry.simulation, entry.measured), longest(entries)
            drawing = plan_picture(
                *both,
                span=span,
                held=held[entry.name],
                small=boxes > MOST_BOXES,
                time_name=entry.time_name,
                explained=False,
            )
            body.append(drawing.figure(wide=True))
    return page(title, body)
