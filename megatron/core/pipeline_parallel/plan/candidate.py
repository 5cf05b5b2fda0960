"""A candidate of a choice under one limit: its plan with gathers and reductions, what it holds and takes at least."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron.core.pipeline_parallel.plan.build import plan_for
from megatron.core.pipeline_parallel.plan.held.row_uses import RowUses
from megatron.core.pipeline_parallel.plan.held.units import are_shared, rank_units
from megatron.core.pipeline_parallel.plan.ir import B, F, Plan, PlanError, W, compute
from megatron.core.pipeline_parallel.plan.passes.add_residency import PlanSearch
from megatron.core.pipeline_parallel.plan.passes.residency_rows import RowMaker
from megatron.core.pipeline_parallel.plan.planned_residency import peak_bytes
from megatron.core.pipeline_parallel.plan.search.bounds import lower_bound, or_fused
from megatron.core.pipeline_parallel.plan.search.problem import OrderProblem
from megatron.core.pipeline_parallel.plan.simulate import Simulation, simulate
from megatron.core.pipeline_parallel.plan.spec import PlanPurpose, ScheduleSpec
from megatron.core.words import plain, share_text, size_text


@dataclass(frozen=True)
class Judged:
    """A candidate with its plan. search: that it was found by, which can go on."""

    spec: ScheduleSpec
    plan: Plan
    simulation: Simulation
    search: PlanSearch | None = dataclasses.field(default=None, compare=False)

    @functools.cached_property
    def peaks(self) -> tuple[float, ...]:
        """By rank, bytes that it holds in all."""
        return peak_bytes(self.spec, self.plan)

    def __str__(self) -> str:
        """Its time, what is exposed of it, what its fullest rank holds."""
        found, rank = self.simulation, max(range(len(self.peaks)), key=self.peaks.__getitem__)
        exposed = (
            f", exposed {share_text(max(found.exposed) / found.cost)}" if found.exposed and found.cost else ""
        )
        return (
            f"{self.spec.describe_time(found.cost)}, bubble {share_text(found.bubble_rate)}{exposed}, "
            f"{size_text(self.peaks[rank])} (rank {rank})"
        )


class NoFasterError(PlanError):
    """Another candidate is known to be as fast as this one at its best: `bound`."""

    def __init__(self, bound: float) -> None:
        super().__init__(f"takes at least {plain(bound)}")
        self.bound = bound


class LeastBytes(NamedTuple):
    """Bytes without which a rank can do nothing: states at rest; the weights that one access reads; gradients that are
    added to and reduced, if each is reduced at once; one microbatch's activations."""

    rest: float
    weights: float
    gradients: float
    activation: float


def search_of(spec: ScheduleSpec, order: Plan) -> PlanSearch | None:
    """Of an order's gathers and reductions; None where nothing is shared."""
    assert spec.stages_units is not None
    assert spec.residency is not None
    if not are_shared(spec.stages_units):
        return None
    assert spec.lanes is not None
    asked = (spec.stages_units, spec.residency, spec.costs, spec.lanes)
    return PlanSearch(RowMaker(order, *asked, dict(spec.groupings).get(order.num_microbatches)))


def judged(spec: ScheduleSpec, order: Plan, search: PlanSearch | None, tries: int | None) -> Judged:
    """By the first choices of the search."""
    if search is None:
        return Judged(spec, order, simulate(order, spec.costs))
    plan = search.best_of(tries)
    return Judged(spec, plan, simulate(plan, spec.costs, spec.with_lanes(spec.lanes)), search)


# What candidates take and hold at least -----------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def bare_order(bare: ScheduleSpec, num_microbatches: int) -> tuple[float, tuple[float, ...]]:
    """Time and activations by rank of a fixed order without gathers and reductions: alike for all rows of the sharding
    table."""
    found = simulate(plan_for(bare, num_microbatches, PlanPurpose.ORDER), bare.costs)
    return found.cost, found.peak_activation


def bound_of(spec: ScheduleSpec, num_microbatches: int) -> float:
    """No plan of the candidate takes less; 0 where there is none, which `looks` says."""
    try:
        if not spec.row.searched:
            return bare_order(spec.bare, num_microbatches)[0]
        problem = OrderProblem(spec.placement, num_microbatches, spec.costs, spec.limits or room_of(spec))
        return lower_bound(or_fused(problem))
    except PlanError:
        return 0.0


def least_bytes(spec: ScheduleSpec) -> tuple[LeastBytes, ...]:
    """By rank."""
    asked, parts = spec.residency, []
    assert spec.stages_units is not None
    assert asked is not None
    for units in rank_units(spec.placement, spec.stages_units):
        mine = spec.local_stages(units.rank)
        row = [compute(F, stage, 0) for stage in mine]
        row += [compute(kind, stage, 0) for stage in reversed(mine) for kind in (B, W)]
        uses = RowUses(tuple(row), units)
        weights = uses.most_read * asked.weights_sharded
        gradients = uses.most_adding(asked) * asked.grads_sharded
        parts.append(LeastBytes(units.bytes_at_rest, weights, gradients, spec.costs.least_activation(mine)))
    return tuple(parts)


def limit_of(spec: ScheduleSpec) -> tuple[float, ...]:
    assert spec.residency is not None
    assert spec.residency.limit is not None
    return spec.residency.limit


def room_of(spec: ScheduleSpec) -> tuple[float, ...]:
    """By rank, the most that a searched schedule may hold of activations, at a moment without whole gradients; more
    than twice what 1F1B holds is of no use. Raises PlanError where that is less than it needs."""
    parts, cap = least_bytes(spec), 2 * spec.placement.num_ranks * spec.whole_stage
    room = tuple(
        min(cap, limit - one.rest - one.weights) for limit, one in zip(limit_of(spec), parts, strict=True)
    )
    if any(size < one.activation for size, one in zip(room, parts, strict=True)):
        raise PlanError(too_little(parts))
    return room


def least_held(spec: ScheduleSpec, num_microbatches: int) -> tuple[LeastBytes, ...]:
    """By rank, `least_bytes`; of a fixed order with all its activations. Raises PlanError for an order that these
    microbatches do not make."""
    parts = least_bytes(spec)
    if spec.row.searched:
        return parts
    _, peaks = bare_order(spec.bare, num_microbatches)
    return tuple(one._replace(activation=peak) for one, peak in zip(parts, peaks, strict=True))


def refuse_full(spec: ScheduleSpec, num_microbatches: int) -> None:
    """Where states at rest and activations alone are more than a rank may hold, before anything else is tried."""
    for rank, (one, limit) in enumerate(zip(least_held(spec, num_microbatches), limit_of(spec), strict=True)):
        if one.rest + one.activation > limit:
            raise PlanError(
                f"rank {rank} holds {size_text(one.rest)} at rest and {size_text(one.activation)} of activations, the "
                f"limit is {size_text(limit)}"
            )


def too_little(parts: Sequence[LeastBytes]) -> str:
    rank, one = max(enumerate(parts), key=lambda at: sum(at[1]))
    return (
        f"rank {rank} holds at least {size_text(sum(one))}: {size_text(one.rest)} at rest, "
        f"{size_text(one.weights + one.gradients)} of units gathered and reduced, {size_text(one.activation)} of a "
        f"microbatch's activations"
    )
