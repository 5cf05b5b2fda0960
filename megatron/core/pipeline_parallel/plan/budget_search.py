"""One budget: the fastest plan of those that hold no more than a limit in bytes, over schedules, chunks and groups,
shares of activations and rows of the sharding table.

[Note: rounds] Of a small plan `add_residency` tries about a hundred choices, of which the first ten or so tell how good
it is. So all candidates are tried a little, and those that come near the best one then more, in a few rounds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from megatron.core.pipeline_parallel.plan.activation_share import looks
from megatron.core.pipeline_parallel.plan.build import plan_for
from megatron.core.pipeline_parallel.plan.candidate import (
    Judged,
    NoFasterError,
    bound_of,
    judged,
    least_held,
    too_little,
)
from megatron.core.pipeline_parallel.plan.ir import PlanError, without_collector
from megatron.core.pipeline_parallel.plan.placement import V_SHAPED
from megatron.core.pipeline_parallel.plan.simulate import TOLERANCE, simulate
from megatron.core.pipeline_parallel.plan.spec import PlanPurpose, ScheduleSpec

# [Note: rounds]: choices that are tried of every plan; then of so many plans at most, those within so much of the best.
_LOOK, _ROUNDS = 16, ((45, 12, 1.3), (None, 6, 1.1))


@without_collector()
def fastest_within_limit(
    candidates: Sequence[ScheduleSpec], num_microbatches: int
) -> tuple[Judged, tuple[str, ...]]:
    """The best of the candidates, and a line for each that says why. candidates: each with units, a residency that has
    a limit, and what the wire costs.

    Gathers and reductions can only add to what computations and messages take by themselves, so that none is tried that
    could not be better. Orders that are fixed come first, by that bound, searched ones behind them. A fixed order is
    taken as it is: one that holds too much is refused, though it might fit with forwards held back. Raises PlanError
    where nothing keeps to the limit, saying what would hold the least.
    """
    bounds = [(spec, bound_of(spec, num_microbatches)) for spec in candidates]
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
                raise NoFasterError(bound)
            looked += looks(spec, num_microbatches, tries, below)
            below = min(one.simulation.cost for one in looked) * (1 - TOLERANCE)
        except NoFasterError as error:
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
        more = [judged(one.spec, one.plan, one.search, tries) for one in ranked[:count]]
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
    return fastest_within_limit((spec,), num_microbatches)[0]


def _nothing_fits(candidates: Sequence[ScheduleSpec], num_microbatches: int) -> str:
    """What the candidate whose fullest rank holds the least holds."""
    known = []
    for spec in candidates:
        with contextlib.suppress(PlanError):
            known.append((spec, least_held(spec, num_microbatches)))
    if not known:
        return "; ".join(f"{named(spec)}: no such order" for spec in candidates)
    spec, parts = min(known, key=lambda one: max(map(sum, one[1])))
    return f"nothing fits; the least is that of {named(spec)}: {too_little(parts)}"
