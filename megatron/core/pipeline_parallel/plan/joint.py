"""One budget: the fastest plan of those that hold no more than a limit in bytes, over schedules, chunks and groups,
shares of activations and rows of the sharding table.

[Note: shares] What a searched schedule may hold of activations and what is left to gathered weights and whole gradients
add up to the limit. With more activations the bubble falls, and what is gathered anew rises: the step's time has one
minimum, or nearly so. A golden section finds it in a few orders.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core.pipeline_parallel.plan.ir import Plan, PlanError
from megatron.core.pipeline_parallel.plan.placement import V_SHAPED
from megatron.core.pipeline_parallel.plan.residency_walk import walk_row
from megatron.core.pipeline_parallel.plan.simulate import Simulation, simulate
from megatron.core.pipeline_parallel.plan.spec import TOLERANCE, Purpose, ScheduleSpec, plan_for
from megatron.core.pipeline_parallel.plan.units import RankUnits

# Orders of a searched schedule: the ends of the section are not tried but for the upper one.
_ORDERS = 6
_GOLDEN = 0.5 * (5**0.5 - 1)


@dataclass(frozen=True)
class Judged:
    """A candidate with its plan. share: of the room for activations, None where the order is fixed."""

    spec: ScheduleSpec
    plan: Plan
    simulation: Simulation
    share: float | None = None

    @property
    def merit(self) -> tuple[float, float, float]:
        """Time, time exposed, time on the wire; the least is the best."""
        found = self.simulation
        unit = TOLERANCE * max(found.work, 1e-300)
        cost = round(found.cost / unit) * unit
        return cost, round(sum(found.exposed), 6), round(sum(lane.busy for lane in found.timeline.lanes), 6)

    @functools.cached_property
    def peaks(self) -> tuple[float, ...]:
        """By rank, bytes that it holds in all."""
        assert self.spec.stages_units is not None
        assert self.spec.residency is not None
        peaks = []
        for rank, row in enumerate(self.plan.rows):
            units = RankUnits(rank, self.plan.placement, self.spec.stages_units)
            walk = walk_row(row, units, self.spec.residency, self.spec.costs)
            peaks.append(units.shard_bytes + walk.peak.total)
        return tuple(peaks)


def least_bytes(spec: ScheduleSpec) -> tuple[tuple[int, float, float], ...]:
    """By rank, without which nothing runs: states at rest; the weights that one access reads and the gradients of the
    largest unit; one microbatch's activations."""
    assert spec.stages_units is not None
    assert spec.residency is not None
    parts = []
    for rank in range(spec.placement.num_ranks):
        units, mine = RankUnits(rank, spec.placement, spec.stages_units), spec.local_stages(rank)
        whole = 0.0
        for stage in mine:
            one = spec.stages_units[stage]
            if spec.residency.weights_cut:
                read = (sum(one.units[unit].weight_bytes for unit in access) for access in one.forward)
                whole = max(whole, *read)
        if spec.residency.grads_cut:
            whole += max(units.grad_bytes, default=0)
        parts.append((units.shard_bytes, whole, spec.costs.least_activation(sorted(mine))))
    return tuple(parts)


def joint(candidates: Sequence[ScheduleSpec], num_microbatches: int) -> tuple[Judged, tuple[str, ...]]:
    """The best of the candidates, and a line for each that says why. candidates: each with units, a residency that has
    a limit, and what the wire costs.

    Gathers and reductions can only add to what computations and messages take by themselves, so that candidates come in
    the order of that, and none is tried that could not be better. Raises PlanError where nothing keeps to the limit,
    saying what would hold the least.
    """
    best: Judged | None = None
    lines: list[str] = []
    bounds = [_bound(one, num_microbatches) for one in candidates]
    for bound, spec in sorted(zip(bounds, candidates, strict=True), key=lambda one: one[0]):
        name = named(spec)
        if best is not None and bound >= best.simulation.cost * (1 - TOLERANCE):
            lines.append(f"{name}: takes at least {spec.told_time(bound)}")
            continue
        try:
            found = judge(spec, num_microbatches)
        except PlanError as error:
            lines.append(f"{name}: not possible: {error}")
            continue
        lines.append(f"{name}: {told(found)}")
        if best is None or found.merit < best.merit:
            best = found
    if best is None:
        raise PlanError(_least(candidates))
    return best, (f"{named(best.spec)}: chosen", *lines)


def named(spec: ScheduleSpec) -> str:
    """`gis, 4 chunks, groups of 4, optim_grads_params`."""
    words = [spec.schedule]
    if spec.row.placement != V_SHAPED and spec.placement.num_chunks > 1:
        words.append(f"{spec.placement.num_chunks} chunks")
    if spec.group_size is not None:
        words.append(f"groups of {spec.group_size}")
    return ", ".join([*words, *([spec.residency.strategy] if spec.residency is not None else [])])


