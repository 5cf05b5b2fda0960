"""Schedules as one page that needs nothing else: no network, no script."""

from __future__ import annotations

import html
from collections.abc import Sequence

from megatron.core.pipeline_parallel.plan.compare import HEADINGS, Entry, longest, table_rows
from megatron.core.pipeline_parallel.plan.held_over_time import limits_in_bytes
from megatron.core.pipeline_parallel.plan.kinds import IS_COMPUTE
from megatron.core.pipeline_parallel.plan.render import Lane, lanes_svg, summary
from megatron.core.pipeline_parallel.plan.render_picture import to_picture
from megatron.core.pipeline_parallel.plan.render_strips import Strips
from megatron.core.pipeline_parallel.plan.simulate import Simulation

_MOST_BOXES = 6000  # that are drawn with a tooltip each; of more, the page is drawn without
_MOST_NOTES = 20  # of more, the page shows none until asked
_WIDTH = 1200
_BAR_WIDTH, _BAR_HEIGHT = 480, 12
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
    where the plan has them, what is held over time; and the most that each rank holds, against its limit.

    limits: by rank, in `unit`, what activations are counted in. units_in: what gathered weights are counted in, where
    the plan was not made for a limit in bytes. notes: lines above the figures, as of the choice.
    """
    span = longest(entries)
    boxes = sum(_boxes(entry) for entry in entries)
    most = max(
        (peak for entry in entries if entry.simulation for peak in entry.simulation.peak_activation),
        default=0.0,
    )
    scale = max(most, *(limits or (0.0,)))
    body = [f"<h1>{html.escape(title)}</h1>"]
    if notes:
        few = len(notes) <= _MOST_NOTES
        body.append(f"<details{' open' * few}><summary>{len(notes)} lines on the choice</summary>")
        body.append(f"<pre>{html.escape(chr(10).join(notes))}</pre></details>")
    body.append(_table(entries))
    for entry in entries:
        body.append(f'<h2 id="{html.escape(entry.name)}">{html.escape(entry.name)}</h2>')
        if entry.problem:
            body.append(f'<p class="over">{html.escape(entry.problem)}</p>')
        body += [f"<p>{html.escape(remark)}</p>" for remark in entry.remarks]
        if entry.simulation is not None:
            strips = None
            if entry.measured is None:
                shared = bool(entry.simulation.timeline.lanes)
                strips = Strips(entry.simulation, limits, units_in if shared else "activations")
            body.append(_timeline(entry, span, strips, small=boxes > _MOST_BOXES))
            if limits_in_bytes(entry.simulation) is not None:
                continue  # which the picture has with all that is held
            body.append(f"<p>Activations at most, by rank, in {html.escape(unit)}{_legend(limits)}:</p>")
            body.append(_memory(entry.simulation, limits, scale))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _boxes(entry: Entry) -> int:
    both = [one for one in (entry.simulation, entry.measured) if one is not None]
    return sum(IS_COMPUTE[op[0]] for one in both for row in one.plan.rows for op in row)


def _table(entries: Sequence[Entry]) -> str:
    head = "".join(f"<th>{heading}</th>" for heading in HEADINGS)
    rows = [
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
        for row in table_rows(entries)
    ]
    return f"<table><tr>{head}</tr>\n" + "\n".join(rows) + "</table>"


def _timeline(entry: Entry, span: float, strips: Strips | None, *, small: bool) -> str:
    assert entry.simulation is not None, entry.name
    if small:
        both = [one for one in (entry.simulation, entry.measured) if one is not None]
        return "\n".join(to_picture(one, span=span, width=_WIDTH, strips=strips) for one in both)
    ranks = range(len(entry.simulation.plan.rows))
    if entry.measured is None:
        lanes = [Lane(str(rank), entry.simulation, rank) for rank in ranks]
        return lanes_svg([summary(entry.simulation)], lanes, span=span, width=_WIDTH, strips=strips)
    lanes = [
        Lane(f"{rank} {name}", one, rank)
        for rank in ranks
        for name, one in (("planned", entry.simulation), ("measured", entry.measured))
    ]
    titles = [f"planned {summary(entry.simulation)}", f"measured {summary(entry.measured)}"]
    return lanes_svg(titles, lanes, span=span, width=_WIDTH)


def _legend(limits: Sequence[float] | None) -> str:
    return "" if limits is None else "; the line is the limit"


def _memory(simulation: Simulation, limits: Sequence[float] | None, most: float) -> str:
    """A bar a rank, and its limit as a line."""
    left, step = 24, _BAR_HEIGHT + 4
    height = step * len(simulation.peak_activation) + 4
    scale = (_BAR_WIDTH - 120) / (most or 1.0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_BAR_WIDTH}" height="{height}" font-family="sans-serif" '
        'font-size="10">'
    ]
    for rank, peak in enumerate(simulation.peak_activation):
        y = step * rank + 2
        over = limits is not None and peak > limits[rank] + 1e-9 * max(1.0, limits[rank])
        colour = "#c0392b" if over else "#7f8fa6"
        parts.append(f'<text x="2" y="{y + 10}">{rank}</text>')
        parts.append(
            f'<rect x="{left}" y="{y}" width="{peak * scale:.1f}" height="{_BAR_HEIGHT}" fill="{colour}"/>'
        )
        said = f"{peak:.4g}" if limits is None else f"{peak:.4g} of {limits[rank]:.4g}"
        at = left + scale * max(peak, 0.0 if limits is None else limits[rank]) + 5
        parts.append(f'<text x="{at:.1f}" y="{y + 10}">{said}</text>')
        if limits is not None:
            x = left + limits[rank] * scale
            parts.append(f'<path d="M{x:.1f} {y - 1}v{_BAR_HEIGHT + 2}" stroke="#222" stroke-width="1.5"/>')
    return "\n".join([*parts, "</svg>"])
