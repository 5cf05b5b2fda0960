"""Solving a run's pipeline schedule again by what the run has measured, and what the log and the record say of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from megatron.core.pipeline_parallel.plan.auto import fastest
from megatron.core.pipeline_parallel.plan.build import plan_for
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.held.lanes import LaneCosts, Lanes
from megatron.core.pipeline_parallel.plan.ir import Plan, PlanError, plan_hash
from megatron.core.pipeline_parallel.plan.measuring.measured_costs import (
    Figures,
    bubble_rate,
    costs_of,
    peaks_of,
    slowest_pipeline,
)
from megatron.core.pipeline_parallel.plan.schedules import SCHEDULES
from megatron.core.pipeline_parallel.plan.simulate import TOLERANCE, Simulation, over_limit, simulate
from megatron.core.pipeline_parallel.plan.spec import PlanPurpose, ScheduleSpec
from megatron.core.words import plain, share_text


@dataclasses.dataclass(frozen=True)
class Bubbles:
    """The bubbles of one step, of the pipeline that took the longest (`waiting_share`): whoever says a measured step's
    bubbles has them from here. planned: of the plan that ran, simulated with the step's own costs, the median of each
    computation of each stage. measured: by the clock, so that late messages, other ranks and a busy core are in it."""

    iteration: int
    planned: float
    measured: float

    @classmethod
    def of(cls, figures: Sequence[Figures], plan: Plan, lanes: Lanes | None) -> Bubbles | None:
        """figures: of one step, of any ranks; None where no pipeline is complete. lanes: in ns."""
        ranks = slowest_pipeline(figures)
        if not ranks:
            return None
        planned = simulate(plan, costs_of(ranks, plan.placement), lanes).bubble_rate
        steps = [one["steps"][-1] for one in ranks]
        measured = bubble_rate((span, busy) for _, span, busy in steps)
        return cls(steps[0][0], max(0.0, planned), measured)  # sums of times are rounded

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
    """`1.2-1.5`, in one word: scripts read the line."""
    return "-".join(dict.fromkeys(map(plain, (min(values), max(values)))))


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
    before, after = (_planned_bubble(one, now, costs, lanes) for one in (spec, again))
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


def _planned_bubble(
    spec: ScheduleSpec, num_microbatches: int, costs: CostModel, lanes: LaneCosts | None
) -> float:
    plan = plan_for(spec, num_microbatches, PlanPurpose.TRAIN)
    return max(0.0, simulate(plan, costs, spec.with_lanes(lanes)).bubble_rate)


def measured_costs(figures: Sequence[Figures], spec: ScheduleSpec) -> CostModel:
    """Times in ns as measured, activations as they are known: of a described model in bytes that were seen, else shares
    of a stage's."""
    known = spec.costs
    return dataclasses.replace(
        costs_of(figures, spec.placement), activation=known.activation, held_after_b=known.held_after_b
    )


def solve_again(
    spec: ScheduleSpec,
    costs: CostModel,
    num_microbatches: int,
    most_microbatches: int,
    *,
    splits: bool,
    lanes: LaneCosts | None = None,
) -> tuple[ScheduleSpec, str | None, tuple[str, ...]]:
    """What to run from now on, if it takes less by these costs than what runs, and None; else what runs, and why it
    stays. Last, the reasons of `auto`. What ranks hold is known before a run and depends on no time, so that limits
    which were kept are kept.

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
        return spec, f"no other one is possible: {error}", ()
    if over_limit(later, again.limits):
        return spec, f"a new one would hold too much with {most_microbatches} microbatches", ()
    better = after.cost < before.cost * (1 - TOLERANCE)
    if better:
        return again, None, again.reasons
    share = after.cost / before.cost - 1 if before.cost else 0.0
    longer = f"{share_text(share, 2)} more" if share > TOLERANCE else "as long"
    return spec, f"a new one would take {longer}", again.reasons
