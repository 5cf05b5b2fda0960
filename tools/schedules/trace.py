"""Simulated plans, and a measured step beside its plan, as Chrome trace JSON, which Chrome's and Perfetto's viewers
read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core.pipeline_parallel.plan.ir import IS_COMPUTE, IS_TRANSFER, SEND_B, SEND_F, Kind, op_text
from megatron.core.pipeline_parallel.plan.simulate import Simulation
from tools.schedules.held_over_time import activations_over_time, bars
from tools.schedules.overlay import Spans

_US_PER_S = 1e6
UNIT_US = 1000.0  # one unit of time, where times have no unit
LANES = ("compute", "send", "receive")  # of a process, which is a rank
COMPUTE_LANE, SEND_LANE, RECEIVE_LANE = range(len(LANES))

Event = dict[str, Any]


def to_trace(simulation: Simulation) -> str:
    """Per rank lanes for computation, sends and receives, and a counter of activations."""
    return trace_json(trace_events(simulation))


def trace_json(events: Sequence[Mapping[str, Any]]) -> str:
    """The file."""
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, allow_nan=False) + "\n"


def trace_events(
    simulation: Simulation,
    *,
    first_process: int = 0,
    prefix: str = "",
    unit_us: float = UNIT_US,
    transfers: bool = True,
) -> list[Event]:
    """Events of one process a rank, numbered from `first_process`; a unit of time takes `unit_us` microseconds.

    transfers: a slice at both ends of each message, from the time that both are posted to its arrival.
    """
    events: list[Event] = []
    for rank in range(len(simulation.plan.rows)):
        events += _rank_events(simulation, rank, first_process + rank, f"{prefix}stage {rank}", unit_us)
    if not transfers:
        return events
    ends: dict[int, list[tuple[int, int]]] = {}
    for rank, row in enumerate(simulation.plan.rows):
        for place, op in enumerate(row):
            if IS_TRANSFER[op[0]]:
                ends.setdefault(op[7], []).append((rank, place))
    for both in ends.values():
        start = max(simulation.timeline.starts[rank][place] for rank, place in both)
        for rank, place in both:
            op = simulation.plan.rows[rank][place]
            at = first_process + rank, transfer_lane(op[0])
            end = start + simulation.costs.comm
            events.append(trace_slice(*at, op_text(op), "transfer", start, end, unit_us))
    return events


def transfer_lane(kind: int) -> int:
    """The lane of a SEND_* or RECV_*."""
    return SEND_LANE if kind in (SEND_F, SEND_B) else RECEIVE_LANE


def trace_slice(
    process: int, lane: int, name: str, category: str, start: float, end: float, unit_us: float
) -> Event:
    """A box in a lane of a process."""
    times = {"ts": start * unit_us, "dur": (end - start) * unit_us}
    return {"ph": "X", "pid": process, "tid": lane, "name": name, "cat": category, **times}


def _rank_events(simulation: Simulation, rank: int, process: int, name: str, unit_us: float) -> list[Event]:
    """Names of a rank's lanes, its computations, its counter of activations."""
    about: Event = {"ph": "M", "pid": process}
    events = [
        {**about, "name": "process_name", "args": {"name": name}},
        {**about, "name": "process_sort_index", "args": {"sort_index": process}},
        *(
            {**about, "tid": lane, "name": "thread_name", "args": {"name": one}}
            for lane, one in enumerate(LANES)
        ),
    ]

    for start, end, place, label in bars(simulation, rank):
        kind = Kind(simulation.plan.rows[rank][place][0]).name
        events.append(trace_slice(process, COMPUTE_LANE, label, kind, start, end, unit_us))
    counter = {"ph": "C", "pid": process, "name": "activation"}
    for at, held in activations_over_time(simulation, rank):
        number = {"microbatches": round(held.activation, 9)}
        events.append({**counter, "ts": at * unit_us, "args": number})
    return events


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
        for op, start, end, span in zip(row, starts, ends, spans[rank], strict=True):
            told, begin, process = op_text(op), start - span.wait_s, num_ranks + rank
            if IS_COMPUTE[op[0]] and begin < start:
                at = process, RECEIVE_LANE, f"wait for {told}", "wait"
                events.append(trace_slice(*at, begin, start, _US_PER_S))
            elif IS_TRANSFER[op[0]]:
                at = process, transfer_lane(op[0]), told, "transfer"
                events.append(trace_slice(*at, begin, end, _US_PER_S))
    return trace_json(events)
