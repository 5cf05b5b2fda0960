"""Simulated plans as pictures: a lane a rank, a box a computation; below it the rank's gathers and reductions, and
what it holds over time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from megatron.core.pipeline_parallel.plan.ir import HSDP_ALL_REDUCE, REDUCE, UNSHARD
from megatron.core.pipeline_parallel.plan.simulate import Simulation
from megatron.core.words import size_text
from tools.drawing.lanes import Box, Lane, Stack, lanes
from tools.drawing.page import Key, Picture
from tools.schedules.held_over_time import (
    bars,
    counts_bytes,
    held_over_time,
    limits_in_bytes,
    summary,
)

# Of F, B, W and BW; letters on them are dark, on a light page and on a dark one.
COLOURS = ("#5a96e6", "#55b88c", "#e8b23e", "#3fa9a5")
_WORDS = ("F: forward", "B: input gradient", "W: weight gradient", "BW: backward")
IDLE, OUTSIDE = "var(--idle)", "var(--outside)"
MOST_BOXES = 6000  # that are drawn with a tooltip each
_WIRE = {
    UNSHARD: ("gather", "#e08a3c"),
    REDUCE: ("reduction", "#c2476b"),
    HSDP_ALL_REDUCE: ("sum over instances", "#8a5bb0"),
}
_MEMORY = (  # from below
    ("states at rest", "#8d99a6"),
    ("activations", "#86b1e8"),
    ("gathered weights", "#f0b57c"),
    ("whole gradients", "#d9708f"),
    ("gradients under way", "#93385a"),
)
COUNTED = (
    "the longest that a rank takes from its first start to its last end{}, less what the busiest rank computes{}, as a "
    "share of it. Pale grey, before a rank's first start and after its last end, is not counted: the steps before and "
    "after run there."
)
ACTIVATIONS = "whole-stage activations of a microbatch"


class HeldCurves:
    """What the ranks of one simulation hold over time. limits: by rank, in the unit of activations, for plans without
    gathers and reductions; others know what limit they were made for. unit: of what is held, where that is not bytes.
    at_rest: by rank, else as units say. peaks: by rank, the most that it holds. most: what is as high as a strip."""

    def __init__(
        self,
        simulation: Simulation,
        limits: Sequence[float] | None = None,
        unit: str = ACTIVATIONS,
        at_rest: Sequence[float] | None = None,
    ) -> None:
        self._end, wires = simulation.makespan, simulation.timeline.lanes
        self.limits = limits_in_bytes(simulation) if wires else limits
        self.unit = "bytes" if counts_bytes(simulation) else unit
        self._held: list[list[tuple[float, list[float]]]] = []  # by rank: time, sums of kinds from below
        for rank, held in enumerate(held_over_time(simulation)):
            of_units = wires[rank].units.shard_bytes if wires else 0.0
            rest = float(of_units if at_rest is None else at_rest[rank])
            moments = [(0.0, [rest] * len(_MEMORY))]
            for at, one in held:
                kinds = (rest, one.activation, one.gathered, one.gradients, one.under_way)
                moments.append((at, [*itertools.accumulate(kinds)]))
            self._held.append(moments)
        self.peaks = [max(sums[-1] for _, sums in held) for held in self._held]
        self.most = max(*self.peaks, *(self.limits or (0.0,))) or 1.0

    @property
    def keys(self) -> list[Key]:
        """Of the kinds that are drawn."""
        every = [[0.0, *sums] for held in self._held for _, sums in held]
        kinds = (one for at, one in enumerate(_MEMORY) if any(sums[at + 1] > sums[at] for sums in every))
        limit = [Key("memory limit", "var(--bad)", "line")] if self.limits is not None else []
        return [*(Key(f"memory: {name}", colour) for name, colour in kinds), *limit]

    def strip(self, rank: int, height: int) -> Stack:
        """One rank's curve, with its peak and its limit."""
        peak, limit = self.peaks[rank], self.limits[rank] if self.limits else None
        over = limit is not None and peak > limit + 1e-9 * max(1.0, limit)
        said = [] if limit is None else [f"limit {size_text(limit, self.unit)}"]
        said.append(f"peak {size_text(peak, self.unit)}{' !' * over}")
        colours = [colour for _, colour in _MEMORY]
        return Stack("memory", self._held[rank], colours, self.most, self._end, limit, said, over, height)


def plan_picture(
    simulation: Simulation,
    measured: Simulation | None = None,
    *,
    title: str | None = None,
    span: float | None = None,
    held: HeldCurves | None = None,
    small: bool = False,
    time_name: str = "time",
) -> Picture:
    """A plan; beside each lane of it that of a measured step. title: by default its figures. span: the time at the
    right end, for several pictures on one axis; by default the longer makespan. held: of the plan. small: without
    tooltips, for documents."""
    held = held or HeldCurves(simulation)
    both = [simulation] if measured is None else [simulation, measured]
    suffixes = ("",) if measured is None else (" planned", " measured")
    strips: list[Lane | Stack] = []
    for rank in range(len(simulation.plan.rows)):
        strips += [_lane(one, rank, suffix, small=small) for one, suffix in zip(both, suffixes, strict=True)]
        strips += _wire(simulation, rank)
        strips.append(held.strip(rank, 22 if small else 48))
    longest = span or max(one.makespan for one in both)
    if title is None:
        title = (
            summary(simulation)
            if measured is None
            else f"{simulation.plan.schedule}: "
            + "; ".join(
                f"{suffix.strip()} {one.makespan:.5g}, bubble {one.bubble_rate:.2%}"
                for one, suffix in zip(both, suffixes, strict=True)
            )
        )
    keys, note = [*_keys(both), *held.keys], f"{how_counted(simulation)} Memory is in {held.unit}."
    return lanes(title, strips, span=longest, time_name=time_name, keys=keys, note=note)


