"""Solving a run's pipeline schedule again by what the run has measured (floor 0)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import B, PlanError, plan_hash
from megatron.core.pipeline_parallel.plan.measured_costs import costs_of
from megatron.core.pipeline_parallel.plan.passes.lower import lower
from megatron.core.pipeline_parallel.plan.rank_figures import Figures
from megatron.core.pipeline_parallel.plan.simulate import Simulation, simulate
from megatron.training.plans import Plans
from megatron.training.schedule_choice import Layout

# Plans whose simulated costs differ by less, as shares, are equally good: then the one that runs stays.
_TOLERANCE = 1e-9


@dataclasses.dataclass(frozen=True)
class Again:
    """What came of it. before: the plan that runs, by the measured costs. after: the plan to run from now on, by the
    same costs; the same object where the old one stays. why: it stays, in words; None where there is a new one.
    layout, limits: of the new one. reasons: of `auto`, a line a candidate.
    """

    before: Simulation
    after: Simulation
    why: str | None
    layout: Layout | None = None
    limits: tuple[float, ...] | None = None
    reasons: tuple[str, ...] = ()

    @property
    def hash(self) -> str:
        """Of the plan to run."""
        return plan_hash(self.after.plan)


def window_of(start: int, end: int, first_iteration: int) -> tuple[int, int]:
    """The iterations start <= n < end that are measured. A run that is resumed behind the start of the window that the
    flags name measures as many iterations, from its second one on: the first one warms up."""
    begin = start if first_iteration <= start else first_iteration + 1
    return begin, begin + end - start


def measured_costs(figures: Sequence[Figures], plans: Plans) -> CostModel:
    """Times in ns as measured. Activations in bytes as measured, where every stage told of some that should hold any;
    else those that the plans have known so far. A stage whose backwards were all fused has not shown what is held
    between B and W: as much of an activation as was known."""
    weighed = plans.estimated and all(one["activations"] for one in figures)
    if not weighed:
        figures = [Figures(**{**one, "activations": []}) for one in figures]
    costs, known = costs_of(figures, plans.placement), plans.costs
    sizes = zip(costs.activation, known.activation, strict=True)
    if weighed and all(size > 0 or not expected for size, expected in sizes):
        seen = {stage for one in figures for kind, stage, _ in one["times"] if kind == B}
        held = tuple(
            after_b if stage in seen or not expected else size / expected * known_held
            for stage, (after_b, size, expected, known_held) in enumerate(
                zip(costs.held_after_b, costs.activation, known.activation, known.held_after_b, strict=True)
            )
        )
        return dataclasses.replace(costs, held_after_b=held)
    return dataclasses.replace(costs, activation=known.activation, held_after_b=known.held_after_b)


def solve_again(
    plans: Plans, costs: CostModel, num_microbatches: int, most_microbatches: int, *, splits: bool
) -> Again:
    """The plan of these costs, if it takes less by them than the one that runs, or if that one holds too much.

    most_microbatches: of a later step, when the batch is ramped up; the schedule has to fit there too. splits: whether
    the model's backwards can be split, for `auto` that runs a schedule of whole ones. Pure: ranks that are given the
    same costs come to the same plan.
    """
    before = simulate(plans.train(num_microbatches), costs)
    if not plans.reads_costs:
        fixed = "a file says what is run" if plans.of_file else f"{plans.schedule} is a fixed order"
        return Again(before, before, fixed)
    limits = plans.limits_under(costs)
    try:
        layout, reasons = plans.layout_under(costs, limits, num_microbatches, splits=splits)
        after, later = (
            simulate(lower(plans.computations_of(layout, count, limits), costs), costs)
            for count in (num_microbatches, most_microbatches)
        )
    except PlanError as error:
        return Again(before, before, f"nothing fits: {error}")
    if _over(later, limits):
        return Again(before, before, f"a new one would hold too much with {most_microbatches} microbatches")
    if after.cost < before.cost * (1 - _TOLERANCE) or (_over(before, limits) and not _over(after, limits)):
        return Again(before, after, None, layout, limits, reasons)
    return Again(before, before, f"a new one would take {_more(after, before)}", reasons=reasons)


def _over(one: Simulation, limits: tuple[float, ...] | None) -> bool:
    """Whether a rank holds more than it may."""
    return limits is not None and any(
        peak > limit * (1 + _TOLERANCE) for peak, limit in zip(one.peak_activation, limits, strict=True)
    )


def _more(after: Simulation, before: Simulation) -> str:
    share = after.cost / before.cost - 1 if before.cost else 0.0
    return f"{100 * share:.2f}% more" if share > _TOLERANCE else "as long"
