"""What a rank may hold of activations where the flags leave it to the device, and what the log says of limits."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.pipeline_parallel.plan.ir import PlanError
from megatron.core.pipeline_parallel.plan.verify import peak_activation
from megatron.training.build import Engine
from megatron.training.plans import Plans
from megatron.training.problems import ConfigurationError, Problem
from megatron.training.session import Session

_FLAGS = ("--zero-bubble-max-pending-backward", "--zero-bubble-adaptive-memory-limit-percentile")


def settle_limits(session: Session, plans: Plans, engine: Engine) -> None:
    """Say what limits the plans and why `auto` chose as it did; on CUDA, find the limit that flags leave to the device.
    Tell the layers whether they keep gathered inputs.

    Communicates over the world where the device decides. Raises ConfigurationError, on every rank alike, where it has
    too little memory left.
    """
    for line in plans.reasons:
        session.print_rank_0(f" > --pipeline-schedule auto: {line}")
    if plans.asks_device:
        total = session.device.total_bytes()
        if total is None:
            ranks = plans.placement.num_ranks
            session.print_rank_0(
                f" > --zero-bubble-max-pending-backward auto is the number of pipeline ranks on CPU, {ranks}"
            )
        else:
            _limit_by_device(session, plans, engine, total)
    for chunk in engine.chunks:
        if chunk.sink is not None:
            chunk.sink.keeps_gathered = plans.keeps_gathered
    if plans.keeps_gathered:
        session.print_rank_0(" > the limit has room for gathered inputs: kept for W, not gathered again")
    elif session.config.parallel.sequence_parallel and plans.splits_backward and plans.limits is None:
        session.print_rank_0(
            " > W gathers inputs of column layers again: with --pipeline-memory-limit they are kept where it has room"
        )
    if plans.limits is not None:
        unit = "MiB" if plans.estimated else "activations"
        shown = ", ".join(f"{limit / 2**20 if plans.estimated else limit:.1f}" for limit in plans.limits)
        session.print_rank_0(f" > limit of activations by pipeline rank: {shown} {unit}")


def device_limits(told: Sequence[tuple[int, int, int]], percentile: int, num_ranks: int) -> tuple[float, ...]:
    """By pipeline rank, what its fullest device has left. told: of every rank, its pipeline rank, bytes in use, all."""
    left: list[list[float]] = [[] for _ in range(num_ranks)]
    for pp_rank, used, total in told:
        left[pp_rank].append(percentile / 100 * total - used)
    return tuple(max(0.0, min(of_rank)) for of_rank in left)


def _limit_by_device(session: Session, plans: Plans, engine: Engine, total: int) -> None:
    """Once weights and what the optimizer will hold have their memory, or are known."""
    parallel = session.config.parallel
    percentile = parallel.zero_bubble_adaptive_memory_limit_percentile
    used = max(session.device.memory().allocated_bytes, engine.persistent_bytes())
    if parallel.enable_optimizer_post_validation:
        used += engine.optimizer.snapshot_bytes()
    told = [tuple(one) for one in session.gather([session.ps.pp_rank, used, total])]
    plans.limit(device_limits(told, percentile, plans.placement.num_ranks))
    schedule = session.config.batch_schedule()
    try:
        plans.train(schedule.num_microbatches(0))
    except PlanError as error:
        fix = "use fewer layers a rank, smaller microbatches or recomputation, or a higher percentile"
        message = f"{percentile} % of the device's memory leaves too little for activations: {error}"
        raise ConfigurationError([Problem("device-memory", _FLAGS, message, fix)]) from None


def check_snapshot(session: Session, plans: Plans, engine: Engine) -> None:
    """--post-validation-rollback snapshot: whether this machine has room for it beside the activations that the plan
    holds, where these are known. Communicates over the world.

    Raises ConfigurationError, on every rank alike.
    """
    ranks_here = session.env.local_world_size if session.device.kind == "cpu" else 1
    needed = engine.optimizer.snapshot_bytes()
    if needed and plans.estimated:
        row = plans.train(session.config.batch_schedule().num_microbatches(0)).rows[session.ps.pp_rank]
        needed += round(peak_activation(session.ps.pp_rank, row, plans.costs))
    told = session.gather([needed * ranks_here, session.device.free_bytes()])
    for rank, (needed, free) in enumerate(told):
        if free is not None and needed > free:
            message = (
                f"rank {rank}: copies of main weights and moments, to take steps back to, "
                f"{'and the activations of the plan ' if plans.estimated else ''}take {needed / 2**20:.0f} MiB"
                + (f" for the {ranks_here} ranks of its machine" if ranks_here > 1 else "")
                + f", of which {free / 2**20:.0f} MiB are free"
            )
            fix = (
                "give --post-validation-rollback inverse (no copies; approximate: docs/pipelines.md), leave "
                "--enable-optimizer-post-validation out, or shard the optimizer with --use-distributed-optimizer"
            )
            flags = ("--post-validation-rollback", "--enable-optimizer-post-validation")
            raise ConfigurationError([Problem("snapshot-memory", flags, message, fix)])
