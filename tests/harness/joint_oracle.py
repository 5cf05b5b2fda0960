"""The fastest plan of two ranks under a limit in bytes, proved: what joint choices are held against.

Everything is open at once: the order of F, B, BW and of W's unit by unit, which units stay gathered, which microbatches
are added up before a reduction, and at which access each gather and reduction is issued, in which order. Frees stand
right behind a last use, as waiting with them is of no use. Microbatches keep their order in each stage.

A row turns the moments at which messages arrive into those at which its own leave: every wait is a maximum and every
duration a sum, so that a moment is the maximum of a constant and of each arrival plus a constant (a `Vector`). Rows are
made access by access. Of two beginnings that have done and hold the same, one that is no later in any part of any
moment makes the other superfluous (dynamic programming); what cannot end by the cutoff is left out (branch and bound).
Rows of both ranks that are left are then put together.

`python -m tests.harness.joint_oracle 2 3 0 30` prints how far the choice is from the optimum with 2 microbatches and 3
units a stage, seeds 0 to 29.
"""

from __future__ import annotations

import itertools
import math
import operator
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from megatron.core.pipeline_parallel.plan.held.units import RankUnits
from megatron.core.pipeline_parallel.plan.ir import (
    BW,
    IS_COMPUTE,
    REDUCE,
    RESHARD,
    UNSHARD,
    B,
    F,
    Plan,
    RawOp,
    W,
    compute,
)
from megatron.core.pipeline_parallel.plan.spec import ScheduleSpec

Vector = tuple[float, ...]  # a constant, then what is added to each arrival
NEVER = -math.inf
ROUNDING = 1e-9


class _Key(NamedTuple):
    """What a beginning of a row has done and holds. done: by stage of the rank, how many F and B, and W of each unit.
    running: a computation and its next access. gathered, whole, under: units, the last in order."""

    done: tuple[tuple[int, ...], ...]
    running: tuple[RawOp, int] | None
    gathered: frozenset[int]
    whole: frozenset[int]
    under: tuple[int, ...]


class _Times(NamedTuple):
    """Moments of a beginning. gathered: by unit. under: as in _Key. sent: by message."""

    clock: Vector
    free: Vector
    gathered: tuple[Vector, ...]
    under: tuple[Vector, ...]
    sent: tuple[Vector, ...]


class _Row(NamedTuple):
    """sent: moments at which messages leave. end: of all that it does."""

    sent: tuple[Vector, ...]
    end: Vector
    ops: tuple[RawOp, ...]


def fastest(spec: ScheduleSpec, num_microbatches: int, cutoff: float) -> tuple[float, Plan] | None:
    """What takes the least, if that is at most the cutoff: its time, computations and operations of data parallelism.

    spec: on two ranks, with units that have an access each, a limit in bytes, and messages that take no time."""
    searches = [_Search(spec, rank, num_microbatches, cutoff) for rank in (0, 1)]
    first, second = (one.rows() for one in searches)
    best, chosen = cutoff, None
    for one, other in itertools.product(first, second):
        if one.end[0] <= best and (cost := _cost(searches, one, other, best)) <= best:
            best, chosen = cost, (one, other)
    if chosen is None:
        return None
    return best, Plan("optimal", spec.placement, num_microbatches, tuple(row.ops for row in chosen))


def _cost(searches: Sequence[_Search], one: _Row, other: _Row, most: float) -> float:
    """Of two rows together; infinite if it is more than `most`, as it is where they wait for each other."""
    arrivals = [list(search.early) for search in searches]
    while True:
        before = [list(times) for times in arrivals]
        for row, search, (sender, to) in zip((one, other), searches, ((0, 1), (1, 0)), strict=True):
            for op, sent in zip(search.sends, row.sent, strict=True):
                at = searches[to].arrivals.index(op)
                arrivals[to][at] = max(arrivals[to][at], _at(sent, arrivals[sender]))
        start = arrivals[1][0]
        cost = max(_at(one.end, arrivals[0]), _at(other.end, arrivals[1]) - start)
        if max(*arrivals[0], cost) > most + ROUNDING:
            return math.inf
        if before == arrivals:
            return cost


def _at(moment: Vector, arrivals: Sequence[float]) -> float:
    return max(moment[0], *map(operator.add, moment[1:], arrivals))


def _later(one: Vector, other: Vector) -> Vector:
    return tuple(map(max, one, other))


def _plus(one: Vector, time: float) -> Vector:
    return tuple(value + time for value in one)


