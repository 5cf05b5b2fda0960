"""What tools/show_schedule.py refuses to draw."""

from __future__ import annotations

from megatron.core.pipeline_parallel.plan.compare import over_limit
from megatron.core.pipeline_parallel.plan.ir import PlanError
from megatron.core.pipeline_parallel.plan.schedules import AUTO, SCHEDULES
from megatron.core.pipeline_parallel.plan.simulate import Simulation

SHORTEST_MAKESPAN, LONGEST_MAKESPAN = 1e-300, 1e300


def drawable(simulation: Simulation) -> Simulation:
    """Raises PlanError for times that cannot be drawn."""
    # Beyond these a float's range leaves no room to scale times to columns, pixels or microseconds.
    if not SHORTEST_MAKESPAN <= simulation.makespan <= LONGEST_MAKESPAN:
        raise PlanError(
            f"makespan {simulation.makespan:g} is outside {SHORTEST_MAKESPAN:g} to {LONGEST_MAKESPAN:g}: "
            "give --time-f, --time-b, --time-w and --time-comm in another unit"
        )
    return simulation


def fitting(simulation: Simulation, limits: tuple[float, ...] | None) -> Simulation:
    """Raises PlanError for more activations than the limit."""
    over = over_limit(simulation, limits)
    if over is not None and limits is not None:
        rank, peak = over
        searched = sorted(name for name, row in SCHEDULES.items() if row.searched)
        fix = "" if simulation.plan.schedule in searched else f"{', '.join(searched)} keep to a limit; "
        raise PlanError(
            f"{simulation.plan.schedule} needs {peak:g} activations on rank {rank}, more than --memory-limit "
            f"{limits[rank]:g}: {fix}--schedule {AUTO} takes the fastest that does, or give {peak:g} or more"
        )
    return simulation
