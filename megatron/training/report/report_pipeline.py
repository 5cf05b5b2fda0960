"""The pipeline in a run's report: its last measured step below the plan, and what that moves and holds over time."""

from __future__ import annotations

import dataclasses
import html
from pathlib import Path

from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.drawing import overlay
from megatron.core.pipeline_parallel.plan.drawing.svg import Strips, to_picture
from megatron.core.pipeline_parallel.plan.lane_clock import Lanes
from megatron.core.pipeline_parallel.plan.simulate import simulate

_MOST_OPS = 6000  # of a plan whose boxes have a tooltip each


def pipeline_section(timeline: Path) -> str:
    """HTML. timeline: the folder of --log-pipeline-timeline. Raises PlanError for what is no timeline."""
    step = overlay.chosen_step(timeline, None)
    costs = overlay.measured_costs(step.plan, overlay.mean_times(step.plan, step.spans))
    costs = costs if step.lanes is None else _in_bytes(costs, step.lanes)
    planned = simulate(step.plan, costs, step.lanes)
    measured = overlay.measured_simulation(step.plan, step.spans, costs)
    strips = Strips(planned, None, "activations" if step.lanes is None else "bytes", step.at_rest)
    if step.plan.num_ops <= _MOST_OPS:
        svg = overlay.overlay_svg(planned, measured, strips)
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


def _in_bytes(costs: CostModel, lanes: Lanes) -> CostModel:
    """The same times; activations as the units have them."""
    held = [[(unit.activation, unit.held_after_b) for unit in stage.units] for stage in lanes.stages]
    after_f, after_b = (tuple(sum(one[at] for one in stage) for stage in held) for at in (0, 1))
    return dataclasses.replace(costs, activation=after_f, held_after_b=after_b) if any(after_f) else costs
