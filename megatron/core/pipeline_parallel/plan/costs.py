"""What operations cost and what activations take: the one model that passes, simulation and searches read.

[Note: memory of split backwards] Between its B and its W a microbatch holds x and dy of every linear. That can be more
than F kept, above all where activations are recomputed: then B makes a rank's memory grow by held_after_b - activation,
and counts as what it leaves while it runs. What single operations take besides is not counted. A BW frees as it goes,
and never holds more than the activation.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron.core.pipeline_parallel.plan.ir import BW, IS_COMPUTE, F, PlanError, Row, W, wrong_op
from megatron.core.pipeline_parallel.plan.placement import Placement


@dataclass(frozen=True)
class CostModel:
    """Costs of one microbatch, by global stage; times in any one unit, activations in any one unit.

    f, b, w: durations; a BW takes b + w. comm: latency of one transfer. activation: what F leaves. held_after_b: what
    is held between B and W; see [Note: memory of split backwards] for where it is more than the activation.
    """

    f: tuple[float, ...]
    b: tuple[float, ...]
    w: tuple[float, ...]
    activation: tuple[float, ...]
    held_after_b: tuple[float, ...]
    comm: float = 0.0

    def __post_init__(self) -> None:
        by_stage = (self.f, self.b, self.w, self.activation, self.held_after_b)
        assert len(set(map(len, by_stage))) == 1, f"costs for different numbers of stages: {by_stage}"
        if not all(0 <= value < float("inf") for value in itertools.chain(*by_stage, (self.comm,))):
            raise PlanError("costs must be finite and at least 0")

    @classmethod
    def of_ranks(
        cls,
        placement: Placement,
        *,
        time_f: Sequence[float] = (1.0,),
        time_b: Sequence[float] = (1.0,),
        time_w: Sequence[float] = (1.0,),
        comm: float = 0.0,
        activation: Sequence[float] = (1.0,),
        memory_after_b: float = 1.0,
    ) -> CostModel:
        """From figures of whole ranks, one for all or one a rank, divided evenly over a rank's chunks. memory_after_b:
        what is held between B and W, as a share of an activation; may be above 1."""

        def spread(name: str, values: Sequence[float]) -> tuple[float, ...]:
            if len(values) not in (1, placement.num_ranks):
                raise PlanError(
                    f"{name}: {len(values)} numbers for {placement.num_ranks} stages; give 1 or all"
                )
            return tuple(values[rank % len(values)] / placement.num_chunks for rank in placement.ranks())

        if not 0 <= memory_after_b < float("inf"):
            raise PlanError(f"what is held after B is a share of at least 0, not {memory_after_b}")
        held = spread("activation", activation)
        times = (spread("time of F", time_f), spread("time of B", time_b), spread("time of W", time_w))
        return cls(*times, held, tuple(size * memory_after_b for size in held), comm)

    def released(self, kind: int, stage: int) -> float:
        """What B, W or BW gives back of what is held; below 0 for a B that leaves more than F did."""
        if kind == BW:
            return self.activation[stage]
        held = self.held_after_b[stage]
        return held if kind == W else self.activation[stage] - held

    def least_activation(self, stages: Sequence[int]) -> float:
        """The least that a rank must be allowed to hold: one microbatch through its stages, first to last, with W's
        right behind B's."""
        before = most = 0.0
        for stage in stages:
            most = max(most, before + self.held_after_b[stage])
            before += self.activation[stage]
        return max(most, before)

    def whole_stage(self, placement: Placement) -> float:
        """One microbatch's activation on the rank that has the most, all its stages together: the unit of limits. Of
        each stage counts the larger one of what F leaves and what is held between B and W."""
        held = [0.0] * placement.num_ranks
        for stage, rank in enumerate(placement.ranks()):
            held[rank] += max(self.activation[stage], self.held_after_b[stage])
        return max(held)

    def left_by_forwards(
        self, placement: Placement, whole_stages: float, most_of_1f1b: float = 0.0
    ) -> tuple[float, ...]:
        """By rank, room for what the F's of so many microbatches leave on the fullest rank: 1F1B's memory for as many
        as there are ranks. On top, the rank's B's may grow as long as this share of 1F1B's memory is not exceeded.
        Where one B takes more than half of a whole stage (recomputed activations), a share of 1F1B's memory has no room
        for it: then the limit is two whole stages more, and that B's growth. Never less than `least_activation`.
        """
        of_rank = [placement.stages_of(rank) for rank in range(placement.num_ranks)]
        whole = max(sum(self.activation[stage] for stage in mine) for mine in of_rank)
        limits = []
        for mine in of_rank:
            growths = sorted((self.held_after_b[one] - self.activation[one] for one in mine), reverse=True)
            limit = whole_stages * whole
            if growths[0] > whole / 2:
                limit += 2 * whole + growths[0]
            else:
                for growth in growths:
                    if growth > 0 and limit + growth <= most_of_1f1b * placement.num_ranks * whole:
                        limit += growth
            limits.append(max(limit, self.least_activation(mine)))
        return tuple(limits)

    def durations(self) -> tuple[tuple[float, ...], ...]:
        """By computing kind (F, B, W, BW), then by global stage."""
        return (self.f, self.b, self.w, tuple(b + w for b, w in zip(self.b, self.w, strict=True)))

    def rank_times(self, placement: Placement, *, forward_only: bool = False) -> tuple[float, ...]:
        """F + B + W (F alone: forward_only) of one microbatch on each rank, all chunks together."""
        times = [0.0] * placement.num_ranks
        for stage, rank in enumerate(placement.ranks()):
            times[rank] += self.f[stage]
            if not forward_only:
                times[rank] += self.b[stage] + self.w[stage]
        return tuple(times)


def activations(
    row: Row, costs: CostModel, *, forward_only: bool = False
) -> Iterator[tuple[int, float, float]]:
    """For each computation its place, what is held while it runs, and behind it; in the cost model's unit.

    F takes its activation at its start, B, W and BW free it at their ends; a B that leaves more than F did takes the
    difference at its start. Of a W in parts the last one frees. forward_only: F itself frees at its end.
    """
    num_units = units_of_parts(row)
    left: dict[tuple[int, int], int] = {}  # of a W in parts, units still to come
    held = 0.0
    for place, op in enumerate(row):
        kind, stage = op[0], op[1]
        if not IS_COMPUTE[kind]:
            continue
        if kind == F:
            during = held + costs.activation[stage]
            after = held if forward_only else during
        else:
            after = held - costs.released(kind, stage)
            if op[4] >= 0:
                left[stage, op[2]] = left.get((stage, op[2]), num_units[stage]) - (op[5] - op[4])
                after = held if left[stage, op[2]] else after
            during = max(held, after)
        yield place, during, after
        held = after


def units_of_parts(row: Row) -> dict[int, int]:
    """How many units a stage has, where a row tells it by W's in parts."""
    found: dict[int, int] = {}
    for op in row:
        if op[0] == W and op[4] >= 0:
            found[op[1]] = max(found.get(op[1], 0), op[5])
    return found


def peak_activation(rank: int, row: Row, costs: CostModel, *, forward_only: bool = False) -> float:
    """The most that a rank's activations take. Raises PlanError where more is freed than is held."""
    peak = 0.0
    for place, during, after in activations(row, costs, forward_only=forward_only):
        peak = max(peak, during)
        if after < -1e-6:
            raise wrong_op(rank, place, row[place], "frees more activation than is held")
    return round(peak, 9)
