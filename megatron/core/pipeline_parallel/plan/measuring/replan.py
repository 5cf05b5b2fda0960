"""Solving a run's pipeline schedule again by what the run has measured, and what the log and the record say of it."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from megatron.core.pipeline_parallel.plan.auto import fastest
from megatron.core.pipeline_parallel.plan.budget_search import fastest_within_limit
from megatron.core.pipeline_parallel.plan.build import plan_for
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.held.lanes import LaneCosts, Lanes
from megatron.core.pipeline_parallel.plan.ir import B, Plan, PlanError, plan_hash
from megatron.core.pipeline_parallel.plan.measuring.measured_costs import (
    Figures,
    bubble_rate,
    costs_of,
    peaks_of,
    slowest_pipeline,
)
from megatron.core.pipeline_parallel.plan.planned_residency import peak_bytes
from megatron.core.pipeline_parallel.plan.schedules import SCHEDULES
from megatron.core.pipeline_parallel.plan.simulate import TOLERANCE, Simulation, over_limit, simulate
from megatron.core.pipeline_parallel.plan.spec import PlanPurpose, ScheduleSpec
from megatron.core.words import plain, share_text, size_text


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
    alike: Sequence[ScheduleSpec] = (),
) -> tuple[ScheduleSpec, CostModel, tuple[str, ...], MeasuredPlan]:
    """What comes of figures of a run: what to run from now on, costs as measured, reasons of `auto`, and what log and
    record say of it.

    iteration: the last one that was measured. num_microbatches: of a step now, and the most of a later one. For the
    rest see `solve_again`. Raises RankLimitError where nothing keeps to the limit of all that a rank holds."""
    costs, (now, most) = measured_costs(figures, spec), num_microbatches
    again, kept, reasons = solve_again(spec, costs, now, most, splits=splits, lanes=lanes, alike=alike)
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
    """Times in ns as measured. Activations in bytes as measured, where every stage told of some that should hold any;
    else those known so far. A stage whose backwards were all fused has not shown what is held between B and W: as much
    of an activation as was known."""
    if not (weighed := spec.estimated and all(one["activations"] for one in figures)):
        figures = [Figures(**{**one, "activations": []}) for one in figures]
    costs, known = costs_of(figures, spec.placement), spec.costs
    expected = known.activation
    if not weighed or any(need > 0 >= size for need, size in zip(expected, costs.activation, strict=True)):
        return dataclasses.replace(costs, activation=expected, held_after_b=known.held_after_b)
    seen = {stage for one in figures for kind, stage, _ in one["times"] if kind == B}
    held = list(costs.held_after_b)
    for stage, need in enumerate(expected):
        if need and stage not in seen:
            held[stage] = costs.activation[stage] / need * known.held_after_b[stage]
    return dataclasses.replace(costs, held_after_b=tuple(held))


def solve_again(
    spec: ScheduleSpec,
    costs: CostModel,
    num_microbatches: int,
    most_microbatches: int,
    *,
    splits: bool,
    lanes: LaneCosts | None = None,
    alike: Sequence[ScheduleSpec] = (),
) -> tuple[ScheduleSpec, str | None, tuple[str, ...]]:
    """What to run from now on, if it takes less by these costs than what runs, or if that holds too much, and None;
    else what runs, and why it stays. Last, the reasons of `auto`.

    lanes: what operations of data parallelism take; where a plan has some, computations and these are chosen again, of
    a fixed order these alone. Which microbatches a reduction sums up stays as it is, by the spec's groupings.

    alike: of a run under a limit of all that a rank holds, what there is to choose from on the same stages. Where the
    plan that runs breaks the limit by what was measured, the choice is made again. Raises RankLimitError where nothing
    keeps to it.

    most_microbatches: of a later step, when the batch is ramped up; the schedule has to fit there too. splits: whether
    the model's backwards can be split, for `auto` that runs a schedule of whole ones. Layers stay where they are. Pure:
    ranks that are given the same costs come to the same plan.
    """
    sizes = num_microbatches, most_microbatches
    if (over := _over_rank_limit(spec, costs, sizes)) is not None:
        possible = [one for one in alike if splits or not one.row.splits]
        return _chosen_again(spec, costs, sizes, lanes, possible, over)
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
    if better or (over_limit(before, again.limits) and not over_limit(after, again.limits)):
        return again, None, again.reasons
    share = after.cost / before.cost - 1 if before.cost else 0.0
    longer = f"{share_text(share, 2)} more" if share > TOLERANCE else "as long"
    return spec, f"a new one would take {longer}", again.reasons


class RankLimitError(PlanError):
    """By what was measured, nothing that a run can still choose keeps to --rank-memory-limit."""


class _Over(NamedTuple):
    """A rank that holds more than it may, by estimated activations and by measured ones."""

    rank: int
    planned: float
    measured: float
    limit: float


def _over_rank_limit(spec: ScheduleSpec, costs: CostModel, sizes: Sequence[int]) -> _Over | None:
    """Of the plans that run, the rank that is the most over its limit, by measured costs."""
    if spec.residency is None or spec.residency.limit is None:
        return None
    found: list[_Over] = []
    for plan in (plan_for(spec, size, PlanPurpose.TRAIN) for size in dict.fromkeys(sizes)):
        peaks = (peak_bytes(dataclasses.replace(spec, costs=one), plan) for one in (spec.costs, costs))
        found += map(_Over, itertools.count(), *peaks, spec.residency.limit)
    worst = max(found, key=lambda one: one.measured / one.limit)
    return worst if worst.measured > worst.limit * (1 + TOLERANCE) else None


def _chosen_again(
    spec: ScheduleSpec,
    costs: CostModel,
    sizes: tuple[int, int],
    lanes: LaneCosts | None,
    alike: Sequence[ScheduleSpec],
    over: _Over,
) -> tuple[ScheduleSpec, None, tuple[str, ...]]:
    """By the chooser of the start; shards stay as they are cut."""
    candidates = [
        dataclasses.replace(
            spec.under(costs, lanes),
            schedule=one.schedule,
            group_size=one.group_size,
            limits=None,
            limit_in_stages=None,
            reasons=(),
        )
        for one in alike
    ]
    try:
        best, reasons = fastest_within_limit(candidates, sizes[0])
        plan_for(best.spec, sizes[1], PlanPurpose.TRAIN)
    except PlanError as error:
        raise RankLimitError(
            f"--rank-memory-limit {int(over.limit)}: pipeline rank {over.rank} holds {size_text(over.measured)} by "
            f"measured activations, and was planned to hold {size_text(over.planned)} by estimated ones. Nothing else "
            f"on these stages keeps to the limit: {error}. Give --rank-memory-limit {math.ceil(over.measured)} or "
            "more, smaller microbatches, or each rank fewer layers"
        ) from None
    return best.spec, None, reasons
