"""A small pipeline problem as computations and precedences, with upper bounds and time windows.

What `optimal_schedule` solves, without the solver.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from megatron.core.pipeline_parallel.plan.costs import CostModel, peak_activation
from megatron.core.pipeline_parallel.plan.ir import BW, B, F, Plan, PlanError, RawOp, W, compute
from megatron.core.pipeline_parallel.plan.placement import Placement
from megatron.core.pipeline_parallel.plan.simulate import simulate

# Relative: costs and memory that differ by less are equal. Slack is what rounding may take, well below that.
TOLERANCE = 1e-6
SLACK = 1e-7
Rows = tuple[tuple[RawOp, ...], ...]


class Problem:
    """Computations by number, what must come before what, and the limits.

    links: (before, behind, least time between their starts). first: by rank, its first start.
    """

    def __init__(
        self,
        placement: Placement,
        total: int,
        costs: CostModel,
        memory_limit: Sequence[float] | None,
        fused: bool,
    ) -> None:
        assert len(costs.f) == placement.num_stages, (len(costs.f), placement.num_stages)
        self.placement, self.total, self.costs, self.fused = placement, total, costs, fused
        self.kinds = (F, BW) if fused else (F, B, W)
        self.back = BW if fused else B
        self.ranks = placement.ranks()
        durations = costs.durations()
        self.ops = [
            compute(kind, stage, microbatch)
            for stage in range(placement.num_stages)
            for kind in self.kinds
            for microbatch in range(total)
        ]
        self.number = {op: at for at, op in enumerate(self.ops)}
        self.rank = [self.ranks[op[1]] for op in self.ops]
        self.of_rank = [
            [at for at, one in enumerate(self.rank) if one == rank] for rank in range(placement.num_ranks)
        ]
        self.duration = [durations[op[0]][op[1]] for op in self.ops]
        self.links = [link for op in self.ops for link in self._links(op)]
        self.first = [sum(costs.f[:rank]) + rank * costs.comm for rank in range(placement.num_ranks)]
        self.limit = self._limits(memory_limit)
        self.step = self._step()

    def _limits(self, memory_limit: Sequence[float] | None) -> list[float]:
        """The least is what `one_by_one` has; a BW never holds more than its F left."""
        if memory_limit is None:
            return [math.inf] * self.placement.num_ranks
        assert len(memory_limit) == self.placement.num_ranks, (memory_limit, self.placement)
        for rank, limit in enumerate(memory_limit):
            stages = [stage for stage, one in enumerate(self.ranks) if one == rank]
            whole = sum(self.costs.activation[stage] for stage in stages)
            least = whole if self.fused else self.costs.least_activation(stages)
            if limit < least - TOLERANCE * least:
                raise PlanError(
                    f"no order of rank {rank} holds {limit} or less: one microbatch through all its stages is {least}"
                )
        return list(memory_limit)

    def _links(self, op: RawOp) -> Iterator[tuple[int, int, float]]:
        kind, stage, microbatch = op[0], op[1], op[2]
        here = self.number[op]
        takes = self.duration[here]
        if microbatch + 1 < self.total:
            yield here, self.number[compute(kind, stage, microbatch + 1)], takes
        if kind == F and stage + 1 == len(self.ranks):
            yield here, self.number[compute(self.back, stage, microbatch)], takes
        elif kind == F or (kind != W and stage):
            target = stage + 1 if kind == F else stage - 1
            way = self.costs.comm if self.ranks[stage] != self.ranks[target] else 0.0
            there = compute(F if kind == F else self.back, target, microbatch)
            yield here, self.number[there], takes + way
        if kind == B:
            yield here, self.number[compute(W, stage, microbatch)], takes

    def _step(self) -> float:
        """The greatest common divisor of all durations, 0 where it is too small to tell from rounding."""
        exact = [Fraction(one) for one in (*self.duration, self.costs.comm) if one]
        if not exact:
            return 0.0
        lowest = math.lcm(*(one.denominator for one in exact))
        step = math.gcd(*(int(one * lowest) for one in exact)) / lowest
        return step if step > 1e-4 * float(max(exact)) else 0.0

    def memory(self, at: int) -> float:
        """What a computation adds to what its rank holds."""
        kind, stage = self.ops[at][0], self.ops[at][1]
        return self.costs.activation[stage] if kind == F else -self.costs.released(kind, stage)

    def fits(self, rank: int, held: float) -> bool:
        return held <= self.limit[rank] * (1 + TOLERANCE)

    def plan(self, rows: Rows) -> Plan:
        return Plan("optimal", self.placement, self.total, rows)

    def cost_of(self, rows: Rows) -> float:
        return simulate(self.plan(rows), self.costs).cost


def one_by_one(problem: Problem) -> Rows:
    """One microbatch at a time, each W right behind its B: the least that any order holds."""
    rows: list[list[RawOp]] = [[] for _ in problem.of_rank]
    stages = range(problem.placement.num_stages)
    for microbatch in range(problem.total):
        for stage in stages:
            rows[problem.ranks[stage]].append(compute(F, stage, microbatch))
        for stage in reversed(stages):
            backward = [compute(kind, stage, microbatch) for kind in problem.kinds[1:]]
            rows[problem.ranks[stage]] += backward
    return tuple(map(tuple, rows))


def list_schedules(problem: Problem) -> Iterator[Rows]:
    """Greedy upper bounds: always what can start first, ties by each order of preference; those that get stuck for
    want of memory are left out."""
    for preference in itertools.permutations(problem.kinds):
        for reserve in (False, True) if problem.placement.num_chunks > 1 else (False,):
            rows = _list_schedule(problem, preference, reserve)
            if rows is not None:
                yield rows


def _list_schedule(problem: Problem, preference: tuple[int, ...], reserve: bool) -> Rows | None:
    """reserve: a first chunk's F leaves room for the later F's of all microbatches that are under way."""
    behind: list[list[tuple[int, float]]] = [[] for _ in problem.ops]
    missing = [0] * len(problem.ops)
    for before, after, lag in problem.links:
        behind[before].append((after, lag))
        missing[after] += 1
    ready = [0.0] * len(problem.ops)
    clock, held = [0.0] * len(problem.of_rank), [0.0] * len(problem.of_rank)
    owed = [0.0] * len(problem.of_rank)
    whole = [
        sum(problem.costs.activation[stage] for stage, one in enumerate(problem.ranks) if one == rank)
        for rank in range(len(held))
    ]
    rows: list[list[RawOp]] = [[] for _ in problem.of_rank]
    heads = {at for at, number in enumerate(missing) if not number}
    while heads:
        best: tuple[float, int, int] | None = None
        for at in heads:
            op, rank = problem.ops[at], problem.rank[at]
            opens = reserve and op[0] == F and op[1] < problem.placement.num_ranks
            needs = owed[rank] + whole[rank] if opens else problem.memory(at)
            if needs > 0 and not problem.fits(rank, held[rank] + needs):
                continue
            # Later stages first: they are nearer to the loss, or to it again.
            key = (max(clock[rank], ready[at]), preference.index(op[0]) * len(problem.ranks) - op[1], at)
            best = key if best is None else min(best, key)
        if best is None:
            return None
        begin, _, at = best
        op, rank = problem.ops[at], problem.rank[at]
        heads.remove(at)
        rows[rank].append(op)
        clock[rank] = begin + problem.duration[at]
        held[rank] += problem.memory(at)
        if op[0] == F:
            later = whole[rank] if op[1] < problem.placement.num_ranks else 0.0
            owed[rank] += later - problem.memory(at)
        for after, lag in behind[at]:
            ready[after] = max(ready[after], begin + lag)
            missing[after] -= 1
            if not missing[after]:
                heads.add(after)
    return tuple(map(tuple, rows))


def as_start(problem: Problem, start: Plan) -> Rows:
    """The rows of a plan that keeps the rules."""
    assert (start.placement, start.num_microbatches) == (problem.placement, problem.total), start
    rows = []
    for rank, row in enumerate(start.rows):
        ops = [
            compute(kind, op[1], op[2])
            for op in row
            for kind in ((B, W) if op[0] == BW and not problem.fused else (op[0],))
        ]
        assert sorted(ops) == sorted(problem.ops[at] for at in problem.of_rank[rank]), (rank, ops)
        for kind, stage in {(op[0], op[1]) for op in ops}:
            queue = [op[2] for op in ops if (op[0], op[1]) == (kind, stage)]
            assert queue == sorted(queue), (rank, kind, stage, queue)
        peak = peak_activation(rank, tuple(ops), problem.costs)
        assert problem.fits(rank, peak), (rank, peak, problem.limit[rank])
        rows.append(tuple(ops))
    return tuple(rows)


@dataclass(frozen=True)
class Windows:
    """earliest, latest: starts. before: by computation, a bit for each that certainly comes before it."""

    earliest: list[float]
    latest: list[float]
    before: list[int]


def find_windows(problem: Problem, cutoff: float) -> Windows | None:
    """When each computation can start if the cost is at most `cutoff`, and what that fixes; None: nothing can."""
    links = list(problem.links)
    slack = SLACK * max(cutoff, 1.0)
    while True:
        order = _topological(len(problem.ops), links)
        if order is None:
            return None
        windows = _propagate(problem, links, order, cutoff + slack)
        fixed = []
        for ops in problem.of_rank:
            for one, other in itertools.combinations(ops, 2):
                if windows.before[one] >> other & 1 or windows.before[other] >> one & 1:
                    continue
                can_lead = [
                    windows.earliest[a] + problem.duration[a] <= windows.latest[b] + slack
                    for a, b in ((one, other), (other, one))
                ]
                if not any(can_lead):
                    return None
                if not all(can_lead):
                    a, b = (one, other) if can_lead[0] else (other, one)
                    fixed.append((a, b, problem.duration[a]))
        if any(early > late + slack for early, late in zip(windows.earliest, windows.latest, strict=True)):
            return None
        if not fixed:
            return windows
        links += fixed


def _topological(number: int, links: list[tuple[int, int, float]]) -> list[int] | None:
    behind: list[list[int]] = [[] for _ in range(number)]
    missing = [0] * number
    for before, after, _ in links:
        behind[before].append(after)
        missing[after] += 1
    order = [at for at in range(number) if not missing[at]]
    for at in order:
        for after in behind[at]:
            missing[after] -= 1
            if not missing[after]:
                order.append(after)
    return order if len(order) == number else None


def _propagate(
    problem: Problem, links: list[tuple[int, int, float]], order: list[int], horizon: float
) -> Windows:
    number = len(problem.ops)
    ahead: list[list[tuple[int, float]]] = [[] for _ in range(number)]
    behind: list[list[tuple[int, float]]] = [[] for _ in range(number)]
    for one, other, lag in links:
        ahead[other].append((one, lag))
        behind[one].append((other, lag))
    before, after = [0] * number, [0] * number
    earliest, latest = [0.0] * number, [0.0] * number

    def load(at: int, those: int) -> float:
        return sum(problem.duration[one] for one in problem.of_rank[problem.rank[at]] if those >> one & 1)

    for at in order:
        for one, _ in ahead[at]:
            before[at] |= before[one] | 1 << one
        begin = problem.first[problem.rank[at]] + load(at, before[at])
        earliest[at] = max([begin, *(earliest[one] + lag for one, lag in ahead[at])])
    for at in reversed(order):
        for one, _ in behind[at]:
            after[at] |= after[one] | 1 << one
        end = problem.first[problem.rank[at]] + horizon - problem.duration[at] - load(at, after[at])
        latest[at] = min([end, *(latest[one] - lag for one, lag in behind[at])])
    return Windows(earliest, latest, before)
