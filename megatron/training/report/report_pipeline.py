"""The pipeline in a run's report: its last measured step below the plan, and what that moves and holds over time."""

from __future__ import annotations

import dataclasses
import html
from pathlib import Path

from megatron.core.pipeline_parallel.plan.drawing import overlay
from megatron.core.pipeline_parallel.plan.drawing.svg import MOST_BOXES, Strips, beside_svg, to_picture
from megatron.core.pipeline_parallel.plan.simulate import simulate


def pipeline_section(timeline: Path) -> str:
    """HTML. timeline: the folder of --log-pipeline-timeline. Raises PlanError for what is no timeline."""
    step = overlay.chosen_step(timeline, None)
    costs = overlay.measured_costs(step.plan, overlay.mean_times(step.plan, step.spans))
    stages = () if step.lanes is None else step.lanes.stages
    activation = tuple(sum(unit.activation for unit in stage.units) for stage in stages)
    if any(activation):  # the same times; activations in bytes, as the units have them
        held = tuple(sum(unit.held_after_b for unit in stage.units) for stage in stages)
        costs = dataclasses.replace(costs, activation=activation, held_after_b=held)
    planned = simulate(step.plan, costs, step.lanes)
    measured = overlay.measured_simulation(step.plan, step.spans, costs)
    strips = Strips(planned, None, "activations" if step.lanes is None else "bytes", step.at_rest)
    if step.plan.num_ops <= MOST_BOXES:
        svg = beside_svg(planned, measured, strips=strips)
    else:
        span = max(planned.makespan, measured.makespan)
        svg = to_picture(planned, span=span, width=1200, strips=strips)
        svg += to_picture(measured, span=span, width=1200)
    title = (
        f"Pipeline: iteration {step.iteration}, ranks {', '.join(map(str, step.pipeline))}, seconds. "
        "The step as planned, with what it moves and holds, and as measured"
    )
    inline = svg.replace(' xmlns="http://www.w3.org/2000/svg"', "")
    return f'<figure class="plan"><figcaption>{html.escape(title)}</figcaption>{inline}</figure>'