def told(one: Judged) -> str:
    """Its time, what is exposed of it, what its fullest rank holds."""
    found, rank = one.simulation, max(range(len(one.peaks)), key=one.peaks.__getitem__)
    exposed = (
        f", exposed {100 * max(found.exposed) / found.cost:.1f}%" if found.exposed and found.cost else ""
    )
    return (
        f"{one.spec.told_time(found.cost)}, bubble {100 * found.bubble_rate:.1f}%{exposed}, "
        f"{one.peaks[rank] / 1e9:.2f} GB (rank {rank})"
    )


def _bound(spec: ScheduleSpec, num_microbatches: int) -> float:
    """What the candidate takes without gathers and reductions, with all the room for activations."""
    try:
        bare = spec.bare
        if spec.row.searched:
            bare = dataclasses.replace(bare, limits=_room(spec))
        return simulate(plan_for(bare, num_microbatches, Purpose.TRAIN), spec.costs).cost
    except PlanError:
        return 0.0  # `judge` says why


def _least(candidates: Sequence[ScheduleSpec]) -> str:
    """Of the candidate whose fullest rank holds the least."""

    def fullest(spec: ScheduleSpec) -> float:
        return max(sum(parts) for parts in least_bytes(spec))

    spec = min(candidates, key=fullest)
    return f"nothing fits; the least is that of {named(spec)}: {_too_little(spec, least_bytes(spec))}"


def _room(spec: ScheduleSpec) -> tuple[float, ...]:
    """By rank, the most that a searched schedule may hold of activations, at a moment without whole gradients; more
    than twice what 1F1B holds is of no use. Raises PlanError where that is less than it needs."""
    assert spec.residency is not None
    assert spec.residency.limit is not None
    weights_alone = dataclasses.replace(
        spec,
        stages_units=tuple(
            dataclasses.replace(
                stage, units=tuple(dataclasses.replace(unit, grad_bytes=0) for unit in stage.units)
            )
            for stage in spec.stages_units or ()
        ),
    )
    parts = least_bytes(weights_alone)
    cap = 2 * spec.placement.num_ranks * spec.whole_stage
    room = tuple(
        min(cap, limit - rest - whole)
        for limit, (rest, whole, _) in zip(spec.residency.limit, parts, strict=True)
    )
    if any(one < least for one, (_, _, least) in zip(room, parts, strict=True)):
        raise PlanError(_too_little(spec, parts))
    return room


def judge(spec: ScheduleSpec, num_microbatches: int) -> Judged:
    """spec: with units, a residency that has a limit, and lanes. Raises PlanError where nothing keeps to the limit."""
    if not spec.row.searched:
        return _judge(spec, num_microbatches)
    most = _room(spec)
    least = max(small / one for one, (_, _, small) in zip(most, least_bytes(spec), strict=True))
    found: dict[float, Judged | PlanError] = {}

    def cost(share: float) -> float:
        if share not in found:
            try:
                limits = tuple(share * one for one in most)
                found[share] = dataclasses.replace(
                    _judge(dataclasses.replace(spec, limits=limits), num_microbatches), share=share
                )
            except PlanError as error:
                found[share] = error
        one = found[share]
        return one.simulation.cost if isinstance(one, Judged) else float("inf")

    low, high = least, 1.0
    cost(high)
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    while len(found) < _ORDERS and high - low > 1e-3:
        # Where both fail the limit leaves too little beside activations: look lower.
        if cost(left) <= cost(right):
            high, right, left = right, left, right - _GOLDEN * (right - low)
        else:
            low, left, right = left, right, left + _GOLDEN * (high - left)
    judged = [one for one in found.values() if isinstance(one, Judged)]
    if not judged:
        raise next(one for one in found.values() if isinstance(one, PlanError))
    return min(judged, key=lambda one: one.merit)


def _judge(spec: ScheduleSpec, num_microbatches: int) -> Judged:
    plan = plan_for(spec, num_microbatches, Purpose.TRAIN)
    return Judged(spec, plan, simulate(plan, spec.costs, spec.with_lanes(spec.lanes)))


def _too_little(spec: ScheduleSpec, parts: Sequence[tuple[int, float, float]]) -> str:
    rank, (rest, whole, activation) = max(enumerate(parts), key=lambda one: sum(one[1]))
    return (
        f"rank {rank} holds at least {(rest + whole + activation) / 1e9:.2f} GB: {rest / 1e9:.2f} at rest, "
        f"{whole / 1e9:.2f} of a unit gathered and reduced, {activation / 1e9:.2f} of a microbatch's activations"
    )
