"""What operations cost: the one model that add_comm, simulate, searches and the planner read.

[Note: memory of split backwards] Between its B and its W a microbatch holds other tensors than between F and B: x and
dy of every linear. That can be more than F kept, above all where activations are recomputed. A B then makes a rank's
memory grow, by held_after_b - activation. Memory counts in program order and after each operation, so a rank's peak is
after an F or after a B that grows; while such a B runs it counts as what it leaves. That assumes that a B files what W
needs as fast as it frees what F kept, layer by layer; what single operations take besides, on either way, is not
counted. A BW frees as it goes, and never holds more than the activation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core.pipeline_parallel.plan.ir import BW, PlanError, W
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
        lengths = {len(self.f), len(self.b), len(self.w), len(self.activation), len(self.held_after_b)}
        assert len(lengths) == 1, f"costs for different numbers of stages: {lengths}"
        every = (*self.f, *self.b, *self.w, *self.activation, *self.held_after_b, self.comm)
        if not all(0 <= value < float("inf") for value in every):
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
        """From figures of whole ranks, one for all or one a rank, divided evenly over a rank's chunks.

        memory_after_b: what is held between B and W, as a share of an activation; may be above 1.
        """

        def spread(name: str, values: Sequence[float]) -> tuple[float, ...]:
            if len(values) not in (1, placement.num_ranks):
                raise PlanError(
                    f"{name}: {len(values)} numbers for {placement.num_ranks} stages; give 1 or all"
                )
            full = list(values) * (placement.num_ranks if len(values) == 1 else 1)
            return tuple(full[rank] / placement.num_chunks for rank in placement.ranks())

        if not 0 <= memory_after_b < float("inf"):
            raise PlanError(f"what is held after B is a share of at least 0, not {memory_after_b}")
        activations = spread("activation", activation)
        return cls(
            spread("time of F", time_f),
            spread("time of B", time_b),
            spread("time of W", time_w),
            activations,
            tuple(size * memory_after_b for size in activations),
            comm,
        )

    def released(self, kind: int, stage: int) -> float:
        """What B, W or BW gives back of what is held; below 0 for a B that leaves more than F did."""
        if kind == BW:
            return self.activation[stage]
        held = self.held_after_b[stage]
        return held if kind == W else self.activation[stage] - held

    def least_activation(self, stages: Sequence[int]) -> float:
        """The least that a rank must be allowed to hold: one microbatch through its stages, W's right behind B's.

        stages: of one rank, the first in the pipeline first. All of their forwards come before the first gradient, and
        at the B of each stage what the F's of those before it have left is still there.
        """
        before = most = 0.0
        for stage in stages:
            most = max(most, before + self.held_after_b[stage])
            before += self.activation[stage]
        return max(most, before)

    def whole_stage(self, placement: Placement) -> float:
        """One microbatch's activation on the rank that has the most, all its stages together: the unit of limits.

        Of each stage counts the larger one of what F leaves and what is held between B and W, so a limit of one whole
        stage allows every rank a microbatch, and any schedule takes at most as many of them as microbatches under way.
        """
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
        ranks = placement.ranks()
        of_rank = [[at for at, one in enumerate(ranks) if one == rank] for rank in range(placement.num_ranks)]
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
