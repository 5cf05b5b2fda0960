"""What plans ask of an engine: how it cuts states, the units of all stages, and what the wire to its peers costs.

[Note: the wire by itself] Two sizes of message, each gathered and each reduced a few times with nothing beside it: a
line through two points has a latency and a bandwidth. In a step the wire is shared with computations on CPU, and with
messages between stages where these use the same network card; how long collectives are then waited for is counted
where they are (`TrafficCounter`).
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence

import torch

from megatron.core.device import Device
from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.pipeline_parallel.plan.held.residency_walk import Moves
from megatron.core.pipeline_parallel.plan.held.units import StageUnits, with_work_of
from megatron.core.pipeline_parallel.plan.planned_residency import StepMoves
from megatron.core.pipeline_parallel.plan.residency import LaneCosts
from megatron.core.transport import collectives, host_data

_REPEATS = 5
_SMALL = 1 << 12  # elements a rank
_LARGEST = 1 << 22


def units_of_all_stages(
    model: DistributedDataParallel, stages: Sequence[int], work: Sequence[StageUnits] | None = None
) -> tuple[StageUnits, ...]:
    """Of every stage of the pipeline, as its ranks have built it. stages: of this rank, by chunk. work: of all stages,
    what units take by formula; it is divided by bytes where a stage has other units. Communicates over the world."""
    own = {
        str(stage): dataclasses.asdict(with_work_of(units, None if work is None else work[stage]))
        for stage, units in zip(stages, model.stage_units(), strict=True)
    }
    told: dict[int, StageUnits] = {}
    for of_rank in host_data.all_gather_json(own, model.ps.control_group):
        for stage, content in of_rank.items():
            units = StageUnits.of_dict(content)
            known = told.setdefault(int(stage), units)
            assert known == units, f"stage {stage} has units {known} on one rank, {units} on another"
    return tuple(told[stage] for stage in sorted(told))


def measured_wire(model: DistributedDataParallel) -> LaneCosts:
    """In ns, and bytes a ns, of the slowest rank of the world; see [Note: the wire by itself]. A gather and a reduction
    of equal size count as the mean of both. Of the outer group where inner ranks are one. Communicates over the gather
    and reduce groups, or the outer one, and over the world."""
    ps = model.ps
    groups = next(iter(model.buffer.by_groups(model.buffer.buckets)))[0]
    gather, reduce = (
        (groups.gather, groups.reduce) if groups.gather.size > 1 else (groups.outer, groups.outer)
    )
    largest = max(unit.weight_bytes for stage in model.stage_units() for unit in stage.units)
    numels = (_SMALL, min(_LARGEST, max(4 * _SMALL, largest // 4 // gather.size)))
    seconds = []
    for numel in numels:
        part = torch.zeros(numel, device=ps.device.torch_device)
        whole = torch.zeros(numel * gather.size, device=ps.device.torch_device)
        gathers = functools.partial(collectives.all_gather, whole, part, gather)
        reduces = functools.partial(collectives.reduce_scatter, part, whole, reduce)
        seconds.append(sum(_median_seconds(call, ps.device) for call in (gathers, reduces)) / 2)
    told = host_data.all_gather_json(seconds, ps.control_group)
    small_s, large_s = (max(one[at] for one in told) for at in (0, 1))
    moved = [4 * numel * (gather.size - 1) for numel in numels]
    a_byte = max(large_s - small_s, 1e-3 * large_s) / (moved[1] - moved[0])
    return LaneCosts(latency=max(0.0, 1e9 * (small_s - moved[0] * a_byte)), bandwidth=1e-9 / a_byte)


def _median_seconds(call: Callable[[], object], device: Device) -> float:
    """The first call is not counted: connections are made."""
    found = []
    for _ in range(1 + _REPEATS):
        device.synchronize()  # sync: measured before the first step
        start = time.perf_counter()
        call()
        device.synchronize()  # sync: measured before the first step
        found.append(time.perf_counter() - start)
    return sorted(found[1:])[_REPEATS // 2]


def measured_moves(model: DistributedDataParallel, wire: LaneCosts, step_s: float) -> StepMoves:
    """What the step under way or the last one, of so many seconds, has moved, and for how much of it the wire was busy.
    Where the device works off a queue, waiting is the device's, and not known."""
    traffic, place = model.traffic, model.place
    sums, outer_sums = traffic.all_reduce, traffic.outer_all_reduce  # they go round twice
    outer = (traffic.outer_reduce_scatter + outer_sums, traffic.outer_all_gather)
    moved = Moves(traffic.all_gather, traffic.reduce_scatter + sums, *outer)
    busy_ns = wire.of(moved.gathers + moved.reductions + sums, place.inner_size)
    busy_ns += wire.of(moved.outer_gathers + moved.outer_sums + outer_sums, place.outer_size)
    return StepMoves.of(
        moved,
        lane_share=busy_ns / 1e9 / step_s,
        exposed_share=None if model.ps.device.queues_work else traffic.waited_s / step_s,
        step_s=step_s,
    )