def how_counted(simulation: Simulation) -> str:
    """What a bubble is, beside grey that is none."""
    grey = 1 - sum(simulation.busy) / (len(simulation.busy) * simulation.makespan or 1.0)
    counted = COUNTED.format(f" ({simulation.cost:.5g})", f" ({simulation.work:.5g})")
    return f"Bubble {simulation.bubble_rate:.2%}: {counted} All grey together is {grey:.2%} of the lanes."


def _lane(simulation: Simulation, rank: int, suffix: str = "", *, small: bool) -> Lane:
    """small: no tooltips. Idle time within the rank's step is grey, what is outside of it pale."""
    clock, least = 0.0, 1e-9 * simulation.makespan
    boxes: list[Box] = []
    gaps: list[Box] = []
    for start, end, place, label in bars(simulation, rank):
        kind, stage, microbatch = simulation.plan.rows[rank][place][:3]
        if start > clock + least:
            gaps.append(Box(clock, start, IDLE, "bubble") if boxes else Box(clock, start, OUTSIDE))
        said = "" if small else f"{label}: {start:g} to {end:g}"
        boxes.append(Box(start, end, _colour(simulation, kind, stage), str(microbatch), said))
        clock = max(clock, end)
    if simulation.makespan > clock + least:
        gaps.append(Box(clock, simulation.makespan, OUTSIDE))
    return Lane(f"{rank}{suffix}", boxes, gaps, 18 if small else 20)


def _wire(simulation: Simulation, rank: int) -> list[Lane]:
    """The rank's gathers and reductions, where a plan has them."""
    if not simulation.timeline.lanes:
        return []
    row, times = simulation.plan.rows[rank], simulation.timeline.lanes[rank].times
    boxes = [Box(*span, _WIRE[row[place][0]][1]) for place, span in times.items() if span[1] > span[0]]
    return [Lane("wire", boxes, [Box(0.0, simulation.makespan, OUTSIDE)], 10)]


def _colour(simulation: Simulation, kind: int, stage: int) -> str:
    """Of a computation: later chunks are lighter."""
    placement = simulation.plan.placement
    light = 0.6 * placement.chunk_of(stage) / max(placement.num_chunks - 1, 1)
    parts = (int(COLOURS[kind][at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * light):02x}" for part in parts)


def _keys(simulations: Sequence[Simulation]) -> list[Key]:
    """Everything that lanes show."""
    drawn = {op[0] for one in simulations for row in one.plan.rows for op in row}
    chunks = max(one.plan.placement.num_chunks for one in simulations)
    keys = [
        Key(words, colour)
        for kind, (words, colour) in enumerate(zip(_WORDS, COLOURS, strict=True))
        if kind in drawn
    ]
    if chunks > 1:
        keys.append(Key("light: second chunk" if chunks == 2 else "lighter: later chunks", "#bdd5f5"))
    keys += [
        Key("number: microbatch"),
        Key("grey: idle (bubble)", IDLE),
        Key("pale grey: not counted", OUTSIDE),
    ]
    wired = any(one.timeline.lanes for one in simulations)
    return [
        *keys,
        *(Key(f"wire: {name}", colour) for kind, (name, colour) in _WIRE.items() if wired and kind in drawn),
    ]


def to_svg(simulation: Simulation) -> str:
    """A file of one plan: a box a computation, its text and times as tooltip."""
    return plan_picture(simulation).svg(1200)


def to_picture(simulation: Simulation, *, span: float | None = None, width: int = 760) -> str:
    """A file of one plan in some ten kilobytes, for documents."""
    title = f"{simulation.plan.schedule}, bubble {simulation.bubble_rate:.1%}"
    return plan_picture(simulation, title=title, span=span, small=True).svg(width)


def beside_svg(planned: Simulation, measured: Simulation, held: HeldCurves | None = None) -> str:
    """A file with two lanes a rank on one axis, planned above measured; times in seconds."""
    return plan_picture(planned, measured, held=held, time_name="seconds").svg(1200)


def several_svg(simulations: Sequence[Simulation]) -> str:
    """A file of several plans under one another on one axis of time, bubbles named."""
    plan = simulations[0].plan
    strips: list[Lane | Stack] = []
    for one in simulations:
        peak = f"{max(one.peak_activation):g}"
        told = f"{one.plan.schedule}: step {one.cost:g}, bubble {one.bubble_rate:.1%}, peak activation {peak}"
        strips.append(Lane("", heading=told, height=26))
        strips += [_lane(one, rank, small=True) for rank in range(len(one.plan.rows))]
    title = f"{plan.placement.num_ranks} pipeline ranks, {plan.num_microbatches} microbatches"
    span, keys = max(one.makespan for one in simulations), _keys(simulations)
    note = f"Bubble: {COUNTED.format('', '')}"
    return lanes(title, strips, span=span, time_name="time", keys=keys, note=note).svg()
