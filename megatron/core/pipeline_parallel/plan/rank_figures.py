"""What one rank measured in some steps, as small data that can be sent to the others: whole nanoseconds and bytes.

Times are this rank's own clock; nobody else's is the same. So messages are given by both of their ends, the sender's
post and the receiver's post and arrival, and whoever has both can tell latency from the difference of two clocks
(plan/measured_costs.py). A message's arrival is known only where a computation waited for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

from megatron.core.pipeline_parallel.plan.ir import (
    BW,
    RECV_B,
    RECV_F,
    SEND_B,
    SEND_F,
    B,
    F,
    Plan,
    RawOp,
)
from megatron.core.pipeline_parallel.plan.kinds import IS_COMPUTE, IS_TRANSFER
from megatron.core.pipeline_parallel.plan.measured import Span

# Of one route in one step, so many messages are told of: the first ones, the last ones, and some between. Warm-up and
# cool-down are where ranks wait for one another.
MESSAGES_FIRST, MESSAGES_BETWEEN, MESSAGES_LAST = 6, 4, 4
# Waiting for less may be the call itself: the message was there, and nobody knows since when.
SHORTEST_WAIT_NS = 50_000


class Figures(TypedDict):
    """JSON-able. pipeline: world ranks of this pipeline. rank: the place in it.

    times: [kind, global stage, median ns of a computation]. sends: [iteration, message, posted ns]. receives:
    [iteration, message, sender's place in the pipeline, posted ns, arrived ns]. steps: [iteration, ns from the first
    computation's start to the last one's end, ns in computations]. activations: [global stage, bytes that F leaves,
    bytes of them held between B and W]. peak_bytes: the most on top of what a step began with, 0 if not measured.
    """

    pipeline: list[int]
    rank: int
    times: list[list[int]]
    sends: list[list[int]]
    receives: list[list[int]]
    steps: list[list[int]]
    activations: list[list[int]]
    peak_bytes: int


@dataclass(frozen=True)
class RankStep:
    """One step of one rank. rank: its place in the pipeline. spans: by place in its row of the plan."""

    iteration: int
    plan: Plan
    rank: int
    spans: Sequence[Span]

    @property
    def span_ns(self) -> int:
        """From the start of the first computation to the end of the last one, waiting for the first input apart."""
        mine = self._computed()
        return _ns(mine[-1].end_s) - _ns(mine[0].start_s + mine[0].wait_s)

    @property
    def busy_ns(self) -> int:
        """In computations, without their waiting and without operations of data parallelism in their middle."""
        return sum(_ns(span.busy_s) for span in self._computed())

    def _computed(self) -> list[Span]:
        row = self.plan.rows[self.rank]
        return [span for op, span in zip(row, self.spans, strict=True) if IS_COMPUTE[op[0]]]


def figures_of(
    steps: Sequence[RankStep],
    pipeline: Sequence[int],
    activations: Mapping[int, tuple[int, int]] | None = None,
    peak_bytes: int = 0,
) -> Figures:
    """Medians and messages of a rank's steps, of which there is at least one.

    activations: by global stage, (bytes that F leaves, bytes held between B and W); None: not measured.
    """
    assert steps, "figures of no step"
    durations: dict[tuple[int, int], list[int]] = defaultdict(list)
    sends: list[list[int]] = []
    receives: list[list[int]] = []
    for step in steps:
        row = step.plan.rows[step.rank]
        whole: dict[tuple[int, int, int], int] = defaultdict(int)  # a W may have parts
        for op, span in zip(row, step.spans, strict=True):
            if IS_COMPUTE[op[0]]:
                whole[op[:3]] += max(0, _ns(span.busy_s))
        for (kind, stage, _), busy_ns in whole.items():
            durations[kind, stage].append(busy_ns)
        _messages(step, row, sends, receives)
    return Figures(
        pipeline=list(pipeline),
        rank=steps[0].rank,
        times=[[kind, stage, median(values)] for (kind, stage), values in sorted(durations.items())],
        sends=sends,
        receives=receives,
        steps=[[step.iteration, step.span_ns, step.busy_ns] for step in steps],
        activations=[[stage, *sizes] for stage, sizes in sorted((activations or {}).items())],
        peak_bytes=peak_bytes,
    )


def median(values: Sequence[int]) -> int:
    """The middle one, of an even number the lower one of the two: a value that was measured, and never a rounding."""
    return sorted(values)[(len(values) - 1) // 2]


def _messages(
    step: RankStep, row: Sequence[RawOp], sends: list[list[int]], receives: list[list[int]]
) -> None:
    """Both lists, longer by the chosen messages of a step."""
    consumers = {
        (RECV_F if op[0] == F else RECV_B, op[1], op[2]): span
        for op, span in zip(row, step.spans, strict=True)
        if op[0] in (F, B, BW)
    }
    routes: dict[tuple[int, int], list[int]] = defaultdict(list)
    for place, op in enumerate(row):
        if IS_TRANSFER[op[0]]:
            routes[op[0], op[6]].append(place)
    for (kind, peer), places in routes.items():
        # Messages of a route are in the same order on both sides, so both sides choose the same ones.
        for at in _chosen(len(places)):
            place = places[at]
            # From the beginning of the posting: a message may be there before the call that sent it returns.
            op, posted = row[place], _ns(step.spans[place].start_s)
            if kind in (SEND_F, SEND_B):
                sends.append([step.iteration, op[7], posted])
                continue
            consumer = consumers[op[:3]]
            if _ns(consumer.wait_s) >= SHORTEST_WAIT_NS:
                arrived = _ns(consumer.start_s + consumer.wait_s)
                receives.append([step.iteration, op[7], peer, posted, arrived])


def _chosen(count: int) -> list[int]:
    """Which of `count` messages are told of."""
    if count <= MESSAGES_FIRST + MESSAGES_BETWEEN + MESSAGES_LAST:
        return list(range(count))
    first, last = MESSAGES_FIRST, count - MESSAGES_LAST
    between = {first + (last - first) * step // MESSAGES_BETWEEN for step in range(MESSAGES_BETWEEN)}
    return [*range(first), *sorted(between), *range(last, count)]


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
