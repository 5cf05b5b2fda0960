"""What one limit in bytes is chosen under: how each row of the sharding table that may be chosen cuts states."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.pipeline_parallel.plan.residency import LaneCosts, Residency
from megatron.core.pipeline_parallel.plan.units import StateBytes


@dataclass(frozen=True)
class RankBudget:
    """rows: by strategy, what is asked of plans, with the limit, and how large states are. flops, bytes_per_s: of a
    rank, and of its wire to data parallel peers."""

    rows: tuple[tuple[Residency, StateBytes], ...]
    flops: float
    bytes_per_s: float

    def lanes(self, unit_flops: float) -> LaneCosts:
        """In a cost model's unit of time, in which so many FLOPs are computed."""
        return LaneCosts(bandwidth=self.bytes_per_s * unit_flops / self.flops)
