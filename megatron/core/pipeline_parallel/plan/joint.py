"""One budget: the fastest plan of those that hold no more than a limit in bytes, over schedules, chunks and groups,
shares of activations and rows of the sharding table.

[Note: shares] What a searched schedule may hold of activations and what is left to gathered weights and whole gradients
add up to the limit. With more activations the bubble falls, and what is gathered anew rises: the step's time has one
minimum, or nearly so. A golden section finds it in a few orders.

[Note: rounds] Of a small plan `add_residency` tries about a hundred choices, of which the first ten or so tell how good
it is. So all candidates are tried a little, and those that come near the best one then more, in a few rounds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron.core.pipeline_parallel.plan.held.row_uses import RowUses
from megatron.core.pipeline_parallel.plan.held.units import rank_units
from megatron.core.pipeline_parallel.plan.ir import B, F, Plan, PlanError, W, compute, without_collector
from megatron.core.pipeline_parallel.plan.passes.add_residency import PlanSearch
from megatron.core.pipeline_parallel.plan.passes.residency_rows import RowMaker
from megatron.core.pipeline_parallel.plan.placement import V_SHAPED
from megatron.core.pipeline_parallel.plan.planned_residency import peak_bytes
from megatron.core.pipeline_parallel.plan.search.bounds import lower_bound, or_fused
from megatron.core.pipeline_parallel.plan.search.problem import OrderProblem
from megatron.core.pipeline_parallel.plan.simulate import Simulation, simulate
from megatron.core.pipeline_parallel.plan.spec import TOLERANCE, PlanPurpose, ScheduleSpec, plan_for
from megatron.core.words import plain, share_text, size_text

# Orders of a searched schedule: the ends of the section are not tried but for the upper one.
_ORDERS = 6
_GOLDEN = 0.5 * (5**0.5 - 1)
# [Note: rounds]: choices that are tried of every plan; then of so many plans at most, those within so much of the best.
_LOOK, _ROUNDS = 16, ((45, 12, 1.3), (None, 6, 1.1))


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


class _NoFasterError(PlanError):
    """Another candidate is known to be as fast as this one at its best: `bound`."""

    def __init__(self, bound: float) -> None:
        super().__init__(f"takes at least {plain(bound)}")
        self.bound = bound


class Least(NamedTuple):
    """Bytes without which a rank can do nothing: states at rest; the weights that one access reads; gradients that are
    added to and reduced, if each is reduced at once; one microbatch's activations."""

    rest: float
    weights: float
    gradients: float
    activation: float


@without_collector()
def joint(candidates: Sequence[ScheduleSpec], num_microbatches: int) -> tuple[Judged, tuple[str, ...]]:
    """The best of the candidates, and a line for each that says why. candidates: each with units, a residency that has
    a limit, and what the wire costs.

    Gathers and reductions can only add to what computations and messages take by themselves, so that none is tried that
    could not be better. Orders that are fixed come first, by that bound, searched ones behind them. A fixed order is
    taken as it is: one that holds too much is refused, though it might fit with forwards held back. Raises PlanError
    where nothing keeps to the limit, saying what would hold the least.
    """
    bounds = [(spec, _bound(spec, num_microbatches)) for spec in candidates]
    bounds.sort(key=lambda one: (one[0].row.searched, one[1]))
    looked, told = _looked(bounds, num_microbatches, _LOOK)
    if not looked:  # what fits may come late
        looked, told = _looked(bounds, num_microbatches, None)
    if not looked:
        raise PlanError(_nothing_fits(candidates, num_microbatches))
    best, *others = _rounds(looked, num_microbatches)
    for one in (best, *others):
        told[named(one.spec)] = told[named(one.spec)] or str(one)
    return best, (f"{named(best.spec)}: chosen", *(f"{name}: {text}" for name, text in told.items()))


def _looked(
    bounds: Sequence[tuple[ScheduleSpec, float]], num_microbatches: int, tries: int | None
) -> tuple[list[Judged], dict[str, str]]:
    """What candidates, each with its bound, come to in so many tries; by name why there is nothing, or no words."""
    looked: list[Judged] = []
    told: dict[str, str] = {}
    below = float("inf")
    for spec, bound in bounds:
        told[named(spec)] = ""
        try:
            if bound >= below:
                raise _NoFasterError(bound)
            looked += _looks(spec, num_microbatches, tries, below)
            below = min(one.simulation.cost for one in looked) * (1 - TOLERANCE)
        except _NoFasterError as error:
            told[named(spec)] = f"takes at least {spec.describe_time(error.bound)}"
        except PlanError as error:
            told[named(spec)] = f"not possible: {error}"
    return looked, told


