"""The cost model of a run from what all of its ranks measured: what a schedule is solved for again.

Everything is whole nanoseconds and bytes, and every choice among values is a median or a maximum: ranks that are given
the same figures come to the same costs, bit for bit, and so to the same plan.

[Note: several ranks measured one stage] Data parallel copies of a stage, and the tensor parallel ranks in it, run one
plan. A step is over when the slowest of them is, so a stage costs the most that any of them needs, and holds the most
that any of them holds. Each figure is a median over steps and microbatches before that: the maximum is of what a rank
does time and again, not of its worst moment.

[Note: latency and clocks] Two ranks' clocks differ by an unknown offset. A message takes its latency from the later one
of its two posts to its arrival, which is what a transfer costs in `simulate`. Where the receive is the later post, the
receiver's clock alone tells it. Where the send is, a message from a to b seems to take its latency plus the offset, and
one from b to a its latency minus the offset: half the sum of the fastest of each direction is the latency again, and
what is left is the offset. Time services do the same. So the fastest message that either way tells bounds the latency,
and with it each direction's fastest message bounds the offset from one side. Where receives of one direction were all
posted late, its bound is loose and the other one holds: of the two, the one under which messages took less. The offset
is taken anew for each step, so clocks may drift.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import BW, B, F, Kind, W
from megatron.core.pipeline_parallel.plan.placement import Placement
from megatron.core.pipeline_parallel.plan.rank_figures import Figures, median


def costs_of(figures: Sequence[Figures], placement: Placement) -> CostModel:
    """Nanoseconds by global stage, and bytes, where all ranks have measured them; else shares of a rank's activation.

    figures: of every rank of at least one pipeline, in any order; see the notes of this module for how they are merged.
    A BW counts B + W, divided as the B's and W's that were seen elsewhere, evenly where none was.
    """
    times: dict[tuple[int, int], int] = {}
    for one in figures:
        for kind, stage, value in one["times"]:
            times[kind, stage] = max(value, times.get((kind, stage), 0))

    def by_stage(kind: int) -> list[int | None]:
        return [times.get((kind, stage)) for stage in range(placement.num_stages)]

    forwards = by_stage(F)
    missing = [stage for stage, value in enumerate(forwards) if value is None]
    assert not missing, f"no rank has measured the forwards of stages {missing}"
    backwards, weights = divide_backwards(by_stage(B), by_stage(W), by_stage(BW))
    activation, held = _activations(figures, placement)
    return CostModel(
        f=tuple(float(value or 0) for value in forwards),
        b=tuple(map(float, backwards)),
        w=tuple(map(float, weights)),
        activation=activation,
        held_after_b=held,
        comm=float(latency_ns(figures) or 0),
    )


def divide_backwards(
    inputs: Sequence[float | None], weights: Sequence[float | None], both: Sequence[float | None]
) -> tuple[list[float], list[float]]:
    """Times of B and of W, by stage, from those of B, W and BW, each None where a stage has no such computation.

    A BW is divided as the sums of the B's and W's of other stages, evenly where there are none; 0 where nothing is.
    Whole numbers stay whole, and the two add up to the BW.
    """
    seen_b, seen_w = sum(value or 0 for value in inputs), sum(value or 0 for value in weights)
    if not seen_b + seen_w:
        seen_b = seen_w = 1
    whole = all(isinstance(value, int) for value in [*both, seen_b, seen_w] if value is not None)
    made_b: list[float] = []
    made_w: list[float] = []
    for b, w, bw in zip(inputs, weights, both, strict=True):
        if b is None and w is None and bw is not None:
            b = bw * seen_b // (seen_b + seen_w) if whole else bw * seen_b / (seen_b + seen_w)
            w = bw - b
        made_b.append(b or 0)
        made_w.append(w or 0)
    return made_b, made_w


def _activations(
    figures: Sequence[Figures], placement: Placement
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(bytes after F, bytes between B and W) by global stage; equal shares of a rank's where nothing was measured."""
    most: dict[int, tuple[int, int]] = {}
    for one in figures:
        for stage, after_f, after_b in one["activations"]:
            before = most.get(stage, (0, 0))
            most[stage] = (max(before[0], after_f), max(before[1], after_b))
    if not most:
        shares = (1 / placement.num_chunks,) * placement.num_stages
        return shares, shares
    missing = [stage for stage in range(placement.num_stages) if stage not in most]
    assert not missing, f"no rank has measured the activations of stages {missing}, others have"
    sizes = [most[stage] for stage in range(placement.num_stages)]
    return tuple(float(after_f) for after_f, _ in sizes), tuple(float(after_b) for _, after_b in sizes)


# Transfers -------------------------------------------------------------------------------------------


class _Message(NamedTuple):
    """sent: posted by its sender, on the sender's clock. received, arrived: at its receiver, on the receiver's."""

    sent: int
    received: int
    arrived: int


# (pipeline, lower rank, higher rank, iteration) -> messages upwards, messages downwards
_Exchanges = Mapping[tuple[tuple[int, ...], int, int, int], tuple[list[_Message], list[_Message]]]


def latency_ns(figures: Sequence[Figures]) -> int | None:
    """What a transfer takes: the median of each pair of ranks, of the pairs the most. None where nobody could tell.

    One number stands for every transfer of a plan, and a link that is slower than the plan thinks stalls both of its
    ranks in every microbatch; one that is faster only has more room. So the slowest link counts.
    """
    by_pair: dict[tuple[tuple[int, ...], int, int], list[int]] = defaultdict(list)
    for (pipeline, low, high, _), (up, down) in sorted(_exchanges(figures).items()):
        if up and down:
            by_pair[pipeline, low, high] += _took(up, down)
    return max((median(values) for values in by_pair.values()), default=None)


