"""What data parallelism asks of the plans of a run: the units of all stages, and what ranks may hold of them."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron.core import host_data
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.sharding import Cut
from megatron.core.parallel_state import ParallelState
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.residency import Residency
from megatron.core.pipeline_parallel.plan.units import StageUnits, UnitCosts


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
