"""What data parallelism asks of the plans of a run: the units of all stages, and what ranks may hold of them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core import host_data
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.sharding import Cut
from megatron.core.parallel_state import ParallelState
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import PlanError
from megatron.core.pipeline_parallel.plan.residency import PlannedResidency, Residency
from megatron.core.pipeline_parallel.plan.residency_lines import (
    HeldBytes,
    StepMoves,
    StepResidency,
    moves_line,
    residency_line,
)
from megatron.core.pipeline_parallel.plan.residency_walk import walk_row
from megatron.core.pipeline_parallel.plan.spec import Purpose, ScheduleSpec, plan_for
from megatron.core.pipeline_parallel.plan.units import RankUnits, StageUnits, UnitCosts
from megatron.training.build import Engine
from megatron.training.session import Session


def residency_of(model: DistributedDataParallel, pipeline_ranks: int) -> Residency:
    """By the engine's row of the sharding table and the flags of its configuration."""
    config, row, place = model.config, model.sharding, model.place
    names = {Cut.WHOLE: "no_shard" if row.optimizer is Cut.WHOLE else "optim"}
    strategy = "optim_grads_params" if row.weights is not Cut.WHOLE else "optim_grads"
    cut = row.main_grads is not Cut.WHOLE
    policy = config.fsdp_reshard_policy if cut else "memory"
    budget = config.fsdp_memory_budget
    unit_size = config.suggested_communication_unit_size
    return Residency(
        strategy=strategy if cut else names[Cut.WHOLE],
        ways=place.inner_size,
        outer=place.outer_size,
        outer_optimizer=row.optimizer is Cut.FULL and place.outer_size > 1,
        policy=policy,
        budget=(budget or 0,) * pipeline_ranks if policy == "budget" else None,
        ahead=0
        if unit_size is None
        else max(1, unit_size * max(one.weights.element_size() for one in model.buffer.arenas)),
        overlap_gather=cut or config.overlap_param_gather,
        overlap_reduce=cut or config.overlap_grad_reduce,
    )


def units_of_all_stages(
    model: DistributedDataParallel, ps: ParallelState, stages: tuple[int, ...], costs: CostModel
) -> tuple[StageUnits, ...]:
    """Of every stage of the pipeline, as its ranks have built it. stages: of this rank, by chunk. costs: of whole
    stages, which are divided over units by their weights. Communicates over the world."""
    own = {
        stage: dataclasses.asdict(_priced(units, stage, costs))
        for stage, units in zip(stages, model.stage_units(), strict=True)
    }
    told: dict[int, StageUnits] = {}
    for of_rank in host_data.all_gather_json(
        {str(stage): units for stage, units in own.items()}, ps.control_group
    ):
        for stage, content in of_rank.items():
            units = _stage_units(content)
            known = told.setdefault(int(stage), units)
            assert known == units, f"stage {stage} has units {known} on one rank, {units} on another"
    return tuple(told[stage] for stage in sorted(told))


def _priced(stage_units: StageUnits, stage: int, costs: CostModel) -> StageUnits:
    whole = sum(unit.grad_bytes for unit in stage_units.units) or 1

    def share(unit: UnitCosts) -> UnitCosts:
        part = unit.grad_bytes / whole
        return dataclasses.replace(
            unit,
            f=costs.f[stage] * part,
            b=costs.b[stage] * part,
            w=costs.w[stage] * part,
            activation=costs.activation[stage] * part,
            held_after_b=costs.held_after_b[stage] * part,
        )

    return dataclasses.replace(stage_units, units=tuple(map(share, stage_units.units)))


def _stage_units(content: dict[str, Any]) -> StageUnits:
    return StageUnits(
        tuple(UnitCosts(**unit) for unit in content["units"]),
        tuple(map(tuple, content["forward"])),
        tuple(map(tuple, content["backward"])),
    )


