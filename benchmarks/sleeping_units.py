"""Stages whose units sleep one by one, and the engine that gathers and reduces them, over a wire of given costs."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

from benchmarks.sleeping_stages import MS, Clock, SleepingStage
from megatron.core.distributed.custom_fsdp.data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.distributed.plan_inputs import measured_wire
from megatron.core.module import ModelUnit
from megatron.core.pipeline_parallel.plan.held.lanes import LaneCosts, Lanes, UnderWay, lane_of
from megatron.core.pipeline_parallel.plan.held.units import Access, Share, StageUnits, UnitCosts
from megatron.core.pipeline_parallel.plan.ir import BW, REDUCE, W
from megatron.core.pipeline_parallel.plan.passes.add_residency import add_residency
from megatron.core.pipeline_parallel.plan.residency import Residency
from megatron.core.pipeline_parallel.plan.simulate import Simulation, simulate
from megatron.core.pipeline_parallel.runtime.data_parallel_lane import UnitBoundaries
from megatron.core.sharding_table import RankGroup
from megatron.core.transport.parallel_state import ParallelState
from tests.harness.ranks import RankContext

DP, STRATEGY = 2, "optim_grads_params"
UNITS, NUMEL = 2, 1 << 14  # of a chunk; elements of a unit, fp32: 64 KiB


def sharded(order: Simulation, policy: str, wire: LaneCosts) -> Simulation:
    """A plan with the gathers and reductions of a policy; `budget` keeps up to half of all whole weights and gradients.
    wire: in ms, and bytes a ms."""
    place, size = order.plan.placement, 4 * NUMEL
    names = [[f"unit {stage}.{unit}" for unit in range(UNITS)] for stage in range(place.num_stages)]
    units = [
        tuple(UnitCosts(name, shares=(Share(RankGroup("dp", DP), size, size),)) for name in one)
        for one in names
    ]
    forward = tuple((unit,) for unit in range(UNITS))
    stages = tuple(StageUnits(one, forward, forward[::-1]) for one in units)
    budget = (place.num_chunks * UNITS * size,) * place.num_ranks if policy == "budget" else None
    lanes = Lanes(stages, Residency(STRATEGY, policy=policy, budget=budget), wire)
    plan = add_residency(order.plan, stages, lanes.residency, order.costs, wire)
    return simulate(plan, order.costs, lanes)


def wire_of_ranks(ctx: RankContext) -> LaneCosts:
    """As measured over all ranks, in ms and bytes a ms."""
    found = measured_wire(_engine(ctx.ps, [0]))  # in ns
    return LaneCosts(latency=found.latency / 1e6, bandwidth=found.bandwidth * 1e6)


def _engine(ps: ParallelState, stages: list[int]) -> DistributedDataParallel:
    """Over matrices that nobody multiplies with."""
    linears = [[nn.Linear(128, NUMEL // 128, bias=False) for _ in range(UNITS)] for _ in stages]
    named = [
        {f"unit {stage}-{unit}": one for unit, one in enumerate(chunk)}
        for stage, chunk in zip(stages, linears, strict=True)
    ]
    units = [ModelUnit(name.replace("-", "."), (one,)) for chunk in named for name, one in chunk.items()]
    config = DistributedDataParallelConfig(use_custom_fsdp=True, data_parallel_sharding_strategy=STRATEGY)
    return DistributedDataParallel(
        [nn.ModuleDict(one) for one in named], ps, config, stages=stages, units=units
    )


class SlowEngine:
    """The engine of one rank as a plan sees it (`GradSync`), and its `stages`. Collectives are there when a wire of the
    plan's costs, one after the other, would have them there, or when they really are, if that is later. log: of starts
    and ends, as of stages: the first wait for weights is the rank's start, the last sum its end."""

    def __init__(
        self, planned: Simulation, ps: ParallelState, clock: Clock, log: list[tuple[float, float]]
    ) -> None:
        place, lanes = planned.plan.placement, planned.timeline.lanes[ps.pp_rank].lanes
        mine = [place.stage_of(ps.pp_rank, chunk) for chunk in range(place.num_chunks)]
        self.engine, self.clock, self.log, self._free_s = _engine(ps, mine), clock, log, 0.0
        self.planned, self.listener = planned, UnitBoundaries()
        self.units = {stage: lanes.stages[stage] for stage in mine}
        self.stages = {stage: SleepingUnits(stage, chunk, self) for chunk, stage in enumerate(mine)}
        self.unit_number = self.engine.unit_number
        self.gathers = SimpleNamespace(start=self._gather, wait=self._wait, free=self.engine.gathers.free)
        self.reductions = SimpleNamespace(start=self._reduce, start_outer=self.engine.reductions.start_outer)
        unit = lanes.stages[0].units[0]  # as all others
        self._gather_s = MS * lanes.costs.unshard(unit, first=False)
        self._reduce_s = MS * lanes.costs.reduce(unit, lanes.residency)
        self._there_s = [0.0] * len(self.engine.units)
        self._under_way: UnderWay[float] = UnderWay()  # reductions: when they are there

    def contribute(self, unit: int) -> None:
        """A microbatch's gradient: ones."""
        for there_s in self._under_way.of(unit):
            self.clock.sleep_until(there_s)
        for name in self.engine.units[unit].names:
            overwrite, grad = self.engine.reductions.grad_begins(name), self.engine.buffer.main_grad(name)
            grad.fill_(1.0) if overwrite else grad.add_(1.0)

    def finish(self) -> None:
        """Behind the row. Every sum must be right, and have come by the plan."""
        self.engine.reductions.check_reduced()
        self.engine.finish()
        self._under_way.every()
        self.clock.sleep_until(self._free_s)
        self.log.append((self._free_s, self.clock.now()))
        for name in self.engine.buffer.names:
            sums = self.engine.buffer.main_grad_part(name)
            assert sums.eq(self.planned.plan.num_microbatches * DP).all(), f"{name}: {sums}"

    def _gather(self, unit: int) -> None:
        self._there_s[unit] = self._through(self._gather_s)
        self.engine.gathers.start(unit)

    def _wait(self, unit: int) -> None:
        if not self.log:
            self.log.append((self.clock.now(), 0.0))
        self.engine.gathers.wait(unit)
        self.clock.sleep_until(self._there_s[unit])

    def _reduce(self, unit: int) -> None:
        lane = lane_of(REDUCE)
        for there_s in self._under_way.before_one_more(lane):
            self.clock.sleep_until(there_s)
        self._under_way.begin(lane, unit, self._through(self._reduce_s))
        self.engine.reductions.start(unit)

    def _through(self, seconds: float) -> float:
        self._free_s = max(self._free_s, self.clock.now()) + seconds
        return self._free_s


