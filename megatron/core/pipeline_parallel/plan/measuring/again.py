"""Solving a run's pipeline schedule again by what the run has measured, and what the log and the record say of it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from megatron.core.pipeline_parallel.plan.auto import fastest
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import B, PlanError, plan_hash
from megatron.core.pipeline_parallel.plan.measuring.measured_costs import Figures, costs_of, peaks_of
from megatron.core.pipeline_parallel.plan.residency import LaneCosts
from megatron.core.pipeline_parallel.plan.schedules import SCHEDULES
from megatron.core.pipeline_parallel.plan.simulate import TOLERANCE, Simulation, over_limit, simulate
from megatron.core.pipeline_parallel.plan.spec import PlanPurpose, ScheduleSpec, plan_for
from megatron.core.words import between, plain, share_text


@dataclasses.dataclass(frozen=True)
class Bubbles:
    """Of one step of a pipeline, as shares of its time. planned: of its plan, by the newest costs."""

    iteration: int
    planned: float
    measured: float

    def lines(self) -> list[str]:
        """After the iteration line of a pipeline with more than one rank."""
        return [
            f" pipeline bubble of iteration {self.iteration}: planned {share_text(self.planned, 2)}, "
            f"measured {share_text(self.measured, 2)}"
        ]

    def scalars(self) -> dict[str, float]:
        """The same as shares."""
        return {"planned-bubble": self.planned, "measured-bubble": self.measured}


@dataclasses.dataclass(frozen=True)
class MeasuredPlan:
    """What a pipeline was measured to cost in iterations `first_iteration` to `iteration`, and the plan of it.

    solved: its schedule is one that is made for costs. f_ms, b_ms, w_ms, activation_bytes: by global stage. Bubbles: of
    the plan before and of the one from now on, by these costs. kept: why the plan before stays, None where it does not.
    path: of the new plan's file.
    """

    iteration: int
    first_iteration: int
    solved: bool
    schedule: str
    hash: str
    f_ms: tuple[float, ...]
    b_ms: tuple[float, ...]
    w_ms: tuple[float, ...]
    comm_ms: float
    activation_bytes: tuple[int, ...]
    peak_bytes_per_rank: tuple[int, ...]
    planned_bubble_before: float
    planned_bubble: float
    kept: str | None
    path: str | None = None

    def line(self) -> str:
        """What was measured, and what came of it."""
        times = (("F", self.f_ms), ("B", self.b_ms), ("W", self.w_ms))
        text = (
            f" > pipeline {'solved again' if self.solved else 'measured'} after iteration {self.iteration} "
            f"(iterations {self.first_iteration}-{self.iteration}): "
            f"{', '.join(f'{name} {_range(values)}' for name, values in times)} ms a stage, a transfer "
            f"{plain(self.comm_ms)} ms; planned bubble {share_text(self.planned_bubble_before, 2)}"
        )
        if self.kept is not None:
            return f"{text}; {self.schedule} {self.hash[:12]} stays: {self.kept}"
        where = f", saved as {self.path}" if self.path is not None else ", not saved: that takes --save"
        return f"{text} -> {share_text(self.planned_bubble, 2)}, {self.schedule} {self.hash[:12]}{where}"

    def in_short(self) -> str:
        """The same for a person."""
        steps = f"{self.first_iteration}-{self.iteration}"
        found = (
            f" > pipeline: bubble {share_text(self.planned_bubble_before)} by costs measured in steps {steps}"
        )
        return f"{found}; " + (
            "plan stays" if self.kept is not None else f"new plan: {share_text(self.planned_bubble)}"
        )


def _range(values: Sequence[float]) -> str:
    return between([*map(plain, (min(values), max(values)))])


_NS_PER_MS = 1e6


def replanned(
    iteration: int,
    figures: Sequence[Figures],
    spec: ScheduleSpec,
    num_microbatches: tuple[int, int],
    *,
    splits: bool,
    lanes: LaneCosts | None,
) -> tuple[ScheduleSpec, CostModel, tuple[str, ...], MeasuredPlan]:
    """What comes of figures of a run: what to run from now on, costs as measured, reasons of `auto`, and what log and
    record say of it.

    iteration: the last one that was measured. num_microbatches: of a step now, and the most of a later one. For the
    rest see `solve_again`."""
    costs, (now, most) = measured_costs(figures, spec), num_microbatches
    again, kept, reasons = solve_again(spec, costs, now, most, splits=splits, lanes=lanes)
    before, after = (planned_bubble(one, now, costs, lanes) for one in (spec, again))
    plan = plan_for(again.bare, now, PlanPurpose.TRAIN)
    f_ms, b_ms, w_ms = (tuple(one / _NS_PER_MS for one in times) for times in (costs.f, costs.b, costs.w))
    told = MeasuredPlan(
        iteration=iteration,
        first_iteration=min(first for one in figures for first, *_ in one["steps"]),
        solved=again.reads_costs,
        schedule=plan.schedule,
        hash=plan_hash(plan),
        f_ms=f_ms,
        b_ms=b_ms,
        w_ms=w_ms,
        comm_ms=costs.comm / _NS_PER_MS,
        activation_bytes=tuple(map(round, costs.activation)) if again.estimated else (),
        peak_bytes_per_rank=peaks_of(figures, again.placement.num_ranks),
        planned_bubble_before=before,
        planned_bubble=after,
        kept=kept,
    )
    return again, costs, reasons, told


@functools.lru_cache(maxsize=4)
def planned_bubble(
    spec: ScheduleSpec, num_microbatches: int, costs: CostModel | None, lanes: LaneCosts | None
) -> float:
    """Of the plan of so many microbatches. costs, lanes: as measured; without, by the spec's own."""
    plan = plan_for(spec, num_microbatches, PlanPurpose.TRAIN)
    wire = None if costs is None else spec.with_lanes(lanes)
    return max(0.0, simulate(plan, costs or spec.costs, wire).bubble_rate)  # sums of times are rounded