def _exchanges(figures: Sequence[Figures]) -> _Exchanges:
    """The messages of which both ends have told, by pair of ranks and step."""
    sent: dict[
        tuple[tuple[int, ...], int, int, int], int
    ] = {}  # pipeline, rank, iteration, message -> posted
    for one in figures:
        for iteration, message, posted in one["sends"]:
            sent[tuple(one["pipeline"]), one["rank"], iteration, message] = posted
    exchanges: dict[tuple[tuple[int, ...], int, int, int], tuple[list[_Message], list[_Message]]] = {}
    for one in figures:
        pipeline, rank = tuple(one["pipeline"]), one["rank"]
        for iteration, message, sender, posted, arrived in one["receives"]:
            if (pipeline, sender, iteration, message) in sent:
                key = (pipeline, min(sender, rank), max(sender, rank), iteration)
                up_down = exchanges.setdefault(key, ([], []))
                of = _Message(sent[pipeline, sender, iteration, message], posted, arrived)
                up_down[sender > rank].append(of)
    return exchanges


def _took(up: Sequence[_Message], down: Sequence[_Message]) -> list[int]:
    """Latencies of the messages that two ranks exchanged in one step; see [Note: latency and clocks]."""
    fastest_up, fastest_down = (min(one.arrived - one.sent for one in way) for way in (up, down))
    by_receiver = min(one.arrived - one.received for one in (*up, *down))
    least = max(0, min((fastest_up + fastest_down) // 2, by_receiver))

    def with_offset(offset: int) -> list[int]:
        return [
            max(0, min(one.arrived - one.received, one.arrived - one.sent - ahead))
            for way, ahead in ((up, offset), (down, -offset))
            for one in way
        ]

    return min(with_offset(fastest_up - least), with_offset(least - fastest_down), key=median)


# What figures say of a run ---------------------------------------------------------------------------


def bubble_rate(steps: Iterable[tuple[int, int]]) -> float:
    """The measured bubble of one step. steps: of each rank, (ns from its first start to its last end, ns computing).

    (the longest of all ranks - the computing of the busiest one) / the longest, as for a planned one.
    """
    spans, busy = zip(*steps, strict=True)
    return max(0.0, (max(spans) - max(busy)) / max(spans)) if max(spans) else 0.0


def measured_bubbles(figures: Sequence[Figures]) -> dict[int, float]:
    """Iteration -> the bubble rate of the slowest pipeline in it, for iterations that all ranks of it have told of."""
    steps: dict[int, dict[tuple[int, ...], dict[int, tuple[int, int]]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for one in figures:
        for iteration, span, busy in one["steps"]:
            steps[iteration][tuple(one["pipeline"])][one["rank"]] = (span, busy)
    rates: dict[int, float] = {}
    for iteration, pipelines in sorted(steps.items()):
        whole = [
            list(ranks.values())
            for pipeline, ranks in sorted(pipelines.items())
            if len(ranks) == len(pipeline)
        ]
        if whole:
            rates[iteration] = bubble_rate(max(whole, key=lambda ranks: max(span for span, _ in ranks)))
    return rates


def peaks_of(figures: Sequence[Figures], num_ranks: int) -> tuple[int, ...]:
    """By pipeline rank, bytes on top of what a step began with, the most of all pipelines; 0 where none measured."""
    return tuple(
        max((one["peak_bytes"] for one in figures if one["rank"] == rank), default=0)
        for rank in range(num_ranks)
    )


def drifted(old: CostModel, new: CostModel, share: float = 0.1) -> str | None:
    """What has changed by more than this share since, the largest change, in words; None where nothing has.

    Times that are nothing beside the stages' work (an empty stage, a latency) change a lot without changing a plan: a
    time counts as at least `share` of the mean F + B + W of a stage when its change is judged.
    """
    stages = len(old.f)
    assert stages == len(new.f), f"costs of {stages} and of {len(new.f)} stages"
    least = share * sum(old.f + old.b + old.w) / stages
    changes: list[tuple[float, str]] = []
    for kind, before, after in zip((F, B, W), old.durations(), new.durations(), strict=False):
        for stage in range(stages):
            name = f"{Kind(kind).name} of stage {stage}"
            changes.append(_change(name, before[stage], after[stage], least, "ms"))
    changes.append(_change("a transfer", old.comm, new.comm, least, "ms"))
    for stage in range(stages):
        for what, was, is_now in (
            ("activation", old.activation[stage], new.activation[stage]),
            ("what is held after B", old.held_after_b[stage], new.held_after_b[stage]),
        ):
            name = f"{what} of stage {stage}"
            changes.append(_change(name, was, is_now, share * max(old.activation), "MiB"))
    most, words = max(changes)
    return words if most > share else None


_UNITS = {"ms": 1e6, "MiB": 2**20}  # of costs, which are in ns and bytes


def _change(name: str, before: float, after: float, least: float, unit: str) -> tuple[float, str]:
    reference = max(before, least)
    change = abs(after - before) / reference if reference else float(after != before)
    was, is_now = (_number(value / _UNITS[unit]) for value in (before, after))
    return change, f"{name}: {was} -> {is_now} {unit}"


def _number(value: float) -> str:
    return f"{value:.3f}" if value >= 0.1 or not value else f"{value:.3g}"