class ResidencyReport:
    """What plans of a run hold and move, and what steps have held and moved. One on every rank.

    engine's bytes at rest are told once; the fullest pipeline rank by plan is the one that is reported.
    """

    def __init__(self, session: Session, spec: ScheduleSpec, engine: Engine) -> None:
        self._session, self._engine = session, engine
        told = session.gather([session.ps.pp_rank, engine.persistent_bytes()])
        self._at_rest = [
            max(size for rank, size in told if rank == pp_rank) for pp_rank in range(spec.placement.num_ranks)
        ]

    @property
    def _model(self) -> DistributedDataParallel:
        return self._engine.model

    def lines(self, spec: ScheduleSpec, num_microbatches: int) -> list[str]:
        """At start-up; none where data parallelism moves nothing."""
        if spec.residency is None:
            return []
        rank, held, moves = self._planned(spec, num_microbatches)
        asked = spec.residency
        return [
            residency_line(
                spec.schedule,
                asked.strategy,
                asked.policy,
                ways=asked.ways,
                outer=asked.outer,
                rank=rank,
                planned=held,
            ),
            moves_line(rank, moves),
        ]

    def after_step(self, spec: ScheduleSpec, iteration: int, num_microbatches: int) -> StepResidency | None:
        """Of a log interval's last iteration. Communicates over the world then."""
        if spec.residency is None or iteration % self._session.config.logging.log_interval:
            return None
        rank, planned, planned_moves = self._planned(spec, num_microbatches)
        tracker, traffic = self._engine.memory_tracker, self._model.traffic
        own = [
            self._engine.persistent_bytes(),
            tracker.peak("gathered"),
            tracker.peak("grads") + tracker.peak("extra"),
        ]
        tracker.reset_peaks()
        inner = traffic.reduce_scatter + traffic.all_reduce
        outer = traffic.outer_reduce_scatter + traffic.outer_all_reduce
        every = inner + outer + traffic.all_gather + traffic.outer_all_gather
        counts = [
            traffic.all_gather.calls,
            inner.calls,
            traffic.outer_all_gather.calls,
            outer.calls,
            every.payload_bytes,
        ]
        told = self._session.gather([self._session.ps.pp_rank, own, counts])
        _, held, moves = max((one for one in told if one[0] == rank), key=lambda one: sum(one[1]))
        at_rest, gathered, gradients = held
        measured = HeldBytes(at_rest, gathered, gradients, None)
        return StepResidency(iteration, rank, planned, measured, planned_moves, _moves(moves))

    def _planned(self, spec: ScheduleSpec, num_microbatches: int) -> tuple[int, HeldBytes, StepMoves]:
        """Of the fullest pipeline rank."""
        validated = self._session.config.parallel.enable_optimizer_post_validation
        purpose = Purpose.TRAIN_AND_STEP if validated else Purpose.TRAIN
        return _planned(spec, num_microbatches, purpose, tuple(self._at_rest))


@functools.lru_cache(maxsize=4)
def _planned(
    spec: ScheduleSpec, num_microbatches: int, purpose: Purpose, at_rest: tuple[int, ...]
) -> tuple[int, HeldBytes, StepMoves]:
    plan, found = plan_for(spec, num_microbatches, purpose), []
    assert spec.stages_units is not None, "a residency without units"
    assert spec.residency is not None, "units without a residency"
    for rank, row in enumerate(plan.rows):
        units = RankUnits(rank, plan.placement, spec.stages_units)
        walk = walk_row(row, units, spec.residency, spec.costs, boundaries=True)
        held = HeldBytes(
            at_rest[rank],
            walk.most.gathered,
            max((one.gradients + one.under_way for one in walk.boundaries), default=0),
            round(walk.most.activation) if spec.estimated else None,
        )
        moves = walk.moves
        every = (moves.gathers, moves.reductions, moves.outer_gathers, moves.outer_sums)
        told = _moves([*(one.calls for one in every), sum(one.payload_bytes for one in every)])
        found.append((rank, held, told))
    return max(found, key=lambda one: one[1].total)


def _moves(counts: Sequence[int]) -> StepMoves:
    """counts: gathers, reductions, gathers and sums over instances, bytes."""
    gathers, reductions, outer_gathers, outer_sums, payload_bytes = counts
    return StepMoves(gathers, reductions, outer_gathers, outer_sums, payload_bytes)


def groupings_of(
    spec: ScheduleSpec, saved: Mapping[int, PlannedResidency]
) -> tuple[dict[int, PlannedResidency], list[str]]:
    """A resumed run groups microbatches as the saved one did, where it is laid out and asked for alike: those that it
    takes, and a line for the log for each size where it does not, and its own groups are others."""
    if spec.residency is None or spec.stages_units is None:
        return {}, []
    own = PlannedResidency.of(spec.residency, spec.stages_units, ())
    alike = {size: one for size, one in saved.items() if dataclasses.replace(one, grouping=()) == own}
    lines = []
    for size, one in saved.items():
        if size in alike:
            continue
        try:
            planned = plan_for(spec, size, Purpose.TRAIN).residency
        except PlanError:
            continue  # steps of this size are not run any more
        if planned is not None and planned.grouping != one.grouping:
            lines.append(
                f" > gradients of {size} microbatches are grouped otherwise than in the saved run: before each "
                "reduction others are added up, so that sums are rounded otherwise (docs/numerics.md)"
            )
    return alike, lines
