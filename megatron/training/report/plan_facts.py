"""What the line of the plan says, for scripts and for the record of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from megatron.core.parallelism_config import describe_schedule
from megatron.core.pipeline_parallel.plan.build import plan_for
from megatron.core.pipeline_parallel.plan.ir import Kind, PlanError, plan_hash
from megatron.core.pipeline_parallel.plan.spec import PlanPurpose
from megatron.training.config.problems import ConfigurationError, Problem
from megatron.training.engine import Engine
from megatron.training.guard.exit_status import ExitStatus, TrainingExit
from megatron.training.report.session import Session

COUNTED = (Kind.F, Kind.B, Kind.W, Kind.BW)  # what the line of the plan counts


def plan_facts(session: Session, engine: Engine, num_microbatches: int) -> dict[str, Any]:
    """Of the plan, and of what each rank of the world holds; docs/logging.md has the keys."""
    parallel, spec = session.config.parallel, session.planner.spec
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
    held = engine.persistent_bytes(), len(engine.model.units), engine.optimizer.snapshot_bytes()
    pp_ranks, persistent, units, snapshots = zip(*session.gather([session.ps.pp_rank, *held]), strict=True)
    counts = [Counter(op[0] for op in row) for row in plan.rows]
    return {
        "schedule": plan.schedule,
        "hash": plan_hash(plan),
        "ops_per_rank": [{kind.name: counts[pp_rank][kind] for kind in COUNTED} for pp_rank in pp_ranks],
        "sharding": engine.model.config.data_parallel_sharding_strategy,
        "persistent_bytes_per_rank": persistent,
        "expert_parallel": parallel.expert_model_parallel_size,
        "context_parallel": parallel.context_parallel_size,
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
