"""The same computations, with forwards held back where a rank has no room for what they leave.

What a rank may hold of activations changes within a step: from its first weight gradient on, gradients are whole until
they are reduced. An order made for the room before that holds too much behind it; an order made for the room behind it
lets ranks wait for each other at the beginning, where there is room.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import BW, B, F, Plan, RawOp, W

_SLACK = 1e-9


def hold_back(
    plan: Plan,
    costs: CostModel,
    room: Sequence[float],
    most_read: Sequence[float],
    whole_grads: Sequence[float],
) -> Plan | None:
    """plan: of computations alone. room: by rank, bytes for activations, gradients and what is read. most_read: the
    most that one access reads. whole_grads: by stage, bytes of gradients from its first weight gradient on. None where
    some rank can go no further.

    Each rank takes the first of its row that there is room for. Where all ranks wait for each other then, the result
    that is there first is used earlier than the row says.
    """
    walk = _Walk(plan, costs, room, most_read, whole_grads)
    waiting = list(range(len(plan.rows)))
    while any(walk.left):
        while waiting:
            waiting += walk.advance(waiting.pop())
        if any(walk.left):
            waiting = walk.jump()
            if not waiting:
                return None
    return dataclasses.replace(plan, rows=tuple(map(tuple, walk.rows)))


class _Walk:
    """left: by rank, what it has not done, the last first. done: by kind (F, B, W) and stage, how many."""

    def __init__(
        self,
        plan: Plan,
        costs: CostModel,
        room: Sequence[float],
        most_read: Sequence[float],
        whole_grads: Sequence[float],
    ) -> None:
        self.costs, self.whole_grads, self.durations = costs, whole_grads, costs.durations()
        self.room, self.most_read = [one * (1 + _SLACK) for one in room], most_read
        self.rank_of = plan.placement.ranks()
        self.last = len(self.rank_of) - 1
        self.left = [list(reversed(row)) for row in plan.rows]
        self.rows: list[list[RawOp]] = [[] for _ in plan.rows]
        self.held, self.clock = [0.0] * len(plan.rows), [0.0] * len(plan.rows)
        self.done = {kind: [0] * len(self.rank_of) for kind in (F, B, W)}
        self.ends: dict[tuple[int, int, int], float] = {}

    def advance(self, rank: int) -> list[int]:
        """As far as the row goes; ranks that may go on then."""
        woken = []
        while (place := next(self._possible(rank), None)) is not None:
            arrival = self._arrival(self.left[rank][place])
            if arrival is None:
                break
            woken += self._take(rank, place, arrival)
        return woken

    def jump(self) -> list[int]:
        """One computation out of its row's order: the one that can start first."""
        found = []
        for rank, left in enumerate(self.left):
            known = ((place, self._arrival(left[place])) for place in self._possible(rank))
            place, arrival = next((one for one in known if one[1] is not None), (-1, None))
            if arrival is not None:
                found.append((max(arrival, self.clock[rank]), rank, place, arrival))
        if not found:
            return []
        _, rank, place, arrival = min(found)
        return [rank, *self._take(rank, place, arrival)]

    def _possible(self, rank: int) -> Iterator[int]:
        """Places of what the rank itself is ready for and has room for, in the row's order."""
        left, done = self.left[rank], self.done
        for place in range(len(left) - 1, -1, -1):
            kind, stage, one = left[place][:3]
            f, b, w = done[F][stage], done[B][stage], done[W][stage]
            if kind == F:
                ready = f == one
            elif kind == W:
                ready = w == one < b
            else:
                ready = b == one < f and (kind == B or w == one)
            if ready and self._fits(rank, kind, stage, one):
                yield place

    def _fits(self, rank: int, kind: int, stage: int, one: int) -> bool:
        """While it runs: B's and W's free at their ends."""
        more = self._more(kind, stage, one)
        if kind in (W, BW):
            more = max(more, 0.0 if one else self.whole_grads[stage])
        read = 0.0 if kind == W else self.most_read[rank]
        return more <= 0 or self.held[rank] + more + read <= self.room[rank]

    def _more(self, kind: int, stage: int, one: int) -> float:
        if kind == F:
            return self.costs.activation[stage]
        more = -self.costs.released(kind, stage)
        return more + self.whole_grads[stage] if kind in (W, BW) and not one else more

    def _arrival(self, op: RawOp) -> float | None:
        """When what it needs is there; None if that is not known."""
        kind, stage, one = op[:3]
        if kind == W or (kind == F and not stage):
            return 0.0
        source = (F, stage - 1) if kind == F else (B, stage + 1) if stage < self.last else (F, stage)
        end = self.ends.get((*source, one))
        if end is None or self.rank_of[source[1]] == self.rank_of[stage]:
            return end
        return end + self.costs.comm

    def _take(self, rank: int, place: int, arrival: float) -> list[int]:
        op = self.left[rank].pop(place)
        kind, stage, one = op[:3]
        self.held[rank] += self._more(kind, stage, one)
        self.clock[rank] = max(self.clock[rank], arrival) + self.durations[kind][stage]
        self.rows[rank].append(op)
        if kind in (W, BW):
            self.done[W][stage] += 1
        if kind == W:
            return []
        self.done[F if kind == F else B][stage] += 1
        self.ends[F if kind == F else B, stage, one] = self.clock[rank]
        to = stage + 1 if kind == F else stage - 1
        return [self.rank_of[to]] if 0 <= to <= self.last and self.rank_of[to] != rank else []
