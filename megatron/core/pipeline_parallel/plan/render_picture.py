"""A small picture of a plan, for documents: a few kilobytes, because boxes of one colour are one path."""

from __future__ import annotations

from collections import defaultdict

from megatron.core.pipeline_parallel.plan.ir import Kind
from megatron.core.pipeline_parallel.plan.render import COLOURS, bars, shade_of
from megatron.core.pipeline_parallel.plan.render_strips import Strips
from megatron.core.pipeline_parallel.plan.simulate import Simulation

_LEFT, _TOP, _HEIGHT, _GAP = 18, 20, 16, 2
_LETTER = 5.5  # pixels of a digit


def to_picture(
    simulation: Simulation, *, span: float | None = None, width: int = 760, strips: Strips | None = None
) -> str:
    """SVG: a lane a rank, a box a computation with its microbatch's number where there is room; first chunks are dark.

    span: the time at the right end, for several pictures on one axis; by default the makespan. strips: what is drawn
    below each lane, where they are of this simulation.
    """
    num_ranks = len(simulation.plan.rows)
    left, right = (strips.left, strips.right) if strips else (_LEFT, 4)
    scale = (width - left - right) / (span or simulation.makespan or 1.0)
    below = strips if strips and strips.simulation is simulation else None
    step = _HEIGHT + _GAP + (below.height if below else 0)
    height = _TOP + num_ranks * step
    boxes: dict[tuple[str, str], list[str]] = defaultdict(list)  # colour, shade -> parts of a path
    numbers: list[str] = []
    lanes: list[str] = []
    kinds: set[int] = set()
    for rank, row in enumerate(simulation.plan.rows):
        y = _TOP + rank * step
        text_y = y + _HEIGHT * 0.5 + 3.5
        numbers.append(f'<text x="4" y="{text_y:g}">{rank}</text>')
        lanes.append(f"M{left} {y}h{simulation.makespan * scale:.1f}v{_HEIGHT}H{left}z")
        for start, end, place, _ in bars(simulation, rank):
            kind, stage, microbatch = row[place][:3]
            kinds.add(kind)
            x, box = left + start * scale, (end - start) * scale
            shade = f"{shade_of(simulation.plan.placement, stage):.2g}"
            boxes[COLOURS[kind], shade].append(
                f"M{x:.1f} {y}h{max(box - 0.6, 0.2):.1f}v{_HEIGHT}h-{max(box - 0.6, 0.2):.1f}z"
            )
            if box > _LETTER * len(str(microbatch)) + 1:
                numbers.append(f'<text x="{x + 1.5:.1f}" y="{text_y:g}">{microbatch}</text>')
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="9">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<path fill="#e6e6e6" d="{"".join(lanes)}"/>',
        *(
            f'<path fill="{colour}" fill-opacity="{shade}" d="{"".join(paths)}"/>'
            for (colour, shade), paths in sorted(boxes.items())
        ),
        *numbers,
    ]
    for place, kind in enumerate(sorted(kinds)):
        x = left + 44 * place
        parts.append(f'<path fill="{COLOURS[kind]}" d="M{x} 4h10v10h-10z"/>')
        parts.append(f'<text x="{x + 13}" y="12.5">{Kind(kind).name}</text>')
    if below:
        parts += below.legend(left + 44 * len(kinds), 4)
        for rank in range(num_ranks):
            parts += below.draw(rank, left, _TOP + rank * step + _HEIGHT + _GAP, scale)
    said = f"{simulation.plan.schedule}, bubble {simulation.bubble_rate:.1%}"
    parts.append(f'<text x="{width - 4}" y="12.5" text-anchor="end">{said}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