class _Search:
    """Rows of one rank. arrivals, sends: results that it gets and gives. early: by arrival, no plan has it before."""

    def __init__(self, spec: ScheduleSpec, rank: int, total: int, cutoff: float) -> None:
        residency, lanes, stages = spec.residency, spec.lanes, spec.stages_units
        assert residency is not None
        assert residency.limit is not None
        assert residency.weights_sharded
        assert lanes is not None
        assert stages is not None
        assert not spec.costs.comm, "receives are posted in an order that is left out here"
        self.costs, self.last, self.total, self.cutoff = spec.costs, len(stages) - 1, total, cutoff
        self.units = units = RankUnits(rank, spec.placement, stages)
        self.mine = sorted(spec.local_stages(rank))
        self.room = residency.limit[rank] - units.bytes_at_rest + ROUNDING
        self.takes = spec.costs.durations()
        self.home = {}  # of each unit: its first stage, and the place in it
        for stage, numbers in units.of.items():
            for place, number in enumerate(numbers):
                self.home.setdefault(number, (stage, place))
        self.gather = [lanes.unshard(one, first=False) for one in units.units]
        self.reduce = [lanes.reduce(one, residency) for one in units.units]
        early = self._earliest(lanes.unshard(stages[0].units[0], first=True))
        self.arrivals = [op for op in early if op[1] not in self.mine and self._goes_to(op) in self.mine]
        self.sends = [
            op for op in early if op[1] in self.mine and self._goes_to(op) not in (*self.mine, None)
        ]
        self.early = [early[op] for op in self.arrivals]
        self.until = 2 * cutoff if rank else cutoff  # rank 1 begins with its first arrival
        self.from_first = cutoff if rank else math.inf

    def _earliest(self, first: float) -> dict[RawOp, float]:
        """Of each F and B, when it ends. first: what rank 0 waits for."""
        stages = range(self.last + 1)
        chain = [(F, stage) for stage in stages] + [(B, stage) for stage in reversed(stages)]
        early: dict[RawOp, float] = {}
        for (before, (kind, stage)), one in itertools.product(
            zip([None, *chain], chain, strict=False), range(self.total)
        ):
            begin = early[compute(*before, one)] if before else first
            if one:
                begin = max(begin, early[compute(kind, stage, one - 1)])
            early[compute(kind, stage, one)] = begin + self.takes[kind][stage]
        return early

    def _goes_to(self, op: RawOp) -> int | None:
        """The stage that needs a result."""
        if op[0] == F:
            return min(op[1] + 1, self.last)
        return op[1] - 1 if op[1] else None

    def rows(self) -> list[_Row]:
        never = (NEVER,) * (1 + len(self.arrivals))
        zero = (0.0, *never[1:])
        done = tuple((0, 0, *(0 for _ in self.units.of[stage])) for stage in self.mine)
        times = _Times(zero, zero, (never,) * len(self.units), (), (never,) * len(self.sends))
        count = 3 * self.total * sum(len(self.units.of[stage]) for stage in self.mine)
        # By accesses begun, then by what is gathered less what is whole: nothing leads back to one before.
        layers: list[dict[int, dict[_Key, list[Any]]]] = [defaultdict(dict) for _ in range(count + 1)]
        layers[0][0][_Key(done, None, frozenset(), frozenset(), ())] = [((), times, None)]
        found: list[Any] = []
        for begun, layer in enumerate(layers):
            for level in range(-len(self.units), len(self.units) + 1):
                for key, front in layer.pop(level, {}).items():
                    for _, times, trace in front:
                        if begun == count and not key.whole and not key.gathered:
                            end = _later(times.clock, times.free)
                            _insert(found, (*times.sent, end), (times.sent, end), trace)
                            continue
                        for more, new, later, ops in self._steps(key, times):
                            kept = self._kept(new, later)
                            if kept is not None:
                                others = layers[begun + more][len(new.gathered) - len(new.whole)]
                                moments = (kept.clock, kept.free, *kept.gathered, *kept.under, *kept.sent)
                                _insert(others.setdefault(new, []), moments, kept, (ops, trace))
        rows = [_Row(*times, _written(trace)) for _, times, trace in found]
        return sorted(rows, key=lambda row: row.end[0])

    def _steps(self, key: _Key, times: _Times) -> Iterator[tuple[int, _Key, _Times, tuple[RawOp, ...]]]:
        """What may come next: accesses that it takes, what is then, and operations."""
        begun = key.running[1] + 1 if key.running else 0
        for unit, size in enumerate(self.units.weight_bytes):
            if (
                unit not in key.gathered
                and self._read_again(key, unit)
                and self._held(key) + size <= self.room
            ):
                end = _plus(_later(times.clock, times.free), self.gather[unit])
                gathered = (*times.gathered[:unit], end, *times.gathered[unit + 1 :])
                yield (
                    0,
                    key._replace(gathered=key.gathered | {unit}),
                    times._replace(free=end, gathered=gathered),
                    (self._op(UNSHARD, unit, begun),),
                )
        for unit in key.whole:
            clock, names, ends = times.clock, key.under, times.under
            if len(names) == 2:
                clock, names, ends = _later(clock, ends[0]), names[1:], ends[1:]
            end = _plus(_later(clock, times.free), self.reduce[unit])
            yield (
                0,
                key._replace(whole=key.whole - {unit}, under=(*names, unit)),
                times._replace(clock=clock, free=end, under=(*ends, end)),
                (self._op(REDUCE, unit, begun),),
            )
        if key.running is not None:
            yield from self._access(key, times, *key.running)
            return
        for op, need in self._possible(key):
            clock = times.clock
            if need is not None and need[1] not in self.mine:
                at = 1 + self.arrivals.index(need)
                clock = (*clock[:at], max(clock[at], 0.0), *clock[at + 1 :])
            yield from self._access(key, times._replace(clock=clock), op, 0)

    def _possible(self, key: _Key) -> Iterator[tuple[RawOp, RawOp | None]]:
        """Computations whose own stage and rank are ready, and what they need the result of."""
        count = dict(zip(self.mine, key.done, strict=True))
        for stage, (forward, backward, *weights) in count.items():
            if forward < self.total and (stage - 1 not in count or count[stage - 1][0] > forward):
                yield compute(F, stage, forward), compute(F, stage - 1, forward) if stage else None
            if backward < forward and (stage + 1 not in count or count[stage + 1][1] > backward):
                need = compute(B, stage + 1, backward) if stage < self.last else None
                yield compute(B, stage, backward), need
                if set(weights) == {backward}:
                    yield compute(BW, stage, backward), need
            if min(weights) < backward and any(one[1] < self.total for one in key.done):
                yield compute(W, stage, weights[0]), None
            elif min(weights) < backward:  # the rest are W's, nobody waits for them
                yield from (
                    ((W, stage, one, 0, unit, unit + 1, -1, -1), None)
                    for unit, one in enumerate(weights)
                    if one < backward
                )

    def _access(
        self, key: _Key, times: _Times, op: RawOp, access: int
    ) -> Iterator[tuple[int, _Key, _Times, tuple[RawOp, ...]]]:
        """Through one access; what it has read is freed behind it or kept."""
        uses = self.units.uses(op)
        use = uses[access]
        if not key.gathered.issuperset(use.reads):
            return
        clock = times.clock
        for unit in use.reads:
            clock = _later(clock, times.gathered[unit])
        under = list(zip(key.under, times.under, strict=True))
        for unit, end in under:
            if unit in use.begins:
                clock = _later(clock, end)
        under = [one for one in under if one[0] not in use.begins]
        clock = _plus(clock, self.units.uses(op)[access].share * self.takes[op[0]][op[1]])
        key = key._replace(
            running=(op, access + 1),
            whole=key.whole.union(use.begins),
            under=tuple(unit for unit, _ in under),
        )
        if self._held(key) > self.room:
            return
        times = times._replace(clock=clock, under=tuple(end for _, end in under))
        begun = access + 2
        if access + 1 == len(uses):
            begun, key = 0, key._replace(running=None, done=self._done(key.done, op))
            sent = compute(B if op[0] == BW else op[0], op[1], op[2])
            if sent in self.sends:
                at = self.sends.index(sent)
                times = times._replace(sent=(*times.sent[:at], clock, *times.sent[at + 1 :]))
        kept = [key.gathered.difference(use.reads)]
        for unit in use.reads:
            if self._read_again(key, unit):
                kept += [one | {unit} for one in kept]
        for gathered in kept:
            freed = (self._op(RESHARD, unit, begun) for unit in use.reads if unit not in gathered)
            ops = (*((op,) if not access else ()), *freed)
            yield 2 if op[0] == BW else 1, key._replace(gathered=gathered), times, ops

    def _done(self, done: tuple[tuple[int, ...], ...], op: RawOp) -> tuple[tuple[int, ...], ...]:
        at = self.mine.index(op[1])
        one = list(done[at])
        if op[0] != W:
            one[0 if op[0] == F else 1] += 1
        if op[0] in (W, BW):
            for unit in range(op[4], op[5]) if op[4] >= 0 else range(len(one) - 2):
                one[2 + unit] += 1
        return (*done[:at], tuple(one), *done[at + 1 :])

    def _held(self, key: _Key) -> float:
        held = self._activations(key.done)
        if key.running is not None and key.running[0][0] in (F, B):
            held = max(held, self._activations(self._done(key.done, key.running[0])))
        held += sum(self.units.weight_bytes[unit] for unit in key.gathered)
        return held + sum(self.units.grad_bytes[unit] for unit in (*key.whole, *key.under))

    def _activations(self, done: tuple[tuple[int, ...], ...]) -> float:
        return sum(
            (forward - backward) * self.costs.activation[stage]
            + (backward - min(weights)) * self.costs.held_after_b[stage]
            for stage, (forward, backward, *weights) in zip(self.mine, done, strict=True)
        )

    def _read_again(self, key: _Key, unit: int) -> bool:
        done = key.done
        if key.running is not None:
            op, access = key.running
            if any(unit in use.reads for use in self.units.uses(op)[access:]):
                return True
            done = self._done(done, op)
        return done[self.mine.index(self.home[unit][0])][1] < self.total

    def _kept(self, key: _Key, times: _Times) -> _Times | None:
        """Moments without what other parts are never before; None if the rest takes too long."""
        left, lane = 0.0, sum(self.reduce[unit] for unit in key.whole)
        for stage, (forward, backward, *weights) in zip(self.mine, key.done, strict=True):
            left += (self.total - forward) * self.takes[F][stage] + (self.total - backward) * self.takes[B][
                stage
            ]
            shares = [use.share for use in self.units.uses(compute(W, stage, 0))][::-1]
            left += (
                sum((self.total - one) * share for one, share in zip(weights, shares, strict=True))
                * self.takes[W][stage]
            )
        if key.running is not None:
            op, access = key.running
            left -= sum(use.share for use in self.units.uses(op)[:access]) * self.takes[op[0]][op[1]]
        if left > ROUNDING:
            left += min(self.reduce)
        clock, free = self._without(times.clock), self._without(times.free)
        sent = tuple(map(self._without, times.sent))
        over = (
            clock[0] + left - self.until,
            free[0] + lane - self.until,
            clock[1] + left - self.from_first,
            *(one[0] - self.cutoff for one in sent),
        )
        if max(over) > ROUNDING:
            return None

        def ahead(moment: Vector) -> Vector:
            return tuple(
                one if one > now else NEVER for one, now in zip(self._without(moment), clock, strict=True)
            )

        never = (NEVER,) * len(clock)
        gathered = tuple(
            ahead(one) if unit in key.gathered else never for unit, one in enumerate(times.gathered)
        )
        return _Times(clock, ahead(times.free), gathered, tuple(map(ahead, times.under)), sent)

    def _without(self, moment: Vector) -> Vector:
        first = max(moment[0], *map(operator.add, moment[1:], self.early))
        return (first, *(one if one + self.cutoff > first else NEVER for one in moment[1:]))

    def _op(self, kind: int, unit: int, begun: int) -> RawOp:
        stage, place = self.home[unit]
        return (kind, stage, -1, begun, place, place + 1, -1, -1)


def _insert(front: list[Any], moments: tuple[Vector, ...], what: Any, trace: Any) -> None:
    """Unless another one is no later anywhere."""
    flat = tuple(itertools.chain.from_iterable(moments))
    if any(all(map(operator.le, other, flat)) for other, _, _ in front):
        return
    front[:] = [one for one in front if not all(map(operator.le, flat, one[0]))]
    front.append((flat, what, trace))


def _written(trace: Any) -> tuple[RawOp, ...]:
    """What belongs to a later access of a computation stands before it."""
    parts = []
    while trace is not None:
        parts.append(trace[0])
        trace = trace[1]
    row: list[RawOp] = []
    for op in itertools.chain.from_iterable(reversed(parts)):
        if op[3] and not IS_COMPUTE[op[0]]:
            row.insert(len(row) - 1, op)
        else:
            row.append(op)
    return tuple(row)


if __name__ == "__main__":
    from tests.unit_tests.core.pipeline_parallel.plan import test_joint_oracle

    test_joint_oracle.print_gaps(*map(int, sys.argv[1:]))
