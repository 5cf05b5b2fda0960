"""What operations cost: the one model that add_comm, simulate, searches and the planner read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core.pipeline_parallel.plan.ir import BW, PlanError, W
from megatron.core.pipeline_parallel.plan.placement import Placement


@dataclass(frozen=True)
class CostModel:
    """Costs of one microbatch, by global stage; times in any one unit, activations in any one unit.

    f, b, w: durations; a BW takes b + w. comm: latency of one transfer. activation: what F allocates.
    held_after_b: what of it is still held between B and W.
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
        for stage, (all_of_it, held) in enumerate(zip(self.activation, self.held_after_b, strict=True)):
            if held > all_of_it:
                raise PlanError(
                    f"stage {stage}: held after B {held} is more than the activation, {all_of_it}"
                )

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

        memory_after_b: the share of an activation that is held between B and W.
        """

        def spread(name: str, values: Sequence[float]) -> tuple[float, ...]:
            if len(values) not in (1, placement.num_ranks):
                raise PlanError(
                    f"{name}: {len(values)} numbers for {placement.num_ranks} stages; give 1 or all"
                )
            full = list(values) * (placement.num_ranks if len(values) == 1 else 1)
            return tuple(full[rank] / placement.num_chunks for rank in placement.ranks())

        if not 0 <= memory_after_b <= 1:
            raise PlanError(f"the share of an activation held after B is 0 to 1, not {memory_after_b}")
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
        """What B, W or BW gives back of what F has allocated."""
        if kind == BW:
            return self.activation[stage]
        held = self.held_after_b[stage]
        return held if kind == W else self.activation[stage] - held

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
