"""Schedules as one HTML page that needs nothing else: no network, no script."""

from __future__ import annotations

import html
from collections.abc import Sequence

from megatron.core.pipeline_parallel.plan.drawing.compare import HEADINGS, Entry, longest, table_rows
from megatron.core.pipeline_parallel.plan.drawing.grid import summary
from megatron.core.pipeline_parallel.plan.drawing.svg import (
    MOST_BOXES,
    Lane,
    Strips,
    beside_svg,
    lanes_svg,
    to_picture,
)
from megatron.core.pipeline_parallel.plan.kinds import IS_COMPUTE

_MOST_NOTES = 20  # of more, the page shows none until asked
_STYLE = """body { font-family: sans-serif; margin: 24px; max-width: 1260px; color: #222; background: #fff; }
table { border-collapse: collapse; } td, th { border: 1px solid #ccc; padding: 3px 8px; text-align: left; }
td { font-variant-numeric: tabular-nums; } h2 { margin: 28px 0 6px; } details { margin: 8px 0; }
.over { color: #b00; } pre { font-size: 12px; }"""


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
    lanes = [Lane(str(rank), planned, rank) for rank in range(len(planned.plan.rows))]
    return lanes_svg([summary(planned)], lanes, span=span, strips=strips)
