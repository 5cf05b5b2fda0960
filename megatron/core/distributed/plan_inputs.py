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
from megatron.core.module import ModelError
from megatron.core.pipeline_parallel.plan.held.lanes import LaneCosts, Moves
from megatron.core.pipeline_parallel.plan.held.units import StageUnits, differing
from megatron.core.pipeline_parallel.plan.planned_residency import StepMoves
from megatron.core.transport import collectives, host_data

_REPEATS = 5
_SMALL = 1 << 12  # elements a rank
_LARGEST = 1 << 22


def units_of_all_stages(
    model: DistributedDataParallel, stages: Sequence[int], described: Sequence[StageUnits] | None = None
) -> tuple[StageUnits, ...]:
    """Of every stage of the pipeline. stages: of this rank, by chunk. described: of all stages, before they were built;
    what ranks have built has to be that. None: what they have built. Communicates over mp.

    Raises ModelError on every rank alike, naming a unit, where one was built otherwise.
    """
    own = zip(stages, model.stage_units(), strict=True)
    mine = {str(stage): dataclasses.asdict(units) for stage, units in own}
    told: dict[int, StageUnits] = {}
    for of_rank in host_data.all_gather_json(mine, model.ps.mp_group):
        for stage, content in of_rank.items():
            units = StageUnits.of_dict(content)
            known = told.setdefault(int(stage), units)
            assert known == units, f"stage {stage} has units {known} on one rank, {units} on another"
    built = tuple(told[stage] for stage in sorted(told))
    for stage, (planned, units) in enumerate(zip(described or built, built, strict=True)):
        if (why := differing(planned, units)) is not None:
            raise ModelError(
                f"stage {stage} is not what its plan was made from: {why}. It is made from the flags, of a model "
                "of your own from what its provider has made before: give the flags of this model, derive a class of "
                "your own from GPTModel, and let the provider make the same model whenever it is called"
            )
    return tuple(described or built)


def measured_wire(model: DistributedDataParallel) -> LaneCosts:
    """In ns, and bytes a ns, of the slowest rank of the world and its slowest group; see [Note: the wire by itself]. A
    gather and a reduction of equal size count as the mean of both. Of instances where inner ranks are one. Communicates
    over the gather and reduce groups, or the outer ones, of this rank's stages, and then over the world: stages may
    have other groups, as one without experts has."""
    shares = (share for stage in model.stage_units() for unit in stage.units for share in unit.shares)
    largest = max((share.gathered for share in shares), default=0)
    lines = []
    for groups in model.groups:
        inner = groups.gather.size > 1
        if not inner and groups.outer.size == 1:
            continue  # whole experts, which nobody else has
        gather, reduce = (groups.gather, groups.reduce) if inner else (groups.outer, groups.outer)
        numels = (_SMALL, min(_LARGEST, max(4 * _SMALL, largest // 4 // gather.size)))
        seconds = []
        for numel in numels:
            part = torch.zeros(numel, device=model.ps.device.torch_device)
            whole = torch.zeros(numel * gather.size, device=model.ps.device.torch_device)
            gathers = functools.partial(collectives.all_gather, whole, part, gather)
            reduces = functools.partial(collectives.reduce_scatter, part, whole, reduce)
            seconds.append(sum(median_seconds(call, model.ps.device) for call in (gathers, reduces)) / 2)
        small_s, large_s = seconds
        lines.append(dataclasses.astuple(_line(small_s, large_s, numels, gather.size)))
    of_ranks = host_data.all_gather_json(lines, model.ps.control_group)
    return min(
        (LaneCosts(*line) for of_rank in of_ranks for line in of_rank), key=lambda line: line.bandwidth
    )


def _line(small_s: float, large_s: float, numels: tuple[int, int], ways: int) -> LaneCosts:
    """Through what gathers of so many elements of 4 bytes a rank have taken."""
    moved = [4 * numel * (ways - 1) for numel in numels]
    a_byte = max(large_s - small_s, 1e-3 * large_s) / (moved[1] - moved[0])
    return LaneCosts(latency=max(0.0, 1e9 * (small_s - moved[0] * a_byte)), bandwidth=1e-9 / a_byte)


def median_seconds(call: Callable[[], object], device: Device) -> float:
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
    traffic = model.traffic
    outer = (traffic.outer_reduce_scatter + traffic.outer_all_reduce, traffic.outer_all_gather)
    moved = Moves(traffic.all_gather, traffic.reduce_scatter + traffic.all_reduce, *outer)
    busy_ns = traffic.sent.calls * wire.latency + traffic.sent.payload_bytes / wire.bandwidth
    return StepMoves.of(
        moved,
        lane_share=busy_ns / 1e9 / step_s,
        exposed_share=None if model.ps.device.queues_work else traffic.waited_s / step_s,
        step_s=step_s,
    )