class SleepingUnits(SleepingStage):
    """A chunk that comes to its units one by one, and sleeps in each."""

    def __init__(self, stage: int, chunk: int, engine: SlowEngine) -> None:
        super().__init__(stage, engine.planned.costs, engine.clock, engine.log)
        self._stage, self._chunk, self._engine = stage, chunk, engine
        self._walks: dict[tuple[int, int, int], list[tuple[Access, float]]] = {}  # with seconds

    def backward_weight(self, microbatch: int, units: tuple[int, int] | None = None) -> None:
        self._compute(W, (-1, -1) if units is None else units)

    def _compute(self, kind: int, part: tuple[int, int] = (-1, -1)) -> torch.Tensor:
        walk = self._walks.get((kind, *part))
        if walk is None:
            op, units = (kind, self._stage, 0, 0, *part, -1, -1), self._engine.units[self._stage]
            walk = [(use.units, use.share * self.times[kind]) for use in units.uses(op)]
            self._walks[kind, *part] = walk
        message = np.zeros(2)
        tensor = torch.from_numpy(message)
        for access, sleep_s in walk:
            for unit in access:
                self._engine.listener.unit_begins(self._chunk, unit)
                if kind in (W, BW):
                    self._engine.contribute(self._engine.unit_number(self._chunk, unit))
            message[0] = end = self.clock.now() + sleep_s
            self.clock.sleep_until(end)
        message[1] = self.clock.late_s
        return tensor