def measured_costs(figures: Sequence[Figures], spec: ScheduleSpec) -> CostModel:
    """Times in ns as measured. Activations in bytes as measured, where every stage told of some that should hold any;
    else those known so far. A stage whose backwards were all fused has not shown what is held between B and W: as much
    of an activation as was known."""
    weighed = spec.estimated and all(one["activations"] for one in figures)
    if not weighed:
        figures = [Figures(**{**one, "activations": []}) for one in figures]
    costs, known = costs_of(figures, spec.placement), spec.costs
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
    spec: ScheduleSpec,
    costs: CostModel,
    num_microbatches: int,
    most_microbatches: int,
    *,
    splits: bool,
    lanes: LaneCosts | None = None,
) -> tuple[ScheduleSpec, str | None, tuple[str, ...]]:
    """What to run from now on, if it takes less by these costs than what runs, or if that holds too much, and None;
    else what runs, and why it stays. Last, the reasons of `auto`.

    lanes: what operations of data parallelism take; where a plan has some, computations and these are chosen again, of
    a fixed order these alone. Which microbatches a reduction sums up stays as it is, by the spec's groupings.

    most_microbatches: of a later step, when the batch is ramped up; the schedule has to fit there too. splits: whether
    the model's backwards can be split, for `auto` that runs a schedule of whole ones. Layers stay where they are. Pure:
    ranks that are given the same costs come to the same plan.
    """
    if not spec.reads_costs and (lanes is None or spec.file is not None):
        fixed = f"{spec.schedule} is a fixed order" if spec.file is None else "a file says what is run"
        return spec, fixed, ()
    again = dataclasses.replace(spec.under(costs, lanes), reasons=())

    def timed(one: ScheduleSpec, count: int) -> Simulation:
        return simulate(plan_for(one, count, PlanPurpose.TRAIN), costs, again.with_lanes(lanes))

    before = timed(spec, num_microbatches)
    try:
        if spec.rivals:
            rivals = [
                dataclasses.replace(again, schedule=name, group_size=group)
                for name, group in spec.rivals
                if splits or not SCHEDULES[name].splits
            ]
            again = fastest(rivals, num_microbatches)
        after, later = (timed(again, count) for count in (num_microbatches, most_microbatches))
    except PlanError as error:
        return spec, f"nothing fits: {error}", ()
    if over_limit(later, again.limits):
        return spec, f"a new one would hold too much with {most_microbatches} microbatches", ()
    better = after.cost < before.cost * (1 - TOLERANCE)
    if better or (over_limit(before, again.limits) and not over_limit(after, again.limits)):
        return again, None, again.reasons
    share = after.cost / before.cost - 1 if before.cost else 0.0
    longer = f"{share_text(share, 2)} more" if share > TOLERANCE else "as long"
    return spec, f"a new one would take {longer}", again.reasons
