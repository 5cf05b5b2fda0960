"""The pipeline of a run in its report: its last measured step beside the plan, or the plan alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from megatron.core.drawing.page import Picture
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.drawing import overlay
from megatron.core.pipeline_parallel.plan.drawing.held_over_time import summary
from megatron.core.pipeline_parallel.plan.facts import MOST_FORWARDS
from megatron.core.pipeline_parallel.plan.ir import PlanError
from megatron.core.pipeline_parallel.plan.passes.lower import lower
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.plan.schedules import SCHEDULES, build_plan
from megatron.core.pipeline_parallel.plan.simulate import simulate
from megatron.training.report.run_record import RunRecord, at_least_1
from tools.schedule_picture import MOST_BOXES, HeldCurves, plan_picture

RANKS = "pipeline_model_parallel_size"


def measured_step(timeline: Path) -> Picture:
    """The last measured step below the plan, and what that moves and holds over time. timeline: the folder of
    --log-pipeline-timeline. Raises PlanError for what is no timeline."""
    step = overlay.chosen_step(timeline, None)
    costs = overlay.measured_costs(step.plan, overlay.mean_times(step.plan, step.spans))
    stages = () if step.lanes is None else step.lanes.stages
    activation = tuple(sum(unit.activation for unit in stage.units) for stage in stages)
    if any(activation):  # the same times; activations in bytes, as the units have them
        held = tuple(sum(unit.held_after_b for unit in stage.units) for stage in stages)
        costs = dataclasses.replace(costs, activation=activation, held_after_b=held)
    planned = simulate(step.plan, costs, step.lanes)
    measured = overlay.measured_simulation(step.plan, step.spans, costs)
    curves = HeldCurves(planned, None, "activations" if step.lanes is None else "bytes", step.at_rest)
    made = plan_picture(
        planned, measured, held=curves, small=step.plan.num_ops > MOST_BOXES, time_name="seconds"
    )
    ranks = ", ".join(map(str, step.pipeline))
    title = f"Pipeline: iteration {step.iteration}, ranks {ranks}, as planned from mean times and as measured"
    note = f"Planned {summary(planned)}; measured {summary(measured, held=False)}. {made.note}"
    return dataclasses.replace(made, title=title, note=note)


def planned_step(run: RunRecord) -> Picture | None:
    """The plan of the run's last start with more than one pipeline rank, at equal times of F, B and W. None where there
    is none, or the record does not say which."""

    def count(name: str) -> int:
        return at_least_1(config.get(name))

    starts = (start for start in reversed(run.starts) if at_least_1(start.get("config", {}).get(RANKS)) > 1)
    if (start := next(starts, None)) is None:
        return None
    config = start["config"]
    ranks, chunks = count(RANKS), count("num_virtual_stages_per_pipeline_rank")
    peers = at_least_1(start.get("world_size")) // (ranks * count("tensor_model_parallel_size"))
    microbatches = count("global_batch_size") // (count("micro_batch_size") * max(peers, 1))
    name = config.get("pipeline_schedule")
    if name not in SCHEDULES or ranks * chunks * microbatches > MOST_FORWARDS:
        return None
    try:
        plan = build_plan(name, Request(ranks, microbatches, chunks if chunks > 1 else None))
    except PlanError:
        return None
    costs = CostModel.of_ranks(plan.placement)
    found = simulate(lower(plan, costs), costs)
    made = plan_picture(found, small=plan.num_ops > MOST_BOXES, time_name="time: a rank's F takes 1")
    note = f"{summary(found)}. {made.note} For a step as it ran, train with --log-pipeline-timeline."
    return dataclasses.replace(made, title="The step as planned, at equal times of F, B and W", note=note)
