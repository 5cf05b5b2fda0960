"""The one walk over a plan: when each operation starts and ends, or where the plan stops.

Rows are fixed orders, so no event queue is needed: each row is a coroutine that runs until its next operation waits for
an event, and whoever provides the event lets it go on. The times do not depend on the order in which rows are advanced.
A rank computes on one resource and gathers and reduces on another, its lane (held/residency_walk.py).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron.core.pipeline_parallel.plan import ir
from megatron.core.pipeline_parallel.plan.costs import CostModel, units_of_parts
from megatron.core.pipeline_parallel.plan.held.lanes import Lanes
from megatron.core.pipeline_parallel.plan.held.residency_walk import RowWalk
from megatron.core.pipeline_parallel.plan.held.units import rank_units
from megatron.core.pipeline_parallel.plan.ir import (
    IS_BESIDE,
    IS_COMPUTE,
    IS_TRANSFER,
    Plan,
    RawOp,
)

Wait = tuple[int, int]  # an event, and the place in the row that waits for it


@dataclass(frozen=True)
class Timeline:
    """starts, ends: by rank, then by place in its row; a transfer's is the time at which it is posted, a gather's or
    reduction's that on the wire. lanes: by rank, where the plan was walked with lanes.

    done: (rank, place) of computations, overlapped pairs once, in an order that respects all dependencies. stopped:
    rank -> (place, what it waits for), for the ranks that never finish.
    """

    starts: list[list[float]]
    ends: list[list[float]]
    done: list[tuple[int, int]]
    stopped: Mapping[int, tuple[int, str]]
    lanes: Sequence[RowWalk] = ()

    def end(self, rank: int) -> float:
        """When a rank is through, its gathers and reductions too."""
        end = self.ends[rank][-1]
        return max(end, self.lanes[rank].free) if self.lanes else end


def execute(
    plan: Plan,
    costs: CostModel,
    lanes: Lanes | None = None,
    *,
    blocking_sends: bool = False,
    begin: Sequence[float] | None = None,
    walks: Sequence[RowWalk] = (),
) -> Timeline:
    """Walk the plan. blocking_sends: a rank goes on to a computation, a gather or a reduction only when its sends have
    met their receives (rendezvous). begin: when each rank is free; 0 by default. lanes: what gathers and reductions are
    about; without, they take no time. walks: by rank, what runs its lanes in place of a clock.

    States of post-validation are messages as others are: one goes from a rank once what it adds to has arrived, and
    takes `costs.comm`; VALIDATE and STEP wait for theirs and take no time.
    """
    begin = begin or [0.0] * len(plan.rows)
    walk = _Walk(plan, costs, blocking_sends)
    walk.lanes += walks
    if lanes is not None and not walks:
        of_ranks = rank_units(plan.placement, lanes.stages)
        for row, units, clock in zip(plan.rows, of_ranks, begin, strict=True):
            walk.lanes.append(RowWalk(row, units, lanes, walk.durations, clock, quick=True))
    rows = [walk.row(rank, clock) for rank, clock in enumerate(begin)]
    stopped_at = [0] * len(rows)
    walk.ready += range(len(rows))[::-1]
    while walk.ready:
        rank = walk.ready.pop()
        for event, place in itertools.islice(rows[rank], 1):
            walk.waiting[event], stopped_at[rank] = rank, place
    stopped = sorted((rank, (stopped_at[rank], walk.describe(event))) for event, rank in walk.waiting.items())
    for rank, lane in enumerate(walk.lanes):
        for place, (start, end) in lane.times.items():
            walk.starts[rank][place], walk.ends[rank][place] = start, end
    return Timeline(walk.starts, walk.ends, walk.done, dict(stopped), walk.lanes)


class _Walk:
    """What rows share. An event is that an input was sent (or is there), or, `num_inputs` further, that its receive was
    posted. Inputs: direction (0 forward, 1 backward) x stage that needs it x microbatch; behind them states by the rank
    that needs them, those from the rank before and then those from the rank behind."""

    def __init__(self, plan: Plan, costs: CostModel, blocking_sends: bool) -> None:
        ranks, total = plan.placement.ranks(), plan.num_microbatches
        self.num_ranks, self.num_stages, self.total = plan.placement.num_ranks, len(ranks), total
        self.rows, self.comm, self.blocking_sends = plan.rows, costs.comm, blocking_sends
        self.durations = costs.durations()
        self.size = size = len(ranks) * total
        self.num_inputs = 2 * size + 2 * self.num_ranks
        self.times = [-1.0] * (2 * self.num_inputs)  # of events
        self.waiting: dict[int, int] = {}  # event -> rank
        self.ready: list[int] = []
        self.starts: list[list[float]] = [[0.0] * len(row) for row in plan.rows]
        self.ends: list[list[float]] = [[0.0] * len(row) for row in plan.rows]
        self.done: list[tuple[int, int]] = []
        self.lanes: list[RowWalk] = []
        self.parts = functools.cache(lambda rank: units_of_parts(plan.rows[rank]))
        # From stage x microbatches to the event of a transfer.
        receives = {ir.RECV_F: self.num_inputs, ir.RECV_B: self.num_inputs + size}
        self.offset = {ir.SEND_F: total, ir.SEND_B: size - total, **receives}
        # By computing kind and stage, for microbatch 0: the input that it needs, the one that it provides unless a send
        # will (-1: none), and how long what it needs is under way.
        firsts, last, by_message = range(0, size, total), len(ranks) - 1, plan.has_transfers
        crosses = [a != b for a, b in itertools.pairwise(ranks)]
        latency = [costs.comm * one for one in crosses]
        forward, backward, none = [-1, *firsts[1:]], [size + first for first in firsts], [-1] * len(ranks)

        def unless_sent(inputs: Sequence[int]) -> list[int]:
            return [-1 if one and by_message else found for one, found in zip(crosses, inputs, strict=False)]

        to_next, to_before = [*unless_sent(firsts[1:]), backward[last]], [-1, *unless_sent(backward)]
        self.needs = forward, backward, none, backward
        self.gives = to_next, to_before, none, to_before
        behind = [*latency, 0.0]
        self.latency = [0.0, *latency], behind, behind, behind

    def row(self, rank: int, clock: float) -> Iterator[Wait]:
        """Run a rank that is free at `clock`; yields what it waits for, and goes on once that has a time."""
        row, times, total, num_inputs = self.rows[rank], self.times, self.total, self.num_inputs
        starts, ends, lane = self.starts[rank], self.ends[rank], self.lanes[rank] if self.lanes else None
        needs, gives, latency, durations = self.needs, self.gives, self.latency, self.durations
        unmet: list[int] = []  # receives of what was sent, where sends block
        place, length = 0, len(row)
        while place < length:
            op = row[place]
            kind, behind = op[0], place + 1
            if IS_TRANSFER[kind]:
                event = op[1] * total + op[2] + self.offset[kind]
                self.provide(event, clock)
                if self.blocking_sends and kind in (ir.SEND_F, ir.SEND_B):
                    unmet.append(event + num_inputs)
                starts[place] = ends[place] = clock
                place = behind
                continue
            if unmet and kind != ir.RECV_STATE and not (IS_BESIDE[kind] and op[3]):
                for event in unmet:
                    if times[event] < 0:
                        yield event, place
                    clock = max(clock, times[event])
                unmet.clear()
            start = clock
            if IS_COMPUTE[kind]:
                last = ir.partner_of(row, place) if op[7] >= 0 else -1
                ops = (op,) if last < 0 else (op, row[last])
                for one in ops:
                    need = needs[one[0]][one[1]]
                    if need >= 0:
                        need += one[2]
                        if times[need] < 0:
                            yield need, place
                        sent, posted = times[need], times[need + num_inputs]
                        arrived = (sent if sent > posted else posted) + latency[one[0]][one[1]]
                        if arrived > start:
                            start = arrived
                behind = max(place, last) + 1
                if last < 0 and lane is None and op[4] < 0:
                    clock = start + durations[kind][op[1]]
                else:
                    clock = self.computed(rank, place, behind, start)
                for one in ops:
                    given = gives[one[0]][one[1]]
                    if given >= 0:
                        self.provide(given + one[2], clock)
                self.done.append((rank, place))
            elif not IS_BESIDE[kind]:
                start = clock = yield from self.exchange_state(rank, op, place, clock, unmet)
            elif lane is not None:
                start = clock = lane.do(place, op, clock)
            for at in range(place, behind):
                starts[at], ends[at] = start, clock
            place = behind
        if lane is not None:
            lane.end(clock)

    def provide(self, event: int, time: float) -> None:
        """Something is sent, there or posted; who waits for it goes on."""
        self.times[event] = time
        if event in self.waiting:
            self.ready.append(self.waiting.pop(event))

    def computed(self, rank: int, place: int, behind: int, clock: float) -> float:
        """When a computation ends that starts at `clock`: beside a lane, a part of a W, or an overlapped pair, which
        ends when both do, with what stands between the two."""
        row, lane = self.rows[rank], self.lanes[rank] if self.lanes else None
        for at in range(place, behind):
            op = row[at]
            if lane is not None:
                clock = lane.do(at, op, clock)
            elif IS_COMPUTE[op[0]]:
                share = (op[5] - op[4]) / self.parts(rank)[op[1]] if op[4] >= 0 else 1.0
                clock += self.durations[op[0]][op[1]] * share
        return clock

    def exchange_state(
        self, rank: int, op: RawOp, place: int, clock: float, unmet: list[int]
    ) -> Generator[Wait, None, float]:
        """An operation of post-validation; returns when it is done."""
        kind, peer = op[0], op[6]
        if kind == ir.RECV_STATE:
            self.provide(self.num_inputs + self.state_for(rank, from_before=peer < rank), clock)
            return clock
        # A partial state comes from the rank before and goes to the one behind; the whole one goes the other way.
        partial = kind == ir.STEP or (kind == ir.SEND_STATE and peer > rank)
        needs = rank > 0 if partial else rank + 1 < self.num_ranks
        message = self.state_for(rank, from_before=partial)
        if needs and self.times[message] < 0:
            yield message, place
        if self.lanes:
            clock = self.lanes[rank].do(place, op, clock)
        if needs:
            clock = max(clock, max(self.times[message], self.times[self.num_inputs + message]) + self.comm)
        if kind == ir.SEND_STATE:
            message = self.state_for(peer, from_before=partial)
            self.provide(message, clock)
            if self.blocking_sends:
                unmet.append(self.num_inputs + message)
        return clock

    def state_for(self, rank: int, *, from_before: bool) -> int:
        """The number of a state, by who gets it."""
        return 2 * self.size + rank + (0 if from_before else self.num_ranks)

    def describe(self, event: int) -> str:
        """What a stopped rank waits for, in words."""
        is_receive, target = divmod(event, self.num_inputs)
        if target >= 2 * self.size:
            from_behind, rank = divmod(target - 2 * self.size, self.num_ranks)
            sender = rank + 1 if from_behind else rank - 1
            return f"{'the receive of ' * is_receive}the state from rank {sender} to rank {rank}"
        backward, at = divmod(target, self.size)
        stage, microbatch = divmod(at, self.total)
        if is_receive:
            kind = ir.RECV_B if backward else ir.RECV_F
            return f"the receive {ir.op_text((kind, stage, microbatch, 0, -1, -1, -1, -1))}"
        if not backward or stage + 1 == self.num_stages:
            return f"the output of {stage - (not backward)}F{microbatch}"
        return f"the gradient from stage {stage + 1} of microbatch {microbatch}"
