"""What ranks measured while they trained, and the cost model that a schedule is solved for again.

Everything is whole nanoseconds, and every choice among values is a median or a maximum: ranks that are given
the same figures come to the same costs, bit for bit, and so to the same plan.

[Note: several ranks measured one stage] Data parallel copies of a stage, and the tensor parallel ranks in it, run one
plan. A step is over when the slowest of them is, so a stage costs the most that any of them needs. Each figure is a
median over steps and microbatches before that: the maximum is of what a rank does time and again, not of its worst
moment.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypedDict

from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import BW, IS_COMPUTE, B, F, Plan, Row, W
from megatron.core.pipeline_parallel.plan.measuring.timeline_files import OpTimes
from megatron.core.pipeline_parallel.plan.placement import Placement
from megatron.core.pipeline_parallel.plan.simulate import waiting_share

Times = Sequence[int | None]  # ns by global stage, None where it has no such computation


class Figures(TypedDict):
    """Of one rank, JSON-able. pipeline: world ranks of this pipeline. rank: the place in it.

    times: [kind, global stage, median ns of a computation]. link_ns: a message on this rank's slowest link, 0 if not
    measured. steps: [iteration, ns from the first computation's start to the last one's end, ns in computations].
    peak_bytes: the most on top of what a step began with, 0 if not measured.
    """

    pipeline: list[int]
    rank: int
    times: list[list[int]]
    link_ns: int
    steps: list[list[int]]
    peak_bytes: int


NOT_RUN = OpTimes(0.0, 0.0)


@dataclass
class RankStep:
    """One step of one rank. rank: its place in the pipeline. spans: by place in its row of the plan, NOT_RUN where a
    step broke off. link_ns: a message, as known then. peak_bytes: beyond what it began with. repeated: forwards ran
    again, which makes it a step like no other: messages of its first run arrived, or those of its second."""

    iteration: int
    plan: Plan
    rank: int
    spans: list[OpTimes]
    link_ns: int = 0
    peak_bytes: int = 0
    repeated: bool = False


def figures_of(
    steps: Sequence[RankStep],
    pipeline: Sequence[int],
    peak_bytes: int = 0,
    link_ns: int = 0,
) -> Figures:
    """Medians of a rank's steps, of which there is at least one."""
    assert steps, "figures of no step"
    durations: dict[tuple[int, int], list[int]] = defaultdict(list)
    totals = []
    for step in steps:
        row = step.plan.rows[step.rank]
        busy = busy_times(row, step.spans)
        for key, times in busy.items():
            durations[key] += [max(0, _ns(one)) for one in times]
        computed = [span for op, span in zip(row, step.spans, strict=True) if IS_COMPUTE[op[0]]]
        first, last = computed[0], computed[-1]
        span_ns = _ns(last.end_s) - _ns(first.start_s + first.wait_s)  # waiting for the first input apart
        totals.append([step.iteration, span_ns, sum(map(_ns, itertools.chain(*busy.values())))])
    return Figures(
        pipeline=list(pipeline),
        rank=steps[0].rank,
        times=[[kind, stage, median(values)] for (kind, stage), values in sorted(durations.items())],
        link_ns=link_ns,
        steps=totals,
        peak_bytes=peak_bytes,
    )


def busy_times(row: Row, spans: Sequence[OpTimes]) -> dict[tuple[int, int], list[float]]:
    """(kind, global stage) -> seconds of each of a row's computations; parts of a W are one. spans: by place."""
    whole: dict[tuple[int, int, int], float] = defaultdict(float)
    for op, span in zip(row, spans, strict=True):
        if IS_COMPUTE[op[0]]:
            whole[op[:3]] += span.busy_s
    found: dict[tuple[int, int], list[float]] = defaultdict(list)
    for (kind, stage, _), seconds in whole.items():
        found[kind, stage].append(seconds)
    return found


def median(values: Sequence[int]) -> int:
    """The middle one, of an even number the lower one of the two: a value that was measured, and never a rounding."""
    return sorted(values)[(len(values) - 1) // 2]


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


# Costs of all ranks' figures -----------------------------------------------------------------------------


def costs_of(figures: Sequence[Figures], placement: Placement) -> CostModel:
    """Nanoseconds by global stage; of activations equal shares of a rank's, as bytes are not measured by stage.

    figures: of every rank of at least one pipeline, in any order; see the note of this module for how they are merged.
    A BW counts B + W, divided as the B's and W's that were seen elsewhere, evenly where none was. One number stands for
    every transfer, that of the slowest link: a link that is slower than the plan thinks stalls both of its ranks in
    every microbatch, one that is faster only has more room.
    """
    times: dict[tuple[int, int], int] = {}
    for one in figures:
        for kind, stage, value in one["times"]:
            times[kind, stage] = max(value, times.get((kind, stage), 0))
    stages = range(placement.num_stages)
    missing = [stage for stage in stages if (F, stage) not in times]
    assert not missing, f"no rank has measured the forwards of stages {missing}"
    b, w, bw = ([times.get((kind, stage)) for stage in stages] for kind in (B, W, BW))
    comm = float(max(one["link_ns"] for one in figures))
    backwards, weights = divide_backwards(b, w, bw)
    every = [times[F, stage] for stage in stages], backwards, weights
    of_f, of_b, of_w = (tuple(map(float, values)) for values in every)
    share = (1 / placement.num_chunks,) * placement.num_stages
    return CostModel(of_f, of_b, of_w, share, share, comm)


def divide_backwards(inputs: Times, weights: Times, both: Times) -> tuple[list[int], list[int]]:
    """Times of B and of W from those of B, W and BW.

    A BW is divided as the sums of the B's and W's of other stages, evenly where there are none; 0 where nothing is. The
    two add up to the BW.
    """
    seen_b, seen_w = (sum(filter(None, times)) for times in (inputs, weights))
    if not seen_b + seen_w:
        seen_b = seen_w = 1
    made = []
    for b, w, bw in zip(inputs, weights, both, strict=True):
        if b is None and w is None and bw is not None:
            b = bw * seen_b // (seen_b + seen_w)
            w = bw - b
        made.append((b or 0, w or 0))
    return [b for b, _ in made], [w for _, w in made]


# What figures say of a run -------------------------------------------------------------------------------


def bubble_rate(steps: Iterable[tuple[int, int]]) -> float:
    """The measured bubble of one step. steps: of each rank, (ns from its first start to its last end, ns computing).

    (the longest of all ranks - the computing of the busiest one) / the longest, as for a planned one.
    """
    spans, busy = zip(*steps, strict=True)
    return max(0.0, waiting_share(max(spans), max(busy)))


def slowest_pipeline(figures: Sequence[Figures]) -> list[Figures]:
    """Of one step's figures, those of the pipeline that took the longest, of those that all ranks have told of; by
    rank, empty where there is none."""
    pipelines: dict[tuple[int, ...], dict[int, Figures]] = defaultdict(dict)
    for one in figures:
        pipelines[tuple(one["pipeline"])][one["rank"]] = one
    whole = [
        [ranks[rank] for rank in sorted(ranks)]
        for pipeline, ranks in sorted(pipelines.items())
        if len(ranks) == len(pipeline)
    ]
    return max(whole, key=lambda ranks: max(span for one in ranks for _, span, _ in one["steps"]), default=[])


def peaks_of(figures: Sequence[Figures], num_ranks: int) -> tuple[int, ...]:
    """By pipeline rank, bytes on top of what a step began with, the most of all pipelines; 0 where none measured."""
    return tuple(
        max((one["peak_bytes"] for one in figures if one["rank"] == rank), default=0)
        for rank in range(num_ranks)
    )
