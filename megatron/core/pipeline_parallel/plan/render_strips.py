"""What is drawn below a rank's computations, on their axis of time: its gathers and reductions, and what it holds."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence

from megatron.core.pipeline_parallel.plan.held_over_time import (
    counts_bytes,
    held_over_time,
    limits_in_bytes,
)
from megatron.core.pipeline_parallel.plan.ir import HSDP_ALL_REDUCE, REDUCE, UNSHARD
from megatron.core.pipeline_parallel.plan.simulate import Simulation
from megatron.core.pipeline_parallel.plan.sizes import size_text

_LANE_HEIGHT, _MEMORY_HEIGHT, _GAP = 10, 60, 14
_LANE = {
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


class Strips:
    """Of one simulation. limits: by rank, in the unit of activations, for plans without gathers and reductions; others
    know what limit they were made for. unit: of what is held, where that is not bytes. at_rest: by rank, else as units
    say. height: of a rank's strips. left, right: room for their texts. peaks: by rank, the most that it holds. most:
    what is as high as a strip."""

    left, right = 52, 96

    def __init__(
        self,
        simulation: Simulation,
        limits: Sequence[float] | None,
        unit: str,
        at_rest: Sequence[float] | None = None,
    ) -> None:
        self.simulation = simulation
        self.lanes, in_bytes = simulation.timeline.lanes, limits_in_bytes(simulation)
        self.limits = in_bytes if self.lanes else limits
        self.unit = "bytes" if counts_bytes(simulation) else unit
        self.end = simulation.makespan
        self.rows = simulation.plan.rows
        self._held: list[list[tuple[float, list[float]]]] = []  # by rank: time, sums of kinds from below
        for rank in range(len(self.rows)):
            of_units = self.lanes[rank].units.shard_bytes if self.lanes else 0.0
            rest = float(of_units if at_rest is None else at_rest[rank])
            self._held.append([(0.0, [rest] * len(_MEMORY))])
            for at, one in held_over_time(simulation, rank):
                kinds = (rest, one.activation, one.gathered, one.gradients, one.under_way)
                self._held[-1].append((at, [*itertools.accumulate(kinds)]))
        self.peaks = [max(sums[-1] for _, sums in held) for held in self._held]
        self.most = max(*self.peaks, *(self.limits or (0.0,))) or 1.0
        self.height = (_LANE_HEIGHT if self.lanes else 0) + _MEMORY_HEIGHT + _GAP

    def legend(self, x: float, y: float) -> list[str]:
        """Of what is drawn, one line from x on, 10 pixels high."""
        kinds = {op[0] for row in self.rows for op in row}
        found = [one for kind, one in _LANE.items() if self.lanes and kind in kinds]
        every = [[0.0, *sums] for held in self._held for _, sums in held]
        for kind, one in enumerate(_MEMORY):
            if any(sums[kind + 1] > sums[kind] for sums in every):
                found.append(one)
        parts = []
        for name, colour in found:
            parts.append(f'<path fill="{colour}" d="M{x:.0f} {y:g}h10v10h-10z"/>')
            parts.append(f'<text x="{x + 13:.0f}" y="{y + 8.5:g}">{name}</text>')
            x += 26 + 5.3 * len(name)
        return parts

    def draw(self, rank: int, x: float, y: float, scale: float) -> list[str]:
        """x: of time 0, scale: pixels in a unit of time."""
        parts: list[str] = []
        if self.lanes:
            parts = self._draw_lane(rank, x, y, scale)
            y += _LANE_HEIGHT
        base, high = y + _MEMORY_HEIGHT, (_MEMORY_HEIGHT - 4) / self.most
        parts.append(
            f'<path fill="#f4f4f4" d="M{x:g} {y + 2:g}H{x + self.end * scale:.1f}V{base:g}H{x:g}z"/>'
        )
        points: dict[
            float, list[float]
        ] = {}  # of what is within half a pixel, the most, and behind it the last
        for at, sums in self._held[rank]:
            column = round(2 * at * scale) / 2
            points[column] = max(points.get(column, sums), sums, key=lambda one: one[-1])
            points[column + 0.25] = sums
        for kind, (_, colour) in reversed([*enumerate(_MEMORY)]):  # what lies above is behind
            path, before = f"M{x:g} {base:g}", 0.0
            for column, sums in points.items():
                if sums[kind] != before:
                    before = sums[kind]
                    path += f"H{x + column:.1f}V{base - before * high:.1f}"
            path += f'H{x + self.end * scale:.1f}V{base:g}z" shape-rendering="crispEdges'
            parts.append(f'<path fill="{colour}" d="{path}"/>')
        peak, limit = self.peaks[rank], self.limits[rank] if self.limits else float("inf")
        over = peak > limit + 1e-9 * max(1.0, limit)
        texts = [(_LIMIT if over else "#222", f"peak {size_text(peak, self.unit)}{' !' * over}")]
        if self.limits is not None:
            path = f"M{x:g} {base - limit * high:.1f}H{x + self.end * scale + 4:.1f}"
            parts.append(f'<path stroke="{_LIMIT}" stroke-dasharray="4 2" fill="none" d="{path}"/>')
            texts.insert(0, (_LIMIT, f"limit {size_text(limit, self.unit)}"))
        parts.append(f'<text x="4" y="{base - 16:g}" fill="#666">memory</text>')
        for line, (colour, text) in enumerate(texts):
            place = f'x="{x + self.end * scale + 8:.1f}" y="{y + 9 + 12 * line:g}"'
            parts.append(f'<text {place} fill="{colour}">{text}</text>')
        if rank + 1 == len(self.rows):  # the axis of all
            for time in (self.end * quarter / 4 for quarter in range(5)):
                place = f'x="{x + time * scale:.1f}" y="{base + 10:g}" text-anchor="middle"'
                parts.append(f'<text {place} fill="#666">{time:.4g}</text>')
        return parts

    def _draw_lane(self, rank: int, x: float, y: float, scale: float) -> list[str]:
        paths: dict[int, str] = defaultdict(str)
        for place, (start, end) in self.lanes[rank].times.items():
            kind, left, right = self.rows[rank][place][0], start * scale, end * scale
            if end > start:
                wide = max(right - left - 0.4, 0.2)
                paths[kind] += f"M{x + left:.1f} {y:g}h{wide:.1f}v{_LANE_HEIGHT - 2}h-{wide:.1f}z"
        parts = [f'<path fill="#eee" d="M{x:g} {y:g}H{x + self.end * scale:.1f}v{_LANE_HEIGHT - 2}H{x:g}z"/>']
        parts += [f'<path fill="{_LANE[kind][1]}" d="{path}"/>' for kind, path in paths.items()]
        return [*parts, f'<text x="4" y="{y + 7:g}" fill="#666">wire</text>']
