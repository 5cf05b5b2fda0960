"""`auto`: the fastest schedule that fits every rank's memory, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core.pipeline_parallel.plan.ir import PlanError
from megatron.core.pipeline_parallel.plan.passes.lower import lower
from megatron.core.pipeline_parallel.plan.simulate import TOLERANCE, Simulation, over_limit, simulate
from megatron.core.pipeline_parallel.plan.spec import PlanPurpose, ScheduleSpec, plan_for


@dataclass(frozen=True)
class _Judged:
    """simulation: of the plan with transfers; None if it cannot be had. rank: the one that is most over its limit; None
    where all fit. problem: why it cannot be chosen."""

    spec: ScheduleSpec
    simulation: Simulation | None
    rank: int | None = None
    problem: str = ""

    @property
    def merit(self) -> tuple[float, float, float]:
        """Cost, peak, messages: the least is the best. Costs that differ by less than the tolerance are the same."""
        simulation = self.simulation
        assert simulation is not None, self.spec.schedule
        unit = TOLERANCE * max(simulation.work, 1e-300)
        cost = round(simulation.cost / unit) * unit
        return cost, max(simulation.peak_activation), float(simulation.num_messages)


def fastest(candidates: Sequence[ScheduleSpec], num_microbatches: int) -> ScheduleSpec:
    """The candidate with the fastest plan of those that keep to their limits, of equals the one that holds less.

    Its reasons are a line a candidate, the fastest first, those without a plan last. A schedule that raises PlanError
    is not possible, for the reason of its message. Raises PlanError if nothing fits, with all reasons.
    """
    judged = [_judge(one, num_microbatches) for one in candidates]
    fitting = [one for one in judged if one.simulation is not None and one.rank is None]
    if not fitting:
        reasons = "; ".join(f"{one.spec.schedule}: {one.problem}" for one in judged)
        raise PlanError(f"no pipeline schedule can run within the memory limit of each rank: {reasons}")
    best = min(fitting, key=lambda one: one.merit)
    judged.sort(key=lambda one: float("inf") if one.simulation is None else one.simulation.cost)
    return dataclasses.replace(best.spec, reasons=tuple(_line(one, best) for one in judged))


def _judge(spec: ScheduleSpec, num_microbatches: int) -> _Judged:
    try:
        plan = lower(plan_for(spec, num_microbatches, PlanPurpose.ORDER), spec.costs)
        simulation = simulate(plan, spec.costs)
    except PlanError as error:
        return _Judged(spec, None, None, str(error).removeprefix(f"{spec.schedule}: "))
    over = over_limit(simulation, spec.limits)
    if over is None or spec.limits is None:
        return _Judged(spec, simulation)
    rank, peak = over
    held, allowed = map(spec.describe_activation, (peak, spec.limits[rank]))
    return _Judged(spec, simulation, rank, f"rank {rank} would hold {held} of {allowed}")


def _line(one: _Judged, best: _Judged) -> str:
    """`zbv: cost 24.5, bubble 2.0%, peak 8 of 8 (rank 0): chosen`; the peak is that of the rank nearest its limit."""
    spec, simulation = one.spec, one.simulation
    if simulation is None:
        return f"{spec.schedule}: not possible: {one.problem}"
    peaks, limits = simulation.peak_activation, spec.limits
    if limits is None:
        rank = peaks.index(max(peaks))
        held = spec.describe_activation(peaks[rank])
    else:
        shares = [peak / limit if limit else peak for peak, limit in zip(peaks, limits, strict=True)]
        rank = shares.index(max(shares))
        held = " of ".join(map(spec.describe_activation, (peaks[rank], limits[rank])))
    bubble = f"bubble {100 * simulation.bubble_rate:.1f}%"
    text = f"{spec.schedule}: cost {spec.describe_time(simulation.cost)}, {bubble}, peak {held} (rank {rank})"
    if one is best:
        return f"{text}: chosen"
    if one.rank is not None:
        return f"{text}: too much memory: {one.problem}"
    assert best.simulation is not None, best.spec.schedule
    slower = simulation.cost / best.simulation.cost - 1 if best.simulation.cost else 0.0
    if slower > TOLERANCE:
        return f"{text}: {100 * slower:.1f}% slower than {best.spec.schedule}"
    return f"{text}: as fast as {best.spec.schedule}, and holds no less"
