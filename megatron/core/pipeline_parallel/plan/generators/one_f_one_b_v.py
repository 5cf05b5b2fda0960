"""1F1B on the V: two thirds of 1F1B's activations, without splitting backwards (the V of arXiv 2405.15362)."""

from __future__ import annotations

import itertools

from megatron.core.pipeline_parallel.plan.ir import BW, F, Plan, RawOp, compute
from megatron.core.pipeline_parallel.plan.request import Request

# What one microbatch takes of a rank, in the time of one chunk's F: twice F, and twice BW of 2.
_PERIOD = 6
# The block of a microbatch repeats every _PERIOD on all ranks. Forwards go from rank to rank in 1, backwards in 3 on
# average: with these steps, by rank modulo 3, the four operations of a rank never meet those of other microbatches.
_STEP_SECOND_BW = (0, -1, 1)
_STEP_FIRST_BW = (0, -1, -2)
_TURN_F = (1, 5, 3)
_TURN_BW = (2, 4, 3)


def one_f_one_b_v(request: Request) -> Plan:
    """A rank holds at most floor((4p+7)/3) chunks' activations, never more than the 2p of 1F1B's first stage.

    With equal times and m >= p its bubble is at most 5/6 of 1F1B's, and never more than that. A block of operations,
    the same for all microbatches, gives the order (with it alone: a chunk less, and 1F1B's bubble); where ranks would
    wait in the warm-up, forwards come earlier. The order is made with equal times: costs are not read.
    """
    placement = request.on_v("1f1b-v")
    rows = _Order(request.num_ranks, request.num_microbatches).rows()
    return Plan("1f1b-v", placement, request.num_microbatches, rows)


def _block(num_ranks: int) -> list[tuple[int, int, int, int]]:
    """By rank, when microbatch 0 starts its F of the first and of the second chunk, its BW of the second and the first.

    A later one starts _PERIOD later each.
    """
    last = num_ranks - 1
    turn = last + _TURN_F[last % 3]
    second = [turn + last + 1 + 3 * rank + _STEP_SECOND_BW[rank % 3] for rank in range(num_ranks)]
    way = [3 * rank + _STEP_FIRST_BW[rank % 3] for rank in range(num_ranks)]
    back = second[last] + _TURN_BW[last % 3] + way[last]
    return [(rank, turn + last - rank, second[rank], back - way[rank]) for rank in range(num_ranks)]


class _Order:
    """A walk through time with F = 1 and BW = 2 for each chunk, in which each rank keeps to the block's order.

    Only up to its first BW of the first chunk, a rank that would wait may take its next F of a chunk instead, if the
    operations that it passes keep their room: so the rank never waits for memory, and the walk cannot stop: of all
    operations left, the one that the block has first can start.
    """

    def __init__(self, num_ranks: int, total: int) -> None:
        self.total, self.num_stages = total, 2 * num_ranks
        self.room = 4 * (num_ranks + 1) // 3  # what the block's order holds at most
        self.rows_left = [self._in_block(rank, times) for rank, times in enumerate(_block(num_ranks))]
        # By rank, in the block's order: chunks held before each operation; by stage, where its F are.
        self.held = [
            list(itertools.accumulate((1 if op[0] == F else -1 for op in row), initial=0))
            for row in self.rows_left
        ]
        self.forwards: list[list[int]] = [[] for _ in range(self.num_stages)]
        for row in self.rows_left:
            for place, op in enumerate(row):
                if op[0] == F:
                    self.forwards[op[1]].append(place)
        self.place = [0] * num_ranks
        self.free_at = [0] * num_ranks
        # By stage: when each of its F and of its BW ended.
        self.ends_f: list[list[int]] = [[] for _ in range(self.num_stages)]
        self.ends_bw: list[list[int]] = [[] for _ in range(self.num_stages)]
        self.order: list[list[RawOp]] = [[] for _ in range(num_ranks)]

    def _in_block(self, rank: int, times: tuple[int, int, int, int]) -> list[RawOp]:
        first, second = rank, self.num_stages - 1 - rank
        ops = list(zip(times, (F, F, BW, BW), (first, second, second, first), strict=True))
        timed = sorted(
            (time + _PERIOD * m, kind, stage, m) for time, kind, stage in ops for m in range(self.total)
        )
        return [compute(kind, stage, m) for _, kind, stage, m in timed]

    def rows(self) -> tuple[tuple[RawOp, ...], ...]:
        """All ranks' orders."""
        left, time = 2 * self.num_stages * self.total, 0
        while left:
            for rank, free_at in enumerate(self.free_at):
                op = self._next(rank, time) if free_at <= time else None
                if op is not None:
                    self._run(rank, op, time)
                    left -= 1
            time += 1
        return tuple(map(tuple, self.order))

    def _next(self, rank: int, time: int) -> RawOp | None:
        """The block's next operation if it can start; else, in the warm-up, a forward that can."""
        row, place = self.rows_left[rank], self.place[rank]
        while place < len(row) and row[place][0] == F and row[place][2] < len(self.ends_f[row[place][1]]):
            place += 1  # it came earlier
        self.place[rank] = place
        if place == len(row):
            return None
        if self._is_ready(row[place], time):
            self.place[rank] += 1
            return row[place]
        return None if self.ends_bw[rank] else self._early_forward(rank, time)

    def _early_forward(self, rank: int, time: int) -> RawOp | None:
        """The first F in the block's order that can start, and has room from the awaited operation to its own place.

        Before that operation, a BW where the rank is full, one chunk more is held: without it little comes earlier.
        """
        now, held = self.place[rank], self.held[rank]
        candidates = []
        for stage in (rank, self.num_stages - 1 - rank):
            m = len(self.ends_f[stage])
            if m < self.total:
                candidates.append((self.forwards[stage][m], compute(F, stage, m)))
        for place, op in sorted(candidates):
            if not self._is_ready(op, time):
                continue  # as the awaited one, which may be the first
            if held[now] < self.num_stages and max(held[now + 1 : place + 1]) < self.room:
                held[now : place + 1] = [count + 1 for count in held[now : place + 1]]
                return op
        return None

    def _is_ready(self, op: RawOp, time: int) -> bool:
        kind, stage, m = op[:3]
        if kind == F and not stage:
            return True
        if kind == F:
            ends = self.ends_f[stage - 1]
        else:
            ends = self.ends_bw[stage + 1] if stage + 1 < self.num_stages else self.ends_f[stage]
        return m < len(ends) and ends[m] <= time

    def _run(self, rank: int, op: RawOp, time: int) -> None:
        kind, stage = op[:2]
        self.free_at[rank] = end = time + (1 if kind == F else 2)
        (self.ends_f if kind == F else self.ends_bw)[stage].append(end)
        self.order[rank].append(op)
