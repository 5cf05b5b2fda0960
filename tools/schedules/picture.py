"""Simulated plans as pictures: a lane a rank, a box a computation; below it the rank's gathers and reductions, and
what it holds over time."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from megatron.core.pipeline_parallel.plan.held.units import groups_of
from megatron.core.pipeline_parallel.plan.ir import HSDP_ALL_REDUCE, REDUCE, UNSHARD, Plan
from megatron.core.pipeline_parallel.plan.residency import over_ranks
from megatron.core.pipeline_parallel.plan.simulate import Simulation, waiting_share
from megatron.core.words import counted, plain, share_text, size_text
from tools.drawing.lanes import Box, Bracket, Lane, Stack, Strip, lanes
from tools.drawing.page import Key, Picture
from tools.schedules.held_over_time import (
    bars,
    counts_bytes,
    ends_apart,
    held_over_time,
    limits_in_bytes,
    summary,
)

# Of F, B, W and BW; letters on them are dark, on a light page and on a dark one.
COLOURS = ("#5a96e6", "#55b88c", "#e8b23e", "#3fa9a5")
_WORDS = ("F: forward", "B: input gradient", "W: weight gradient", "BW: whole backward")
IDLE, OUTSIDE = "var(--idle)", "var(--outside)"
_GREYS = (("grey: idle (bubble)", IDLE), ("pale grey: not counted", OUTSIDE))
MOST_BOXES = 6000  # that are drawn with a tooltip each
_WIRE = {
    UNSHARD: ("wire: gather", "#e08a3c"),
    REDUCE: ("wire: reduction", "#c2476b"),
    HSDP_ALL_REDUCE: ("wire: sum over instances", "#8a5bb0"),
}
_MEMORY = (  # from below
    ("memory: states at rest", "#8d99a6"),
    ("memory: activations", "#86b1e8"),
    ("memory: gathered weights", "#f0b57c"),
    ("memory: whole gradients", "#d9708f"),
    ("memory: gradients under way", "#93385a"),
)
COUNTED = (
    "Step time is the longest that a rank takes from its first start to its last end: the time from one step to the "
    "next where a rank begins each as soon as its own part of the last is done (--enable-optimizer-post-validation). "
    "Where all ranks wait for each other between steps, it is the makespan, from the first start of all ranks to the "
    "last end. Bubble is the step time less what the busiest rank computes, as a share of the step time. Pale grey, "
    "before a rank's first start and after its last end, is not counted: the steps before and after run there."
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
            of_units = wires[rank].units.bytes_at_rest if wires else 0.0
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
        keys = [Key(*one) for one in kinds]
        if len(keys) > 1:
            keys.append(Key("memory: in all", "#3f7fd6", "line"))
        return [*keys, *([Key("memory limit", "var(--bad)", "line")] if self.limits is not None else [])]

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
    time_name: str = "",
    explained: bool = True,
) -> Picture:
    """A plan; beside each lane of it that of a measured step. title: by default its figures. span: the time at the
    right end, for several pictures on one axis; by default the longer makespan. held: of the plan. small: without
    tooltips, for documents. time_name: by default in units of F. explained: with what figures mean in general."""
    held = held or HeldCurves(simulation)
    both = {"": simulation} if measured is None else {"planned": simulation, "measured": measured}
    strips: list[Strip] = []
    for rank in range(len(simulation.plan.rows)):
        for name, one in both.items():
            label = name if name == "measured" else f"rank {rank} {name}".rstrip()
            strips.append(_lane(one, rank, label, small=small))
        strips += _wire(simulation, rank)
        strips.append(held.strip(rank, 22 if small else 48))
    strips += [bar for name, one in both.items() for bar in _ends(one, name)]
    told = (
        f"{name} step time {plain(one.cost, 5)}, bubble {share_text(one.bubble_rate, 2)}"
        for name, one in both.items()
    )
    figures = summary(simulation) if measured is None else f"{simulation.plan.schedule}: {'; '.join(told)}"
    planned = "" if measured is None else "Wire and memory show the plan, nothing measured. "
    notes = [
        how_counted(simulation),
        f"{planned}Memory is in {held.unit}.",
        *explained * [general(both.values())],
    ]
    return lanes(
        figures if title is None else title,
        strips,
        span=span or max(one.makespan for one in both.values()),
        time_name=time_name or _time_name(simulation),
        keys=[*_keys(strips, simulation.plan), *held.keys],
        note=" ".join(notes),
    )


def how_counted(simulation: Simulation) -> str:
    """Where the bubble comes from, beside grey that is none."""
    grey = 1 - sum(simulation.busy) / (len(simulation.busy) * simulation.makespan or 1.0)
    return (
        f"Step time {plain(simulation.cost, 5)}, of which the busiest rank computes {plain(simulation.work, 5)}: "
        f"bubble {share_text(simulation.bubble_rate, 2)}. All grey together is {share_text(grey, 2)} of the lanes."
    )


def general(simulations: Iterable[Simulation]) -> str:
    """What figures and lanes of pictures mean."""
    if not (wires := [lane.lanes for one in simulations for lane in one.timeline.lanes]):
        return COUNTED
    asked, ranks = wires[0].residency, over_ranks(groups_of(wires[0].stages))
    shared = f"{ranks} share each stage ({asked.strategy}, policy {asked.policy})"
    return (
        f"{COUNTED} {shared}: the wire of a rank gathers weights before they are used and reduces gradients."
    )


def _time_name(simulation: Simulation) -> str:
    """Of an axis without seconds."""
    is_one = all(abs(one * simulation.plan.placement.num_chunks - 1) < 1e-9 for one in simulation.costs.f)
    return "time: a rank's F takes 1" if is_one else "time, in the unit of --time-f"


def _ends(simulation: Simulation, name: str) -> list[Bracket]:
    """What a step takes; of all ranks together where that is more. name: before it."""
    spans = simulation.spans
    rank = max(range(len(spans)), key=lambda one: spans[one][1] - spans[one][0])
    name = f"{name} step time".strip()
    found = [Bracket(f"{name} {plain(simulation.cost, 5)} (rank {rank})", *spans[rank])]
    if ends_apart(simulation):
        name = name.replace("step time", "makespan")
        found.append(Bracket(f"{name} {plain(simulation.makespan, 5)} (all ranks)", 0.0, simulation.makespan))
    return found


def _lane(simulation: Simulation, rank: int, label: str, *, small: bool) -> Lane:
    """small: no tooltips. Idle time within the rank's step is grey, what is outside of it pale."""
    clock, least, placement = 0.0, 1e-9 * simulation.makespan, simulation.plan.placement
    boxes: list[Box] = []
    gaps: list[Box] = []
    for start, end, place, text in bars(simulation, rank):
        kind, stage, microbatch = simulation.plan.rows[rank][place][:3]
        if start > clock + least:
            gaps.append(Box(clock, start, IDLE, "bubble") if boxes else Box(clock, start, OUTSIDE))
        said = "" if small else f"{text}: {plain(start, 6)} to {plain(end, 6)}"
        shade = _shade(kind, placement.chunk_of(stage), placement.num_chunks)
        boxes.append(Box(start, end, shade, str(microbatch), said))
        clock = max(clock, end)
    if simulation.makespan > clock + least:
        gaps.append(Box(clock, simulation.makespan, OUTSIDE))
    return Lane(label, boxes, gaps, 18 if small else 20)