def _rounds(found: Sequence[Judged], num_microbatches: int) -> list[Judged]:
    """The best first, verified; see [Note: rounds]."""
    ranked = sorted(found, key=lambda one: one.simulation.merit)
    for tries, most, near in _ROUNDS:
        least = near * ranked[0].simulation.cost
        count = sum(one.simulation.cost <= least for one in ranked[:most])
        more = [_judged(one.spec, one.search, tries) if one.search else one for one in ranked[:count]]
        ranked = sorted([*more, *ranked[count:]], key=lambda one: one.simulation.merit)
    for at, one in enumerate(ranked):
        try:  # `verify` may refuse what just fits, by a rounding
            plan = plan_for(one.spec, num_microbatches, PlanPurpose.TRAIN)
        except PlanError as error:
            refused = error
            continue
        timed = simulate(plan, one.spec.costs, one.spec.with_lanes(one.spec.lanes))
        return [Judged(one.spec, plan, timed), *ranked[at + 1 :]]
    raise refused


def named(spec: ScheduleSpec) -> str:
    """`gis, 4 chunks, groups of 4, optim_grads_params`."""
    words = [spec.schedule]
    if spec.row.placement != V_SHAPED and spec.placement.num_chunks > 1:
        words.append(f"{spec.placement.num_chunks} chunks")
    if spec.group_size is not None:
        words.append(f"groups of {spec.group_size}")
    return ", ".join([*words, *([spec.residency.strategy] if spec.residency is not None else [])])


def judge(spec: ScheduleSpec, num_microbatches: int) -> Judged:
    """The best plan of one candidate."""
    return joint((spec,), num_microbatches)[0]


def _looks(spec: ScheduleSpec, num_microbatches: int, tries: int | None, below: float) -> list[Judged]:
    """A candidate's plan, for each share of activations that is tried. below: what takes longer need not be found.
    Raises PlanError where nothing keeps to the limit, or is below."""
    if not spec.row.searched:
        _refuse_full(spec, num_microbatches)
        return [_look(spec, num_microbatches, tries)]
    most = _room(spec)
    least = max(one.activation / size for size, one in zip(most, least_bytes(spec), strict=True))
    found: dict[float, Judged | PlanError] = {}
    looked: dict[Plan, Judged] = {}

    def cost(share: float) -> float:
        if share not in found:
            try:
                one = dataclasses.replace(spec, limits=tuple(share * size for size in most))
                bound = _bound(one, num_microbatches)
                if bound >= below:
                    raise _NoFasterError(bound)
                order = plan_for(one.bare, num_microbatches, PlanPurpose.TRAIN)
                bare = simulate(order, spec.costs).cost
                if bare >= below:
                    raise _NoFasterError(bare)
                if order not in looked:  # which is alike for several shares
                    looked[order] = _look(one, num_microbatches, tries)
                found[share] = looked[order]
            except PlanError as error:
                found[share] = error
        known = found[share]
        if isinstance(known, Judged):
            return known.simulation.cost
        # Too slow without gathers: with less room it only gets slower. Else too much is held: look lower.
        return known.bound if isinstance(known, _NoFasterError) else float("inf")

    low, high = least, 1.0
    cost(high)
    at_best = found[high]
    if isinstance(at_best, _NoFasterError):
        raise at_best
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    while len(found) < _ORDERS and high - low > 1e-3:
        # Where both fail the limit leaves too little beside activations: look lower.
        if cost(left) <= cost(right):
            high, right, left = right, left, right - _GOLDEN * (right - low)
        else:
            low, left, right = left, right, left + _GOLDEN * (high - left)
    if not looked:
        raise next(one for one in found.values() if isinstance(one, PlanError))
    return list(looked.values())


def _look(spec: ScheduleSpec, num_microbatches: int, tries: int | None) -> Judged:
    """By the first choices of its search."""
    assert spec.stages_units is not None
    assert spec.residency is not None
    assert spec.lanes is not None
    order = plan_for(spec.bare, num_microbatches, PlanPurpose.TRAIN)
    if not spec.residency.moves:
        return Judged(spec, order, simulate(order, spec.costs))
    asked = (spec.stages_units, spec.residency, spec.costs, spec.lanes)
    return _judged(spec, PlanSearch(RowMaker(order, *asked)), tries)


