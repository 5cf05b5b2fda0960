"""The one walk over a plan: when each operation starts and ends, or where the plan stops.

Rows are fixed orders, so no event queue is needed: a rank goes on until its next operation waits for something, and
whoever provides it wakes that rank. The times do not depend on the order in which ranks are advanced.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core.pipeline_parallel.plan import ir
from megatron.core.pipeline_parallel.plan.costs import CostModel, units_of_parts
from megatron.core.pipeline_parallel.plan.held.lane_clock import LaneClock, Lanes
from megatron.core.pipeline_parallel.plan.held.units import rank_units
from megatron.core.pipeline_parallel.plan.ir import SEND_B, SEND_F, F, Kind, Plan, RawOp, W
from megatron.core.pipeline_parallel.plan.kinds import IS_COMPUTE, IS_TRANSFER, IS_VALIDATION


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
    stopped: dict[int, tuple[int, str]]
    lanes: Sequence[LaneClock] = ()

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
) -> Timeline:
    """Walk the plan. blocking_sends: a rank goes on to a computation, a gather or a reduction only when its sends have
    met their receives (rendezvous). begin: when each rank is free; 0 by default. lanes: what gathers and reductions are
    about; without, they take no time.

    States of post-validation are messages as others are: one goes from a rank once what it adds to has arrived, and
    takes `costs.comm`; VALIDATE and STEP wait for theirs and take no time.
    """
    walk = _EventWalk(plan, costs, lanes, blocking_sends, begin or [0.0] * len(plan.rows))
    ready = list(range(plan.placement.num_ranks))[::-1]
    while ready:
        walk.advance(ready.pop(), ready)
    stopped = {
        rank: (place, walk.describe(walk.blocked[rank]))
        for rank, place in enumerate(walk.place)
        if place < len(plan.rows[rank])
    }
    for rank, lane in enumerate(walk.lanes):
        for place, (start, end) in lane.times.items():
            walk.starts[rank][place], walk.ends[rank][place] = start, end
    return Timeline(walk.starts, walk.ends, walk.done, stopped, walk.lanes)


class _EventWalk:
    """Inputs are numbered: direction (0 forward, 1 backward) x stage that needs it x microbatch; behind them states by
    the rank that needs them, those from the rank before and then those from the rank behind."""

    def __init__(
        self, plan: Plan, costs: CostModel, lanes: Lanes | None, blocking_sends: bool, begin: Sequence[float]
    ) -> None:
        self.num_ranks, self.total = plan.placement.num_ranks, plan.num_microbatches
        self.rows, self.costs, self.blocking_sends = plan.rows, costs, blocking_sends
        self.num_stages = plan.placement.num_stages
        self.size = self.num_stages * self.total
        self.num_inputs = 2 * self.size + 2 * self.num_ranks
        self.durations = costs.durations()
        ranks = plan.placement.ranks()
        # Whether the step from a stage to the next one crosses ranks; the last stage's "next" is its own backward.
        self.crosses = [a != b for a, b in itertools.pairwise(ranks)] + [False]
        self.by_message = plan.has_transfers
        # From the stage of a transfer to the number of the input that it carries.
        self.offset = {SEND_F: self.total, ir.RECV_F: 0, SEND_B: self.size - self.total, ir.RECV_B: self.size}
        self.sent = [-1.0] * self.num_inputs  # when an input was handed over or sent
        self.posted = [-1.0] * self.num_inputs  # when its receive was posted
        self.waiter: dict[int, int] = {}  # input -> rank; receive of an input, num_inputs further -> rank
        self.place = [0] * self.num_ranks
        self.clock = list(begin)
        self.blocked = [0] * self.num_ranks
        self.unmet: list[list[int]] = [[] for _ in plan.rows]
        self.starts: list[list[float]] = [[] for _ in plan.rows]
        self.ends: list[list[float]] = [[] for _ in plan.rows]
        self.done: list[tuple[int, int]] = []
        self.lanes: list[LaneClock] = []
        if lanes is not None:
            every = zip(rank_units(plan.placement, lanes.stages), begin, strict=True)
            self.lanes = [LaneClock(one, lanes, self.durations, start) for one, start in every]

    def advance(self, rank: int, ready: list[int]) -> None:
        """Run a rank until it waits or is through; ranks that it wakes are added to `ready`."""
        row, place, clock = self.rows[rank], self.place[rank], self.clock[rank]
        starts, ends, length = self.starts[rank], self.ends[rank], len(self.rows[rank])
        total, offset, num_inputs, durations = self.total, self.offset, self.num_inputs, self.durations
        unmet, lane = self.unmet[rank], self.lanes[rank] if self.lanes else None
        while place < length:
            op = row[place]
            kind, behind = op[0], place + 1
            if IS_TRANSFER[kind]:
                start = clock
                target = op[1] * total + op[2] + offset[kind]
                if kind in (SEND_F, SEND_B):
                    self._provide(self.sent, target, clock, target, ready)
                    if self.blocking_sends:
                        unmet.append(target)
                else:
                    self._provide(self.posted, target, clock, num_inputs + target, ready)
            elif not IS_COMPUTE[kind]:
                wait = self._exchange_state if IS_VALIDATION[kind] else self._issue
                start = wait(rank, op, clock, ready)
                if start < 0:
                    break
                clock = start
            else:
                last = ir.partner_of(row, place) if op[7] >= 0 else -1
                start = self._meet(rank, clock) if unmet else clock
                if start >= 0:
                    start = self._arrived(rank, op, start)
                if start >= 0 and last >= 0:
                    start = self._arrived(rank, row[last], start)
                if start < 0:
                    break
                behind = max(place, last) + 1
                if last < 0 and lane is not None:
                    clock = lane.compute(place, op, start)
                elif last < 0 and op[4] < 0:
                    clock = start + durations[kind][op[1]]
                else:
                    clock = self._compute(rank, place, behind, start)
                self._finish(op, clock, ready)
                if last >= 0:
                    self._finish(row[last], clock, ready)
                self.done.append((rank, place))
            starts += [start] * (behind - place)
            ends += [clock] * (behind - place)
            place = behind
        self.place[rank], self.clock[rank] = place, clock

    def _issue(self, rank: int, op: RawOp, clock: float, ready: list[int]) -> float:
        """A gather or a reduction: when the rank goes on, or -1 after noting what it waits for."""
        if self.unmet[rank] and not op[3]:
            clock = self._meet(rank, clock)
        if clock >= 0 and self.lanes:
            clock = self.lanes[rank].issue(len(self.starts[rank]), op, clock)
        return clock

    def _compute(self, rank: int, place: int, behind: int, clock: float) -> float:
        """When the computation at `place` ends that starts at `clock`: a part of a W; or an overlapped pair when both
        end, with what stands between the two."""
        for at in range(place, behind):
            op = self.rows[rank][at]
            if self.lanes:
                run = self.lanes[rank].compute if IS_COMPUTE[op[0]] else self.lanes[rank].issue
                clock = run(at, op, clock)
            elif IS_COMPUTE[op[0]]:
                share = (op[5] - op[4]) / units_of_parts(self.rows[rank])[op[1]] if op[4] >= 0 else 1.0
                clock += self.durations[op[0]][op[1]] * share
        return clock

    def _arrived(self, rank: int, op: RawOp, clock: float) -> float:
        """When a computation has its input, at `clock` or later, or -1 after noting that the rank waits for it."""
        kind, stage = op[0], op[1]
        if kind == W or (kind == F and stage == 0):
            return clock
        need = stage * self.total + op[2] + (0 if kind == F else self.size)
        sent = self.sent[need]
        if sent < 0:
            return self._wait(rank, need)
        if self.crosses[stage - 1 if kind == F else stage]:
            posted = self.posted[need]
            sent = (sent if sent > posted else posted) + self.costs.comm
        return sent if sent > clock else clock

    def _meet(self, rank: int, clock: float) -> float:
        """When all sends have met their receives, or -1."""
        for message in self.unmet[rank]:
            if self.posted[message] < 0:
                return self._wait(rank, self.num_inputs + message)
            clock = max(clock, self.posted[message])
        self.unmet[rank].clear()
        return clock

    def _wait(self, rank: int, event: int) -> float:
        self.waiter[event] = rank
        self.blocked[rank] = event
        return -1.0

    def _provide(self, times: list[float], target: int, time: float, event: int, ready: list[int]) -> None:
        times[target] = time
        if event in self.waiter:
            ready.append(self.waiter.pop(event))

    def _finish(self, op: RawOp, end: float, ready: list[int]) -> None:
        """Hand the result on, unless a send will."""
        kind, stage = op[0], op[1]
        if kind == F:
            turn = stage + 1 == self.num_stages  # the loss: its own backward is next
            target = stage * self.total + op[2] + (self.size if turn else self.total)
            crosses = self.crosses[stage]
        elif kind != W and stage > 0:
            target = (stage - 1) * self.total + op[2] + self.size
            crosses = self.crosses[stage - 1]
        else:
            return
        if not (crosses and self.by_message):
            self._provide(self.sent, target, end, target, ready)

    def _exchange_state(self, rank: int, op: RawOp, clock: float, ready: list[int]) -> float:
        """An operation of post-validation: when it is done, or -1 after noting what the rank waits for."""
        kind, peer = op[0], op[6]
        # A partial state comes from the rank before and goes to the one behind; the whole one goes the other way.
        partial = kind == Kind.STEP or (kind == Kind.SEND_STATE and peer > rank)
        if kind == Kind.RECV_STATE:
            message = self._state_for(rank, from_before=peer < rank)
            self._provide(self.posted, message, clock, self.num_inputs + message, ready)
            return clock
        clock = self._meet(rank, clock)
        if clock < 0:
            return clock
        needs, message = (
            rank > 0 if partial else rank + 1 < self.num_ranks,
            self._state_for(rank, from_before=partial),
        )
        if needs and self.sent[message] < 0:
            return self._wait(rank, message)
        if self.lanes and partial:  # once: behind this nothing is tried again
            clock = self.lanes[rank].through(clock)
        if needs:
            clock = max(clock, max(self.sent[message], self.posted[message]) + self.costs.comm)
        if kind == Kind.SEND_STATE:
            message = self._state_for(peer, from_before=partial)
            self._provide(self.sent, message, clock, message, ready)
            if self.blocking_sends:
                self.unmet[rank].append(message)
        return clock

    def _state_for(self, rank: int, *, from_before: bool) -> int:
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
