"""What a rank may hold of activations where the flags leave it to the device, and what the log says of limits."""

from __future__ import annotations

from megatron.core.pipeline_parallel.plan.costs import peak_activation
from megatron.core.pipeline_parallel.plan.ir import PlanError
from megatron.core.pipeline_parallel.plan.pipeline_summary import bound_lines, device_limits
from megatron.core.pipeline_parallel.plan.spec import PlanPurpose
from megatron.core.words import counted, plain, size_text
from megatron.training.config.problems import ConfigurationError, Problem
from megatron.training.engine import Engine
from megatron.training.planner import Planner
from megatron.training.report.session import Session

_FLAGS = ("--zero-bubble-max-pending-backward", "--zero-bubble-adaptive-memory-limit-percentile")


def settle(session: Session, planner: Planner, engine: Engine) -> None:
    """On CUDA, tell the planner of the limit that flags leave to the device. Says what limits there are and
    why `auto` chose as it did, and tells the layers whether they keep gathered inputs.

    Communicates over the world where the device decides. Raises ConfigurationError, on every rank alike, where it has
    too little memory left.
    """
    config, tell = session.config, session.print_rank_0
    spec, parallel = planner.spec, config.parallel
    candidates, by, under = list(spec.reasons), "--pipeline-schedule auto", ""
    if parallel.rank_memory_limit is not None:
        by, under = f"--rank-memory-limit {parallel.rank_memory_limit}", " under --rank-memory-limit"
        speeds = f"{plain(parallel.achieved_tflops)} TFLOP/s, {plain(parallel.dp_bandwidth_gb_per_s)} GB/s"
        candidates.insert(0, f"planned for {speeds} (--achieved-tflops, --dp-bandwidth-gb-per-s)")
    chosen = f" > plan chosen{under}: {spec.schedule}; every candidate is in the log file"
    tell(*(f" > {by}: {line}" for line in candidates), brief=chosen)
    if planner.model.asks_device(spec):
        total = session.device.total_bytes()
        if total is not None:
            _limit_by_device(session, planner, engine, total)
            spec = planner.spec
        else:
            ranks = f"the number of pipeline ranks on CPU, {spec.placement.num_ranks}"
            tell(f" > --zero-bubble-max-pending-backward auto is {ranks}")
    for chunk in engine.chunks:
        if chunk.sink is not None:
            chunk.sink.keeps_gathered = spec.keeps_gathered
    if spec.keeps_gathered:
        tell(" > the limit has room for gathered inputs: kept for W, not gathered again")
    elif parallel.sequence_parallel and spec.splits_backward and spec.limits is None:
        tell(
            " > W gathers inputs of column layers again: with --pipeline-memory-limit they are kept where it has room"
        )
    if spec.limits is not None:
        shown = ", ".join(map(spec.describe_activation, spec.limits))
        tell(f" > limit of activations by pipeline rank: {shown}{'' if spec.estimated else ' activations'}")
    if (told := bound_lines(spec, config.batch_schedule().num_microbatches(0))) is not None:
        tell(told[0], brief=told[1])


def _limit_by_device(session: Session, planner: Planner, engine: Engine, total: int) -> None:
    """Once weights and what the optimizer will hold have their memory, or are known."""
    parallel = session.config.parallel
    percentile = parallel.zero_bubble_adaptive_memory_limit_percentile
    used = max(session.device.memory().allocated_bytes, engine.persistent_bytes())
    if parallel.enable_optimizer_post_validation:
        used += engine.optimizer.snapshot_bytes()
    told = [tuple(one) for one in session.gather([session.ps.pp_rank, used, total])]
    if session.ps.is_fake:
        session.print_rank_0(" > devices of other pipeline ranks are taken to be as full as this one")
        told = [(rank, used, total) for rank in range(session.ps.pp_size)]
    planner.limit_activations(device_limits(told, percentile, planner.spec.placement.num_ranks))
    try:
        planner.plan(session.config.batch_schedule().num_microbatches(0), PlanPurpose.TRAIN)
    except PlanError as error:
        fix = "use fewer layers a rank, smaller microbatches or recomputation, or a higher percentile"
        message = f"{percentile} % of the device's memory leaves too little for activations: {error}"
        raise ConfigurationError([Problem("device-memory", _FLAGS, message, fix)]) from None


def check_validated(session: Session, planner: Planner, engine: Engine) -> None:
    """--enable-optimizer-post-validation: whether this machine has room for what a step leaves until it is decided on,
    beside the activations that the plan holds, where these are known. Communicates over the world.

    Raises ConfigurationError, on every rank alike.
    """
    ranks_here = session.env.local_world_size if session.device.kind == "cpu" else 1
    spec, copies, grads = planner.spec, engine.optimizer.snapshot_bytes(), engine.model.resting_grad_bytes()
    parts = engine.optimizer.step_bytes(
        count_zero_grads=session.config.logging.log_num_zeros_in_grad, snapshot=True
    )
    taken = max(sum(part.values()) - part.get("snapshot", 0) for part in parts.values())
    needed = copies + grads + taken * bool(copies + grads)
    if needed and spec.estimated:
        plan = planner.plan(session.config.batch_schedule().num_microbatches(0), PlanPurpose.TRAIN)
        pp_rank = session.ps.pp_rank
        needed += round(peak_activation(pp_rank, plan.rows[pp_rank], spec.costs))
    told = session.gather([needed * ranks_here, copies, grads, taken, session.device.free_bytes()])
    for rank, (needed, copies, grads, taken, free) in enumerate(told):
        if free is not None and needed > free:
            kept = [
                f"copies of main weights and moments, to take steps back to ({size_text(copies)})"
            ] * bool(copies)
            kept += [f"gradients until they are decided on ({size_text(grads)})"] * bool(grads)
            kept += [f"what the optimizer's step takes ({size_text(taken)})"]
            kept += ["the activations of the plan"] * spec.estimated
            message = (
                f"rank {rank}: {', '.join(kept)} take {size_text(needed)}"
                + (f" for the {counted(ranks_here, 'rank')} of its machine" if ranks_here > 1 else "")
                + f", of which {size_text(free)} are free"
            )
            fix = (
                "give --post-validation-rollback inverse (no copies; approximate: docs/pipelines.md), leave "
                "--enable-optimizer-post-validation out, or shard the optimizer with --use-distributed-optimizer"
            )
            flags = ("--post-validation-rollback", "--enable-optimizer-post-validation")
            raise ConfigurationError([Problem("snapshot-memory", flags, message, fix)])