def _wire(simulation: Simulation, rank: int) -> list[Lane]:
    """The rank's gathers and reductions, where a plan has them."""
    if not simulation.timeline.lanes:
        return []
    row, times = simulation.plan.rows[rank], simulation.timeline.lanes[rank].times
    boxes = [Box(*span, _WIRE[row[place][0]][1]) for place, span in times.items() if span[1] > span[0]]
    return [Lane("wire", boxes, (), 10)]


def _shade(kind: int, chunk: int, num_chunks: int) -> str:
    """The colour of a computation: later chunks are lighter."""
    light = 0.6 * chunk / max(num_chunks - 1, 1)
    parts = (int(COLOURS[kind][at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * light):02x}" for part in parts)


def _keys(strips: Sequence[Strip], *plans: Plan) -> list[Key]:
    """Everything that lanes show, and nothing else."""
    lanes_only = (strip for strip in strips if isinstance(strip, Lane))
    drawn = {box.colour for lane in lanes_only for box in (*lane.gaps, *lane.boxes)}
    most = max(plan.placement.num_chunks for plan in plans)
    every = {text: {colour} for text, colour in colours().items()}
    for kind, text in enumerate(_WORDS):
        every[text] = {_shade(kind, at, chunks) for chunks in range(1, most + 1) for at in range(chunks)}
    keys = [Key(text, " ".join(sorted(own & drawn))) for text, own in every.items() if own & drawn]
    light = [Key("light: second chunk" if most == 2 else "lighter: later chunks")] if most > 1 else []
    return [*keys, Key("number: microbatch"), *light]


def colours() -> dict[str, str]:
    """Of a legend of everything that pictures may show, by its text."""
    return dict([*zip(_WORDS, COLOURS, strict=True), *_GREYS, *_WIRE.values(), *_MEMORY])


def to_svg(simulation: Simulation) -> str:
    """A file of one plan: a box a computation, its text and times as tooltip."""
    return plan_picture(simulation).svg(1200)


def to_picture(simulation: Simulation, *, span: float | None = None, width: int = 760) -> str:
    """A file of one plan in some ten kilobytes, for documents."""
    title = f"{simulation.plan.schedule}, bubble {share_text(simulation.bubble_rate)}"
    return plan_picture(simulation, title=title, span=span, small=True, explained=False).svg(width)


def beside_svg(planned: Simulation, measured: Simulation, held: HeldCurves | None = None) -> str:
    """A file with two lanes a rank on one axis, planned above measured; times in seconds."""
    return plan_picture(planned, measured, held=held, time_name="seconds").svg(1200)


def several_svg(simulations: Sequence[Simulation]) -> str:
    """A file of several plans under one another on one axis of time, bubbles named."""
    plan = simulations[0].plan
    strips: list[Strip] = []
    for one in simulations:
        peak = plain(max(one.peak_activation))
        own = f"step time {plain(one.cost, 5)}, bubble {share_text(one.bubble_rate)}"
        if ends_apart(one):  # as with the default flags, where ranks wait for each other between steps
            bubble = share_text(waiting_share(one.makespan, one.work))
            own = f"step time {plain(one.makespan, 5)}, bubble {bubble}; with optimizer post-validation {own}"
        told = f"{one.plan.schedule}: {own}, peak activation {peak}"
        strips.append(Lane("", heading=told, height=26))
        strips += [_lane(one, rank, f"rank {rank}", small=True) for rank in range(len(one.plan.rows))]
        strips += _ends(one, "")
    span, keys = max(one.makespan for one in simulations), _keys(strips, *(one.plan for one in simulations))
    name = _time_name(simulations[0])
    return lanes(pipeline_title(plan), strips, span=span, time_name=name, keys=keys, note=COUNTED).svg()


def pipeline_title(plan: Plan) -> str:
    """What plans that are compared share."""
    ranks = counted(plan.placement.num_ranks, "pipeline rank")
    return f"{ranks}, {counted(plan.num_microbatches, 'microbatch')}"
