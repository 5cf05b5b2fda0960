"""--rank-memory-limit: schedule, chunks, groups, sharding and residency of a run, chosen together (floor 0)."""

from __future__ import annotations

import dataclasses

from megatron.core.distributed.sharding import STRATEGIES, ShardPlace, residency_of, sharding_of
from megatron.core.models.gpt.unit_costs import stage_units
from megatron.core.pipeline_parallel.plan.joint import joint
from megatron.core.pipeline_parallel.plan.residency import LaneCosts
from megatron.core.pipeline_parallel.plan.spec import ScheduleSpec
from megatron.training.config import Config
from megatron.training.state_bytes import state_bytes

_CHUNKS = (2, 4, 8)  # that are tried on each rank
_DTYPES = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def strategies(config: Config) -> tuple[str, ...]:
    """Of the sharding table, what may be chosen: what the flag names, or with `auto` what cuts anything."""
    named = config.ddp.data_parallel_sharding_strategy
    return (named,) if named in STRATEGIES else tuple(name for name in STRATEGIES if name != "no_shard")


def chosen(config: Config, limit: int) -> ScheduleSpec:
    """Raises PlanError where nothing holds as little, StageLayersError where layers fit no schedule's stages."""
    specs, impossible = config.staged_model.candidates(_CHUNKS, every_group=True)
    every = [_asked(config, spec, strategy, limit) for spec in specs for strategy in strategies(config)]
    best, reasons = joint(every, config.last_num_microbatches)
    return dataclasses.replace(best.spec, reasons=(*reasons, *impossible))


def _asked(config: Config, spec: ScheduleSpec, strategy: str, limit: int) -> ScheduleSpec:
    """With units, what is asked of them under the limit, and what the wire costs, in units of a layer's F."""
    ddp, costs = config.ddp, config.model_costs
    assert costs is not None, "a limit in bytes of a model whose shape is not known"
    instances = ddp.num_distributed_optimizer_instances
    place = ShardPlace(inner_size=config.data_parallel_size // instances, outer_size=instances)
    sharding = sharding_of(strategy, ddp.outer_dp_sharding_strategy).at(place)
    sizes = state_bytes(ddp, sharding, place, _DTYPES[config.params_dtype])
    asked = residency_of(ddp, sharding, place, spec.placement.num_ranks, element_bytes=sizes.weight, limit=limit)
    seconds = costs.layer().f / config.achieved_flops
    return dataclasses.replace(
        spec,
        costs=costs.of_stages(spec.stages),
        estimated=True,
        stages_units=stage_units(costs, spec.stages, spec.placement, sizes),
        residency=asked,
        lanes=LaneCosts(bandwidth=config.dp_bytes_per_s * seconds),
    )
