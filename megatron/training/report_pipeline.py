"""The pipeline in a run's report: its last measured step below the plan, and what the plan holds over time by kind."""

from __future__ import annotations

import dataclasses
import html
from pathlib import Path

from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.lane_clock import Lanes
from megatron.core.pipeline_parallel.plan.overlay import (
    chosen_step,
    mean_times,
    measured_costs,
    measured_simulation,
    overlay_svg,
)
from megatron.core.pipeline_parallel.plan.render import Lane, lanes_svg, summary
from megatron.core.pipeline_parallel.plan.render_strips import Strips
from megatron.core.pipeline_parallel.plan.simulate import simulate


def pipeline_section(timeline: Path) -> str:
    """HTML. timeline: the folder of --log-pipeline-timeline. Raises PlanError for what is no timeline."""
    step = chosen_step(timeline, None)
    costs = measured_costs(step.plan, mean_times(step.plan, step.spans))
    costs = costs if step.lanes is None else _in_bytes(costs, step.lanes)
    planned = simulate(step.plan, costs, step.lanes)
    measured = measured_simulation(step.plan, step.spans, costs)
    of_ranks = f"iteration {step.iteration}, ranks {', '.join(map(str, step.pipeline))}; seconds"
    lanes = [Lane(str(rank), planned, rank) for rank in range(len(step.plan.rows))]
    strips = Strips(planned, None, "activations" if step.lanes is None else "bytes", step.at_rest)
    return _figure(f"Pipeline, planned above measured: {of_ranks}", overlay_svg(planned, measured)) + _figure(
        f"What the plan moves and holds: {of_ranks}", lanes_svg([summary(planned)], lanes, strips=strips)
    )


def _in_bytes(costs: CostModel, lanes: Lanes) -> CostModel:
    """The same times; activations as the units have them."""
    held = [[(unit.activation, unit.held_after_b) for unit in stage.units] for stage in lanes.stages]
    after_f, after_b = (tuple(sum(one[at] for one in stage) for stage in held) for at in (0, 1))
    return dataclasses.replace(costs, activation=after_f, held_after_b=after_b) if any(after_f) else costs


def _figure(title: str, svg: str) -> str:
    inline = svg.replace(' xmlns="http://www.w3.org/2000/svg"', "")
    return f'<figure class="plan"><figcaption>{html.escape(title)}</figcaption>{inline}</figure>'
