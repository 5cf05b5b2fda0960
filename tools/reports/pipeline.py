"""The pipeline of a run in its report: its last measured step beside the plan, or the plan alone."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

from megatron.core.pipeline_parallel.plan.build import build_plan
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import PlanError
from megatron.core.pipeline_parallel.plan.passes.lower import lower
from megatron.core.pipeline_parallel.plan.pipeline_summary import MOST_FORWARDS
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.plan.schedules import SCHEDULES
from megatron.core.pipeline_parallel.plan.simulate import simulate
from tools.drawing.page import Picture
from tools.reports.run_record import SIZES, RunRecord, at_least_1
from tools.schedules import overlay
from tools.schedules.held_over_time import summary
from tools.schedules.picture import MOST_BOXES, HeldCurves, plan_picture

RANKS = "pipeline_model_parallel_size"
# With one of these the run's plan is more than its schedule's, and only --timeline has it.
_OWN_PLAN = (
    "pipeline_schedule_file",
    "pipeline_memory_limit",
    "rank_memory_limit",
    "rampup_batch_size",
    "microbatch_group_size_per_vp_stage",
)


def measured_step(timeline: Path) -> Picture:
    """The last measured step below the plan, and what that moves and holds over time. timeline: the folder of
    --log-pipeline-timeline. Raises PlanError for what is no timeline."""
    step = overlay.chosen_step(timeline, None)
    costs = overlay.in_bytes(overlay.measured_costs(overlay.figures_of_ranks(step), step.plan), step)
    planned = simulate(step.plan, costs, step.lanes)
    measured = overlay.measured_simulation(step.plan, step.spans, costs)
    unit = "bytes" if step.lanes is not None else "a microbatch's activations in all stages of a rank"
    curves = HeldCurves(planned, None, unit, step.at_rest)
    made = plan_picture(
        planned, measured, held=curves, small=step.plan.num_ops > MOST_BOXES, time_name="seconds"
    )
    title = f"The step of iteration {step.iteration}, as planned from median times and as measured"
    of_the_run = ", ".join(map(str, step.pipeline))
    same = step.pipeline == tuple(range(len(step.pipeline)))
    where = "" if same else f"Lanes are pipeline ranks; these are ranks {of_the_run} of the run. "
    note = f"{where}Planned {summary(planned)}; measured {summary(measured, held=False)}. {made.note}"
    return dataclasses.replace(made, title=title, note=note)


def planned_step(run: RunRecord) -> Picture | None:
    """The plan of the run's last start with more than one pipeline rank, at equal times of F, B and W. None where there
    is none, or the record does not say which: a report shows no other plan than the run's."""

    def count(name: str) -> int:
        return at_least_1(config.get(name))

    starts = (start for start in reversed(run.starts) if at_least_1(start.get("config", {}).get(RANKS)) > 1)
    if (start := next(starts, None)) is None:
        return None
    config = start["config"]
    ranks, chunks = count(RANKS), count("num_virtual_stages_per_pipeline_rank")
    peers = at_least_1(start.get("world_size")) // math.prod(map(count, SIZES))
    microbatches = count("global_batch_size") // (count("micro_batch_size") * max(peers, 1))
    name = config.get("pipeline_schedule")
    is_own = any(config.get(setting) is not None for setting in _OWN_PLAN)
    if is_own or name not in SCHEDULES or ranks * chunks * microbatches > MOST_FORWARDS:
        return None
    try:
        plan = build_plan(name, Request(ranks, microbatches, chunks if chunks > 1 else None))
    except PlanError:
        return None
    costs = CostModel.of_ranks(plan.placement)
    found = simulate(lower(plan, costs), costs)
    made = plan_picture(found, small=plan.num_ops > MOST_BOXES, time_name="time: a rank's F takes 1")
    more = "For the step as it ran, train with --log-pipeline-timeline and give --timeline here."
    note = f"{summary(found)}. {made.note} {more}"
    return dataclasses.replace(made, title="The step as planned, at equal times of F, B and W", note=note)
