"""What parameters become in an engine, in bytes, by the ranks that share them (floor 0, pure)."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from megatron.core.pipeline_parallel.plan.held.lanes import LaneCosts
from megatron.core.pipeline_parallel.plan.held.units import Share, UnitCosts
from megatron.core.pipeline_parallel.plan.residency import Residency
from megatron.core.sharding_table import DENSE_GROUPS, Sharding, ShardOver, ShardPlace, rank_groups


@dataclass(frozen=True)
class StateBytes:
    """What parameters become in an engine: how their states are cut, and bytes of one element of each.

    sharding: the effective row. align: elements that a bucket is padded to a multiple of (shard_layout: 128 x data
    parallel ranks). weight: as it is gathered. grad, main_grad: as it is reduced where gradients are cut, and as it is
    summed up. main_weight: 0 where the weights are the main ones. optimizer: of moments, and of copies to take a step
    back by. bucket_size, num_buckets: where gradients are whole, elements to which neighbours are merged, or how many
    units they are merged to; None, None: a bucket a unit. groups: names of the ranks of place. experts: of experts with
    a grid of their own; None: as all else.
    """

    sharding: Sharding
    place: ShardPlace
    align: int
    weight: int
    grad: int
    main_grad: int
    main_weight: int = 0
    optimizer: int = 0
    bucket_size: int | None = None
    num_buckets: int | None = None
    groups: tuple[str, str] = DENSE_GROUPS
    experts: StateBytes | None = None

    @property
    def reduced(self) -> int:
        """Of an element of whole gradients."""
        return self.main_grad if self.sharding.main_grads is ShardOver.NONE else self.grad

    @property
    def at_rest(self) -> tuple[tuple[int, int], ...]:
        """Of weights, gradients and main weights: (bytes of an element, ranks that they are cut over)."""
        row, ways = self.sharding, self.place.ways
        rounds = bool(self.main_weight) and row.gathers_from_main(self.place)
        cuts = (row.weights, row.main_grads, row.optimizer)
        sizes = (0 if rounds else self.weight, self.main_grad, self.main_weight)
        return tuple((size, ways(cut)) for size, cut in zip(sizes, cuts, strict=True))

    @property
    def of_parameter(self) -> float:
        """Of a parameter's states on a rank, all together."""
        rest = sum(size / ways for size, ways in self.at_rest)
        return rest + self.optimizer / self.place.ways(self.sharding.optimizer)

    def of_rank(self, parameters: tuple[int, int, int]) -> float:
        """Of all states of so many parameters, those of each flat buffer, on a rank."""
        own, shared, experts = parameters
        return (own + shared) * self.of_parameter + experts * (self.experts or self).of_parameter

    def merged_to(self, numel: int) -> int:
        """Elements that merged units have at least, of so many that a rank trains."""
        assert self.bucket_size is not None, "units that are not merged"
        return self.bucket_size if self.num_buckets is None else max(1, math.ceil(numel / self.num_buckets))

    def laid_out(self, unit: UnitCosts, parameters: tuple[int, int, int]) -> UnitCosts:
        """A unit with what so many parameters take, those of each flat buffer in a bucket of their own: of the rank
        alone, shared ones, experts. extra_grad_bytes: of the unit that is given, elements."""
        own, shared, experts = parameters
        cuts = [(self, parameters)]
        if self.experts is not None:
            cuts = [(self, (own, shared, 0)), (self.experts, (0, 0, experts))]
        states = [sizes._states(held) for sizes, held in cuts if any(held)]
        return dataclasses.replace(
            unit,
            shares=tuple(share for shares, _ in states for share in shares),
            extra_grad_bytes=unit.extra_grad_bytes * self.reduced,
            optimizer_bytes=sum(size for _, size in states),
        )

    def _states(self, parameters: tuple[int, int, int]) -> tuple[tuple[Share, Share], int]:
        """Shares of what lies in one grid, and bytes of its optimizer."""
        buckets = [-(-numel // self.align) * self.align for numel in parameters if numel]
        numel, row, ways = sum(buckets), self.sharding, self.place.ways
        # What is whole and shared is summed later, and all-reduces take a bucket each.
        own, shared, experts = parameters
        later = row.main_grads is ShardOver.NONE and shared > 0 and own + experts > 0
        scattered = row.optimizer is ShardOver.FULL and self.place.outer_size > 1
        summed = ways(row.main_grads if scattered else row.optimizer)
        inner, outer = rank_groups(self.place, self.groups)
        cut = Share(
            inner,
            gathered=numel * self.weight,
            reduced=numel * self.reduced,
            at_rest=sum(numel // parts * size for size, parts in self.at_rest),
            calls=len(buckets) if row.optimizer is ShardOver.NONE else 1 + later,
        )
        repeated = Share(
            outer,
            gathered=numel // ways(row.weights) * self.weight * scattered,
            reduced=numel // summed * self.main_grad,
            calls=1 + later if scattered else len(buckets),
        )
        return (cut, repeated), numel // ways(row.optimizer) * self.optimizer


@dataclass(frozen=True)
class RankBudget:
    """What one limit in bytes is chosen under. rows: by strategy that may be chosen, what is asked of plans, with the
    limit, and how large states are. flops, bytes_per_s: of a rank, and of its wire to data parallel peers."""

    rows: tuple[tuple[Residency, StateBytes], ...]
    flops: float
    bytes_per_s: float

    def lanes(self, unit_flops: float) -> LaneCosts:
        """In a cost model's unit of time, in which so many FLOPs are computed."""
        return LaneCosts(bandwidth=self.bytes_per_s * unit_flops / self.flops)
