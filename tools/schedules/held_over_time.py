"""What ranks compute and hold over the time of a simulation: what every drawing of one starts from."""

from __future__ import annotations

from megatron.core.pipeline_parallel.plan.costs import activations
from megatron.core.pipeline_parallel.plan.held.lanes import Held
from megatron.core.pipeline_parallel.plan.held.residency_walk import RowWalk
from megatron.core.pipeline_parallel.plan.ir import IS_COMPUTE, Plan, op_text, partner_of
from megatron.core.pipeline_parallel.plan.simulate import Simulation
from megatron.core.pipeline_parallel.plan.timeline import execute
from megatron.core.words import counted, plain, share_text, size_text

Bar = tuple[float, float, int, str]  # start, end, place in the row, text
Moments = list[tuple[float, Held]]  # from each of these times on


def summary(simulation: Simulation, *, held: bool = True) -> str:
    """One line of figures. held: with what is held, which a measured step does not know."""
    plan = simulation.plan
    most = activation_text(simulation, max(simulation.peak_activation))
    return (
        f"{plan.schedule}: {size_of(plan)}, step time {plain(simulation.cost, 5)}"
        + (
            f" (longest rank), makespan {plain(simulation.makespan, 5)} (all ranks)"
            if ends_apart(simulation)
            else ""
        )
        + f", bubble {plain(simulation.bubble_time, 5)} ({share_text(simulation.bubble_rate, 2)})"
        + (f", peak activation {most}" if held else "")
    )


def size_of(plan: Plan) -> str:
    """`4 ranks x 2 chunks, 8 microbatches`"""
    ranks, chunks = counted(plan.placement.num_ranks, "rank"), counted(plan.placement.num_chunks, "chunk")
    return f"{ranks} x {chunks}, {counted(plan.num_microbatches, 'microbatch')}"


def ends_apart(simulation: Simulation) -> bool:
    """Whether all ranks together take longer than each of them."""
    return simulation.makespan > simulation.cost * (1 + 1e-9)


def bars(simulation: Simulation, rank: int) -> list[Bar]:
    """A rank's computations in order; overlapped ones that were timed as one share the time in parts."""
    row = simulation.plan.rows[rank]
    starts, ends = simulation.timeline.starts[rank], simulation.timeline.ends[rank]
    durations = simulation.costs.durations()
    made: list[Bar] = []
    first, second = -1, -1  # places of an overlapped pair
    for place, op in enumerate(row):
        if not IS_COMPUTE[op[0]]:
            continue
        start, end = starts[place], ends[place]
        if op[7] >= 0 and place != second:
            first, second = place, partner_of(row, place)
        other = {first: second, second: first}.get(place, -1)
        if other >= 0 and (starts[other], ends[other]) == (start, end):
            own = min(durations[op[0]][op[1]], end - start)
            start, end = (start, start + own) if place == first else (end - own, end)
        made.append((start, end, place, op_text(op)))
    return made


def limits_in_bytes(simulation: Simulation) -> tuple[float, ...] | None:
    """By rank what it may hold in all, where the plan was made for such a limit: its activations are bytes then."""
    lanes = simulation.timeline.lanes
    return lanes[0].lanes.residency.limit if lanes else None


def counts_bytes(simulation: Simulation) -> bool:
    """Whether activations are bytes as weights are: so they are in limits, and in costs that are those of the units."""
    lanes = simulation.timeline.lanes
    units = (stage.units for stage in lanes[0].lanes.stages) if lanes else ()
    kept = (sum(unit.activation for unit in several) for several in units)
    said = any(0 < own == costs for own, costs in zip(kept, simulation.costs.activation, strict=False))
    return said or limits_in_bytes(simulation) is not None


def activation_text(simulation: Simulation, size: float) -> str:
    """In the unit in which a simulation counts activations."""
    return size_text(size, "bytes" if counts_bytes(simulation) else "")


def held_over_time(simulation: Simulation) -> list[Moments]:
    """By rank what it holds beside its states at rest. A plan without gathers and reductions has activations alone, one
    with them has activations where all is counted in bytes, else none."""
    if not simulation.timeline.lanes:
        return [activations_over_time(simulation, rank) for rank in range(len(simulation.plan.rows))]
    plan, costs = simulation.plan, simulation.costs
    counted, forward_only = costs if counts_bytes(simulation) else None, plan.forward_only
    walks = [
        RowWalk(
            row,
            lane.units,
            lane.lanes,
            costs.durations(),
            costs=counted,
            forward_only=forward_only,
            every=True,
        )
        for row, lane in zip(plan.rows, simulation.timeline.lanes, strict=True)
    ]
    timeline, found = execute(plan, costs, walks=walks), []
    for rank, walk in enumerate(walks):
        *clocks, last = walk.clocks
        found.append([*zip([*clocks, max(last, timeline.end(rank))], walk.boundaries, strict=True)])
    return found


def activations_over_time(simulation: Simulation, rank: int) -> Moments:
    """What a rank's computations hold: at their beginnings and behind them."""
    plan, costs, timeline = simulation.plan, simulation.costs, simulation.timeline
    row, durations, found, clock = plan.rows[rank], costs.durations(), [], 0.0
    for place, during, after in activations(row, costs, forward_only=plan.forward_only):
        op, clock = row[place], max(clock, timeline.starts[rank][place])
        found.append((clock, Held(place, 0, 0, 0, 0, during)))
        end = timeline.ends[rank][place]
        # Of an overlapped pair both end where the second does.
        clock = min(end, clock + durations[op[0]][op[1]]) if op[7] >= 0 else end
        found.append((clock, Held(place, -1, 0, 0, 0, after)))
    return found
