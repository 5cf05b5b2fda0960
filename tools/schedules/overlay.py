"""A measured step beside the planned one: times by kind and stage as costs, and the step as a simulation."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import IS_BESIDE, IS_COMPUTE, Kind, Plan, PlanError
from megatron.core.pipeline_parallel.plan.measuring.measured_costs import (
    Figures,
    RankStep,
    costs_of,
    figures_of,
    slowest_pipeline,
)
from megatron.core.pipeline_parallel.plan.measuring.timeline_files import MeasuredStep, OpTimes, read_timeline
from megatron.core.pipeline_parallel.plan.simulate import Simulation
from megatron.core.pipeline_parallel.plan.timeline import Timeline

NS_PER_S = 1e9
Times = Sequence[float | None]  # by global stage, None where it has no such computation
Spans = Sequence[Sequence[OpTimes]]  # by pipeline rank and place in its row


def chosen_step(directory: Path, iteration: int | None) -> MeasuredStep:
    """A step of a timeline, the last one of training unless an iteration is asked for; of several pipelines that of the
    one that took the longest, whose bubbles the log says.

    Raises PlanError for what is no timeline, and for an iteration that it does not have.
    """
    if not directory.is_dir():
        raise PlanError(f"{directory}: there is no such folder")
    try:
        steps = read_timeline(directory)
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{directory}: {error}") from None
    steps = [step for step in steps if not step.plan.forward_only] or steps
    if not steps:
        raise PlanError(f"{directory}: no step that all ranks of a pipeline have finished")
    there = sorted({step.iteration for step in steps})
    wanted = there[-1] if iteration is None else iteration
    if wanted not in there:
        raise PlanError(
            f"--iteration {wanted}: {directory} has {len(there)} iterations from {there[0]} to {there[-1]}, not this"
        )
    alike = {step.pipeline: step for step in steps if step.iteration == wanted}
    slowest = slowest_pipeline([one for step in alike.values() for one in figures_of_ranks(step)])
    return alike[tuple(slowest[0]["pipeline"])]


def figures_of_ranks(step: MeasuredStep) -> list[Figures]:
    """What the ranks of the run tell each other of the step."""
    links = step.link_ns or (0,) * len(step.spans)
    return [
        figures_of([RankStep(step.iteration, step.plan, rank, [*spans])], step.pipeline, link_ns=link)
        for rank, (spans, link) in enumerate(zip(step.spans, links, strict=True))
    ]


def median_times(figures: Sequence[Figures], num_stages: int) -> dict[Kind, Times]:
    """Seconds of one computation, by kind and global stage; None where a plan has no such computation."""
    medians = {(kind, stage): ns / NS_PER_S for one in figures for kind, stage, ns in one["times"]}
    kinds = sorted({kind for kind, _ in medians})
    return {Kind(kind): tuple(medians.get((kind, stage)) for stage in range(num_stages)) for kind in kinds}


def measured_costs(figures: Sequence[Figures], plan: Plan, comm_s: float | None = None) -> CostModel:
    """Costs as the run itself solves its schedule again by, in seconds; each activation is a chunk's part of a rank's.
    comm_s: of a message, None: as measured.
    """
    costs = costs_of(figures, plan.placement)
    times = {name: tuple(ns / NS_PER_S for ns in getattr(costs, name)) for name in ("f", "b", "w")}
    return dataclasses.replace(costs, **times, comm=costs.comm / NS_PER_S if comm_s is None else comm_s)


def in_bytes(costs: CostModel, step: MeasuredStep) -> CostModel:
    """The same times, with activations in bytes where the step's units have them."""
    stages = () if step.lanes is None else step.lanes.stages
    activation = tuple(sum(unit.activation for unit in stage.units) for stage in stages)
    held = tuple(sum(unit.held_after_b for unit in stage.units) for stage in stages)
    return dataclasses.replace(costs, activation=activation, held_after_b=held) if any(activation) else costs


def measured_simulation(plan: Plan, spans: Spans, costs: CostModel) -> Simulation:
    """The figures of a simulation from a step as it ran, the first computation of all ranks at time 0.

    A computation begins where its wait for a message ends, and is not busy while it waits for weights. bubble_time is
    measured alike: cost less what the busiest rank computed.
    """
    every = [list(zip(row, here, strict=True)) for row, here in zip(plan.rows, spans, strict=True)]
    starts = [[one.start_s + (0.0 if IS_BESIDE[op[0]] else one.wait_s) for op, one in row] for row in every]
    begin = min(
        next(start for (op, _), start in zip(row, times, strict=True) if IS_COMPUTE[op[0]])
        for row, times in zip(every, starts, strict=True)
    )
    busy = tuple(sum(one.busy_s for op, one in row if IS_COMPUTE[op[0]]) for row in every)
    timeline = Timeline(
        [[start - begin for start in times] for times in starts],
        [[one.end_s - begin for _, one in row] for row in every],
        [],
        {},
    )
    return Simulation(plan, costs, timeline, busy, max(busy))