def _judged(spec: ScheduleSpec, search: PlanSearch, tries: int | None) -> Judged:
    plan = search.best_of(tries)
    return Judged(spec, plan, simulate(plan, spec.costs, spec.with_lanes(spec.lanes)), search)


# What candidates take and hold at least -----------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def _order(bare: ScheduleSpec, num_microbatches: int) -> tuple[float, tuple[float, ...]]:
    """Time and activations by rank of a fixed order without gathers and reductions: alike for all rows of the sharding
    table."""
    found = simulate(plan_for(bare, num_microbatches, PlanPurpose.ORDER), bare.costs)
    return found.cost, found.peak_activation


def _bound(spec: ScheduleSpec, num_microbatches: int) -> float:
    """No plan of the candidate takes less; 0 where there is none, which `_looks` says."""
    try:
        if not spec.row.searched:
            return _order(spec.bare, num_microbatches)[0]
        problem = OrderProblem(spec.placement, num_microbatches, spec.costs, spec.limits or _room(spec))
        return lower_bound(or_fused(problem))
    except PlanError:
        return 0.0


def least_bytes(spec: ScheduleSpec) -> tuple[Least, ...]:
    """By rank."""
    asked, parts = spec.residency, []
    assert spec.stages_units is not None
    assert asked is not None
    for units in rank_units(spec.placement, spec.stages_units):
        mine = spec.local_stages(units.rank)
        row = [compute(F, stage, 0) for stage in mine]
        row += [compute(kind, stage, 0) for stage in reversed(mine) for kind in (B, W)]
        uses = RowUses(tuple(row), units, overlap_reduce=asked.overlap_reduce)
        weights, gradients = uses.most_read * asked.weights_sharded, uses.most_adding * asked.grads_sharded
        parts.append(Least(units.shard_bytes, weights, gradients, spec.costs.least_activation(mine)))
    return tuple(parts)


def _limit(spec: ScheduleSpec) -> tuple[float, ...]:
    assert spec.residency is not None
    assert spec.residency.limit is not None
    return spec.residency.limit


def _room(spec: ScheduleSpec) -> tuple[float, ...]:
    """By rank, the most that a searched schedule may hold of activations, at a moment without whole gradients; more
    than twice what 1F1B holds is of no use. Raises PlanError where that is less than it needs."""
    parts, cap = least_bytes(spec), 2 * spec.placement.num_ranks * spec.whole_stage
    room = tuple(
        min(cap, limit - one.rest - one.weights) for limit, one in zip(_limit(spec), parts, strict=True)
    )
    if any(size < one.activation for size, one in zip(room, parts, strict=True)):
        raise PlanError(_too_little(parts))
    return room


def _held(spec: ScheduleSpec, num_microbatches: int) -> tuple[Least, ...]:
    """By rank, `least_bytes`; of a fixed order with all its activations. Raises PlanError for an order that these
    microbatches do not make."""
    parts = least_bytes(spec)
    if spec.row.searched:
        return parts
    _, peaks = _order(spec.bare, num_microbatches)
    return tuple(one._replace(activation=peak) for one, peak in zip(parts, peaks, strict=True))


def _refuse_full(spec: ScheduleSpec, num_microbatches: int) -> None:
    """Where states at rest and activations alone are more than a rank may hold, before anything else is tried."""
    for rank, (one, limit) in enumerate(zip(_held(spec, num_microbatches), _limit(spec), strict=True)):
        if one.rest + one.activation > limit:
            raise PlanError(
                f"rank {rank} holds {size_text(one.rest)} at rest and {size_text(one.activation)} of activations, the "
                f"limit is {size_text(limit)}"
            )


def _nothing_fits(candidates: Sequence[ScheduleSpec], num_microbatches: int) -> str:
    """What the candidate whose fullest rank holds the least holds."""
    known = []
    for spec in candidates:
        with contextlib.suppress(PlanError):
            known.append((spec, _held(spec, num_microbatches)))
    if not known:
        return "; ".join(f"{named(spec)}: no such order" for spec in candidates)
    spec, parts = min(known, key=lambda one: max(map(sum, one[1])))
    return f"nothing fits; the least is that of {named(spec)}: {_too_little(parts)}"


def _too_little(parts: Sequence[Least]) -> str:
    rank, one = max(enumerate(parts), key=lambda at: sum(at[1]))
    return (
        f"rank {rank} holds at least {size_text(sum(one))}: {size_text(one.rest)} at rest, "
        f"{size_text(one.weights + one.gradients)} of units gathered and reduced, {size_text(one.activation)} of a "
        f"microbatch's activations"
    )
