"""What the log says of a run before its first step: the model's parameters, where its layers lie, the plan."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from megatron.core.model_parallel_config import describe_schedule
from megatron.core.models.gpt.stage_layers import layer_map_lines
from megatron.core.pipeline_parallel.plan.ir import Kind, PlanError, plan_hash
from megatron.core.pipeline_parallel.plan.spec import PlanPurpose, ScheduleSpec, plan_for
from megatron.training.config.problems import ConfigurationError, Problem
from megatron.training.engine import Engine
from megatron.training.guard.console import say
from megatron.training.guard.exit_status import ExitStatus, TrainingExit
from megatron.training.report import metrics
from megatron.training.report.session import Session

COUNTED = (Kind.F, Kind.B, Kind.W, Kind.BW)  # what the line of the plan counts


def report_model(session: Session, spec: ScheduleSpec, engine: Engine, num_microbatches: int) -> None:
    """num_microbatches: of the first step. Communicates over the world. Raises TrainingExit where ranks have come to
    different plans, ConfigurationError where there is none for these units."""
    ps, metas = session.ps, engine.param_meta.values()
    if ps.dp_rank == 0:
        count = sum(math.prod(meta.local_shape) for meta in metas)
        say(metrics.PARAMETER_COUNT.format(tp_rank=ps.tp_rank, pp_rank=ps.pp_rank, count=count))
    for line in layer_map_lines(spec.stages, spec.placement):
        session.print_rank_0(line)
    session.print_rank_last(metrics.plan_line(_plan_facts(session, spec, engine, num_microbatches)))
    asked = session.config.ddp.fsdp_unit_modules
    if session.config.ddp.use_custom_fsdp and asked and engine.declares_units:
        session.print_rank_0(
            f"WARNING: --fsdp-unit-modules {' '.join(asked)} has no effect: the model names its units itself"
        )
    rate = session.config.optimizer.decoupled_lr
    if rate is not None and not any(meta.embedding_or_output for meta in metas):
        session.print_rank_0(
            f"WARNING: --decoupled-lr {rate} has no effect: the model marks no parameter as its word embeddings or "
            "output layer (ParamMeta.embedding_or_output)"
        )
    log_memory(session, engine, "before the first step")


def log_memory(session: Session, engine: Engine, when: str) -> None:
    """--log-fsdp-ledger: what the data parallel engine of rank 0 holds."""
    if session.config.ddp.log_fsdp_ledger:
        for line in metrics.memory_lines(when, engine.memory_tracker.lines()):
            session.print_rank_0(line)


def _plan_facts(
    session: Session, spec: ScheduleSpec, engine: Engine, num_microbatches: int
) -> dict[str, Any]:
    """Of the plan, and of what each rank of the world holds; docs/logging.md has the keys."""
    parallel, optimizer = session.config.parallel, engine.optimizer
    validated = parallel.enable_optimizer_post_validation
    purpose = PlanPurpose.TRAIN_AND_STEP if validated else PlanPurpose.TRAIN
    try:
        lowered = plan_for(spec, num_microbatches, purpose)
    except PlanError as error:  # of a file that was made for other units
        what = f"{describe_schedule(parallel, spec.schedule)}: {error}"
        fix = "run it with the model, the ranks and the sharding that it was saved for, or leave the file out"
        flags = ("--pipeline-schedule-file", "--pipeline-schedule")
        raise ConfigurationError([Problem("pipeline-plan", flags, what, fix)]) from None
    check_same_plan(session.gather(plan_hash(lowered)))
    plan = plan_for(spec.bare, num_microbatches, purpose)
    held = engine.persistent_bytes(), len(engine.model.units), optimizer.snapshot_bytes()
    pp_ranks, persistent, units, snapshots = zip(*session.gather([session.ps.pp_rank, *held]), strict=True)
    counts = [Counter(op[0] for op in row) for row in plan.rows]
    return {
        "schedule": plan.schedule,
        "hash": plan_hash(plan),
        "ops_per_rank": [{kind.name: counts[pp_rank][kind] for kind in COUNTED} for pp_rank in pp_ranks],
        "sharding": session.config.ddp.data_parallel_sharding_strategy,
        "persistent_bytes_per_rank": persistent,
        "post_validation": parallel.post_validation_rollback if validated else "off",
        "units_per_rank": units if engine.model.waits_for_units else (),
        "snapshot_bytes_per_rank": snapshots if validated else (),
    }


def check_same_plan(hashes: Sequence[str]) -> None:
    """hashes: of the plan of every rank. Raises TrainingExit where they differ, which would be noticed by a hang."""
    different = sorted({hashes.index(one) for one in hashes})
    if len(different) > 1:
        told = ", ".join(f"rank {rank} has {hashes[rank][:12]}" for rank in different[:4])
        raise TrainingExit(
            ExitStatus.CONFIGURATION,
            f"ranks would run different pipeline plans ({told}): give --pipeline-schedule-file the same file, and all "
            "hosts the same version of this package",
        )
