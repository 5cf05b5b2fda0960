"""What a rank holds over the time of a simulation: the walk over its row, on the simulation's clock."""

from __future__ import annotations

from megatron.core.pipeline_parallel.plan.costs import activations
from megatron.core.pipeline_parallel.plan.held.lane_clock import LaneClock
from megatron.core.pipeline_parallel.plan.held.residency_walk import Held, walk_row
from megatron.core.pipeline_parallel.plan.kinds import IS_COMPUTE, IS_DATA_PARALLEL
from megatron.core.pipeline_parallel.plan.simulate import Simulation
from megatron.core.pipeline_parallel.plan.sizes import size_text


def limits_in_bytes(simulation: Simulation) -> tuple[float, ...] | None:
    """By rank what it may hold in all, where the plan was made for such a limit: its activations are bytes then."""
    lanes = simulation.timeline.lanes
    return lanes[0].lanes.residency.limit if lanes else None


def counts_bytes(simulation: Simulation) -> bool:
    """Whether activations are bytes as weights are: so they are in limits, and where units say what they keep."""
    lanes = simulation.timeline.lanes
    said = bool(lanes) and any(unit.activation for stage in lanes[0].lanes.stages for unit in stage.units)
    return said or limits_in_bytes(simulation) is not None


def activation_text(simulation: Simulation, size: float) -> str:
    """In the unit in which a simulation counts activations."""
    return size_text(size, "bytes" if counts_bytes(simulation) else "")


def held_over_time(simulation: Simulation, rank: int) -> list[tuple[float, Held]]:
    """From each of these times on, what the rank holds beside its states at rest. A plan without gathers and reductions
    has activations alone, one with them has activations where all is counted in bytes, else none."""
    plan, costs, timeline = simulation.plan, simulation.costs, simulation.timeline
    row, starts = plan.rows[rank], timeline.starts[rank]
    clock = 0.0
    if not timeline.lanes:
        found, durations = [], costs.durations()
        for place, during, after in activations(row, costs, forward_only=plan.forward_only):
            op, clock = row[place], max(clock, starts[place])
            found.append((clock, Held(place, 0, 0, 0, 0, during)))
            end = timeline.ends[rank][place]
            # Of an overlapped pair both end where the second does.
            clock = min(end, clock + durations[op[0]][op[1]]) if op[7] >= 0 else end
            found.append((clock, Held(place, -1, 0, 0, 0, after)))
        return found
    lane = timeline.lanes[rank]
    again = LaneClock(lane.units, lane.lanes, lane.durations, clock)
    moments = again.moments = {}
    for place, op in enumerate(row):
        if IS_DATA_PARALLEL[op[0]]:
            clock = again.issue(place, op, clock)
            continue
        clock = max(clock, starts[place])
        if IS_COMPUTE[op[0]]:
            clock = moments[place, -1] = again.compute(place, op, clock)
    counted, asked = costs if counts_bytes(simulation) else None, lane.lanes.residency
    walk = walk_row(row, lane.units, asked, counted, forward_only=plan.forward_only, boundaries=True)
    *held, last = walk.boundaries
    known = [(moments[one.place, one.access if IS_COMPUTE[row[one.place][0]] else -1], one) for one in held]
    return [*known, (max(clock, lane.free), last)]
