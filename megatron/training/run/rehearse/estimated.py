"""What pipeline ranks of a launch line hold, before it starts: one of each is built on tensors without memory, and its
account made of what the model was seen to take."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from megatron.core.device import device_in_use
from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.optimizer.flat_update import FlatUpdate
from megatron.core.pipeline_parallel.plan.held.units import StageUnits
from megatron.core.pipeline_parallel.plan.spec import PlanPurpose, ScheduleSpec
from megatron.core.transport.parallel_state import ParallelState
from megatron.estimate.device_profiles import DEVICE_PROFILES
from megatron.estimate.run_estimate import RankEstimate, RunEstimate
from megatron.training.config.config import Config
from megatron.training.config.launch_env import LaunchEnv
from megatron.training.planner import Planner
from megatron.training.run.build import build_chunks, build_gpt_model, imagined_world
from megatron.training.run.rehearse.comparison import account_of, batch_bytes, parts_of

# What ranks hold repeats itself from a microbatch to the next, but where a schedule begins with all forwards or is
# searched for: so many microbatches a pipeline rank are looked at, in which every rank comes to hold the most.
_ROUNDS = 4


def estimated(config: Config, planner: Planner) -> RunEstimate:
    """Of a configuration whose model is described. planner: of its flags, which is told of the engines. Raises
    PlanError where there is no plan, ModelError as a launch does."""
    description = config.description
    assert description is not None, "an estimate of a model that nobody has looked at"
    models = _models(config, planner)
    spec = planner.spec
    if spec.keeps_gathered and description.gathered is not None:
        description = description.gathered
    counted = _microbatches(config, spec)
    plan, ranks = planner.plan(counted, PlanPurpose.TRAIN), []
    for rank, model in enumerate(models):
        parts = parts_of(config, spec, description, model, drawn=config.last_num_microbatches - counted)
        ranks.append(RankEstimate.of(account_of(plan, spec, rank, parts), parts.stages))
    return RunEstimate(tuple(ranks), *_room(config, ranks), counted)


def _microbatches(config: Config, spec: ScheduleSpec) -> int:
    """Of a step, that are looked at."""
    every, ranks = config.last_num_microbatches, spec.placement.num_ranks
    repeats = spec.file is None and spec.schedule != "gpipe" and not spec.row.searched
    return min(every, _ROUNDS * ranks) if repeats else every


def _room(config: Config, ranks: Sequence[RankEstimate]) -> tuple[int, int | None, str]:
    """Bytes that ranks take of a machine's memory together, bytes of a rank's device, and what that is called."""
    name, is_cpu = config.training.device_profile, config.parallel.distributed_backend == "gloo"
    profile = DEVICE_PROFILES[name or "cpu"]
    here = min(config.world_size, profile.machine_ranks or config.world_size)
    saved = ("weights", "main_weights", "moments")
    copies = max(sum(one.at_rest.get(kind, 0) for kind in saved) for one in ranks)
    on_host = copies * config.checkpoint.async_save
    if is_cpu:
        together = sum(one.peak.total for one in ranks) * config.world_size // len(ranks) + on_host * here
        return together, LaunchEnv.memory_bytes() // here, "a rank's part of this machine"
    capacity = profile.num_bytes or device_in_use().total_bytes()
    batches = config.last_num_microbatches * batch_bytes(config)
    return (batches + on_host) * here, capacity, name or "this machine's device"


def _models(config: Config, planner: Planner) -> list[DistributedDataParallel]:
    """By pipeline rank, that of one rank; with what an optimizer holds. What data parallelism asks of plans is told."""
    world = imagined_world(config)
    world.keep_one_a_stage()

    def build(ps: ParallelState) -> DistributedDataParallel:
        provider = functools.partial(build_gpt_model, config, ps)
        _, model, _ = build_chunks(config, ps, provider, planner)
        moments = FlatUpdate(config.optimizer, model.buffer, ps.device.torch_device).persistent_bytes()
        model.memory_tracker.book({"moments": sum(moments.values())})
        return model

    models = list(world.run(build).values())
    if not models[0].has_peers:
        planner.adopt(planner.spec.bare)
        return models
    spec, units = planner.spec, dict[int, StageUnits]()
    for rank, model in enumerate(models):
        units |= zip(spec.local_stages(rank), model.stage_units(), strict=True)
    residency = models[0].residency(spec.placement.num_ranks, spec.residency)
    planner.serve(tuple(units[stage] for stage in sorted(units)), residency)
    return models
