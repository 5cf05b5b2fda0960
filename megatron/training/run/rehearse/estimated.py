"""What pipeline ranks of a launch line hold, before it starts: one of each is built on tensors without memory, and its
account made of what the model was seen to take."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from megatron.core.device import device_in_use, imagining
from megatron.core.distributed.custom_fsdp.bucket_memory import num_bytes
from megatron.core.distributed.custom_fsdp.reduction_bytes import finish_bytes
from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.optimizer.converted_grads import ConvertedGrads
from megatron.core.optimizer.flat_update import FlatUpdate
from megatron.core.optimizer.global_norm_index import count_regions
from megatron.core.optimizer.step_bytes import changed_by_step, figure_bytes, update_bytes, validated_bytes
from megatron.core.pipeline_parallel.plan.held.units import StageUnits
from megatron.core.pipeline_parallel.plan.spec import ScheduleSpec
from megatron.core.sharding_table import ShardOver
from megatron.core.transformer.experts.expert_bias import ExpertBiases
from megatron.core.transport.parallel_state import ParallelState
from megatron.estimate.description import ModelDescription
from megatron.estimate.device_profiles import DEVICE_PROFILES
from megatron.estimate.rank_parts import SUMS
from megatron.estimate.run_estimate import RankEstimate, RunEstimate
from megatron.training.config.config import Config
from megatron.training.config.launch_env import LaunchEnv
from megatron.training.engine import largest_bytes
from megatron.training.planner import Planner
from megatron.training.run.build import build_chunks, build_gpt_model, imagined_world
from megatron.training.run.rehearse.comparison import batch_bytes, full_account, parts_of, saved_bytes

# What ranks hold repeats itself from a microbatch to the next, but where a schedule begins with all forwards or is
# searched for: so many microbatches a pipeline rank are looked at, in which every rank comes to hold the most.
_ROUNDS = 2

StepParts = dict[str, dict[str, int]]


def estimated(config: Config, planner: Planner) -> RunEstimate:
    """Of a configuration whose model is described. planner: of its flags, which is told of the engines. Raises
    PlanError where there is no plan, ModelError as a launch does."""
    description = config.description
    assert isinstance(description, ModelDescription), "an estimate of a model that flags do not describe"
    models, updates = _models(config, planner)
    steps = _steps(config, models, updates)
    spec = planner.spec
    if spec.keeps_gathered and description.gathered is not None:
        description = description.gathered
    counted = _microbatches(config, spec)
    ranks, copies = [], 0
    for rank, model in enumerate(models):
        drawn = config.last_num_microbatches - counted
        parts = parts_of(config, spec, description, model, steps[rank], drawn=drawn)
        account = full_account(config, planner, counted, rank, parts, model.buffer)
        ranks.append(RankEstimate.of(account, parts.stages))
        copies = max(copies, saved_bytes(config, parts, model.buffer))
    largest = max(largest_bytes(model.buffer) for model in models) * (config.checkpoint.save is not None)
    return RunEstimate(tuple(ranks), *_room(config, ranks, copies or largest), counted)


def _microbatches(config: Config, spec: ScheduleSpec) -> int:
    """Of a step, that are looked at."""
    every, ranks = config.last_num_microbatches, spec.placement.num_ranks
    repeats = spec.file is None and spec.schedule != "gpipe" and not spec.row.searched
    return min(every, _ROUNDS * ranks) if repeats else every


def _room(config: Config, ranks: Sequence[RankEstimate], saved: int) -> tuple[int, int | None, str]:
    """Bytes that ranks take of a machine's memory together, bytes of a rank's device, and what that is called. saved:
    of checkpoints, on the hosts of devices: copies of a rank, or a tensor on its way to a file."""
    name, is_cpu = config.training.device_profile, config.parallel.distributed_backend == "gloo"
    profile = DEVICE_PROFILES[name or "cpu"]
    here = min(config.world_size, profile.machine_ranks or config.world_size)
    if is_cpu:
        together = sum(one.peak.total for one in ranks) * config.world_size // len(ranks)
        return together, LaunchEnv.memory_bytes() // here, "a rank's part of this machine"
    capacity = profile.num_bytes or device_in_use().total_bytes()
    batches = config.last_num_microbatches * batch_bytes(config)
    return (batches + saved) * here, capacity, name or "this machine's device"


def _steps(
    config: Config, models: Sequence[DistributedDataParallel], updates: Sequence[StepParts]
) -> list[StepParts]:
    """By pipeline rank, what ends a step: sums that wait for its end, and the optimizer's step, whose index of
    regions is counted and not built. updates: of these, what follows from a rank's own weights."""
    ps, rows = models[0].ps, 1 + config.logging.log_num_zeros_in_grad
    experts = (ps.expert_grid.size("tp"), ps.expert_grid.size("ep"))
    whole, owned = count_regions([model.buffer for model in models], ps.tp_size, experts)
    is_sharded = models[0].buffer.sharding.optimizer is not ShardOver.NONE
    in_order = config.parallel.enable_optimizer_post_validation or ps.stage_group.size > 2
    ranks, steps = ps.stage_group.size * (is_sharded and in_order), []
    for model, own, update in zip(models, owned, updates, strict=True):
        with imagining(ps.device):
            figures = {"figures": figure_bytes(own, whole, rows, ranks, ps.device.torch_device)}
        steps.append({SUMS: finish_bytes(model.reductions)} | update | {"grad-norm": figures})
    return steps


def _models(config: Config, planner: Planner) -> tuple[list[DistributedDataParallel], list[StepParts]]:
    """By pipeline rank, that of one rank; with what an optimizer holds, and what its update takes. What data
    parallelism asks of plans is told."""
    world = imagined_world(config)
    world.keep_one_a_stage()
    validated, copies = config.parallel.enable_optimizer_post_validation, config.parallel.keeps_copies

    def build(ps: ParallelState) -> tuple[DistributedDataParallel, StepParts]:
        provider = functools.partial(build_gpt_model, config, ps)
        chunks, model, _ = build_chunks(config, ps, provider, planner.spec, planner.sharded(config.ddp))
        update = FlatUpdate(config.optimizer, model.buffer, ps.device.torch_device)
        model.memory_tracker.book({"moments": sum(update.persistent_bytes().values())})
        taken = functools.partial(update_bytes, update, ConvertedGrads(model.buffer, model.memory_tracker))
        if not validated:
            return model, {"optimizer": taken(in_place=True)}
        kept = ExpertBiases((chunk.module for chunk in chunks), 0.0, ps.dp_group).snapshot_bytes()
        kept += num_bytes(changed_by_step(model.buffer, update)) if copies else 0
        return model, validated_bytes({}, taken, kept, inverse=not copies)

    built = list(world.run(build).values())
    models, updates = [model for model, _ in built], [taken for _, taken in built]
    if not models[0].has_peers:
        planner.adopt(planner.spec.bare)
        return models, updates
    spec, units = planner.spec, dict[int, StageUnits]()
    for rank, model in enumerate(models):
        units |= zip(spec.local_stages(rank), model.stage_units(), strict=True)
    residency = models[0].residency(spec.placement.num_ranks, spec.residency)
    planner.serve(tuple(units[stage] for stage in sorted(units)), residency)
    return models, updates
