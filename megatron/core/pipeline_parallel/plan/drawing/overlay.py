"""A measured step beside the planned one: times by kind and stage as costs, and both drawn on one axis of time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.drawing.grid import columns_per_unit, to_text
from megatron.core.pipeline_parallel.plan.drawing.trace import (
    RECEIVE_LANE,
    trace_events,
    trace_json,
    trace_slice,
    transfer_lane,
)
from megatron.core.pipeline_parallel.plan.ir import BW, B, F, Kind, Plan, PlanError, RawOp, W, op_text
from megatron.core.pipeline_parallel.plan.kinds import IS_COMPUTE, IS_DATA_PARALLEL, IS_TRANSFER
from megatron.core.pipeline_parallel.plan.measuring.measured_costs import divide_backwards
from megatron.core.pipeline_parallel.plan.measuring.timeline_files import (
    MeasuredStep,
    OpTimes,
    read_timeline,
    span_key,
)
from megatron.core.pipeline_parallel.plan.simulate import Simulation
from megatron.core.pipeline_parallel.plan.timeline import Timeline

_US_PER_S = 1e6


def chosen_step(directory: Path, iteration: int | None) -> MeasuredStep:
    """A step of a timeline's first pipeline, the last one of training unless an iteration is asked for.

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
    chosen = [step for step in steps if step.iteration == wanted]
    if not chosen:
        raise PlanError(
            f"--iteration {wanted}: {directory} has {len(there)} iterations from {there[0]} to {there[-1]}, not this"
        )
    return min(chosen, key=lambda step: step.pipeline)


Spans = Sequence[Mapping[str, OpTimes]]  # by pipeline rank: text of an operation -> when it ran


def mean_times(plan: Plan, spans: Spans) -> dict[Kind, tuple[float | None, ...]]:
    """Seconds of one computation, by kind and global stage; None where a plan has no such computation.

    Raises PlanError where a computation of the plan was not measured.
    """
    sums: dict[tuple[int, int], float] = defaultdict(float)
    done: dict[tuple[int, int], set[int]] = defaultdict(set)  # microbatches: a W may have parts
    for rank, row in enumerate(plan.rows):
        for place, op in enumerate(row):
            if IS_COMPUTE[op[0]]:
                sums[op[:2]] += _span(spans, rank, place, op).busy_s
                done[op[:2]].add(op[2])
    stages = range(plan.placement.num_stages)
    means = {key: total / len(done[key]) for key, total in sums.items()}
    return {
        Kind(kind): tuple(means.get((kind, stage)) for stage in stages)
        for kind in sorted({kind for kind, _ in means})
    }


def _span(spans: Spans, rank: int, place: int, op: RawOp) -> OpTimes:
    key = span_key(place, op)
    if key not in spans[rank]:
        raise PlanError(f"the timeline of pipeline rank {rank} has no {key}")
    return spans[rank][key]


def measured_costs(
    plan: Plan, means: Mapping[Kind, Sequence[float | None]], comm_s: float = 0.0
) -> CostModel:
    """Mean times as the cost model of a simulation, in seconds; each activation is a chunk's part of a rank's.

    Where a stage has only BWs, B and W are given their parts of one (`divide_backwards`), which changes no prediction.
    """
    nothing = [None] * plan.placement.num_stages
    f, b, w, both = (means.get(Kind(kind), nothing) for kind in (F, B, W, BW))
    backwards, weights = divide_backwards(b, w, both)
    activation = (1 / plan.placement.num_chunks,) * plan.placement.num_stages
    return CostModel(
        tuple(value or 0.0 for value in f), tuple(backwards), tuple(weights), activation, activation, comm_s
    )


def measured_simulation(plan: Plan, spans: Spans, costs: CostModel) -> Simulation:
    """The figures of a simulation from a step as it ran, the first computation of all ranks at time 0.

    A computation begins where its wait for a message ends, and is not busy while it waits for weights. bubble_time is
    measured alike: cost less what the busiest rank computed.
    """
    starts: list[list[float]] = []
    ends: list[list[float]] = []
    begins: list[float] = []
    busy: list[float] = []
    for rank, row in enumerate(plan.rows):
        here = [_span(spans, rank, place, op) for place, op in enumerate(row)]
        waited = [0.0 if IS_DATA_PARALLEL[op[0]] else one.wait_s for op, one in zip(row, here, strict=True)]
        starts.append([one.start_s + wait for one, wait in zip(here, waited, strict=True)])
        ends.append([one.end_s for one in here])
        computed = [place for place, op in enumerate(row) if IS_COMPUTE[op[0]]]
        begins.append(starts[rank][computed[0]])
        busy.append(sum(here[place].busy_s for place in computed))
    begin = min(begins)
    starts, ends = ([[one - begin for one in row] for row in times] for times in (starts, ends))
    return Simulation(plan, costs, Timeline(starts, ends, [], {}), tuple(busy), max(busy))


def overlay_text(planned: Simulation, measured: Simulation) -> str:
    """Two grids to one scale, planned above measured; times in seconds."""
    scale = columns_per_unit(planned)
    return f"planned {to_text(planned, scale)}measured {to_text(measured, scale)}"


def overlay_trace(planned: Simulation, measured: Simulation, spans: Spans) -> str:
    """Chrome trace JSON in real time: the planned ranks as one group of processes, the measured ones below.

    Messages are planned from the time that both ends are posted; measured are the posting of each end and, in the
    lane of receives, the waiting of computations for what they need.
    """
    num_ranks = len(planned.plan.rows)
    events = trace_events(planned, prefix="planned ", unit_us=_US_PER_S)
    events += trace_events(
        measured, first_process=num_ranks, prefix="measured ", unit_us=_US_PER_S, transfers=False
    )
    for rank, row in enumerate(measured.plan.rows):
        starts, ends = measured.timeline.starts[rank], measured.timeline.ends[rank]
        for place, (op, start, end) in enumerate(zip(row, starts, ends, strict=True)):
            told, process = op_text(op), num_ranks + rank
            begin = start - _span(spans, rank, place, op).wait_s
            if IS_COMPUTE[op[0]] and begin < start:
                wait = f"wait for {told}"
                events.append(trace_slice(process, RECEIVE_LANE, wait, "wait", begin, start, _US_PER_S))
            elif IS_TRANSFER[op[0]]:
                lane = transfer_lane(op[0])
                events.append(trace_slice(process, lane, told, "transfer", begin, end, _US_PER_S))
    return trace_json(events)


def overlay_figures(
    planned: Simulation, measured: Simulation, means: Mapping[Kind, Sequence[float | None]]
) -> dict[str, Any]:
    """Both bubbles, costs and idle times, and the mean times; seconds."""
    names = "makespan", "cost", "bubble_time", "bubble_rate", "idle"
    plan = planned.plan
    return {
        "schedule": plan.schedule,
        "stages": plan.placement.num_ranks,
        "chunks": plan.placement.num_chunks,
        "microbatches": plan.num_microbatches,
        "planned": {name: getattr(planned, name) for name in names},
        "measured": {name: getattr(measured, name) for name in names},
        "mean_time": {kind.name: list(times) for kind, times in means.items()},
        "peak_activation": list(planned.peak_activation),
    }
