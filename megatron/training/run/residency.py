"""What data parallelism holds and moves in the steps of a run: planned at start-up, measured every log interval."""

from __future__ import annotations

import dataclasses

from megatron.core.distributed.plan_inputs import measured_moves
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.planned_residency import (
    HeldBytes,
    StepMoves,
    StepResidency,
    at_once_lines,
    planned_residency,
    start_up_lines,
)
from megatron.core.pipeline_parallel.plan.spec import PlanPurpose
from megatron.training.engine import Engine
from megatron.training.report.session import Session
from megatron.training.run.pipeline import PipelineRunner


class ResidencyReport:
    """One on every rank. The fullest pipeline rank by plan is the one that is told of. What the engine holds at rest is
    taken when this is made."""

    def __init__(self, session: Session, runner: PipelineRunner, engine: Engine) -> None:
        self._session, self._runner, self._engine = session, runner, engine
        validated = session.config.parallel.enable_optimizer_post_validation
        self._purpose = PlanPurpose.TRAIN_AND_STEP if validated else PlanPurpose.TRAIN
        told = session.gather([session.ps.pp_rank, engine.persistent_bytes()])
        ranks = range(session.ps.pp_size)
        self._at_rest = tuple(max(size for rank, size in told if rank == pp_rank) for pp_rank in ranks)

    def lines(self, num_microbatches: int) -> list[str]:
        """At start-up; none where data parallelism moves nothing."""
        spec = self._runner.spec
        if spec.residency is None:
            return []
        told = planned_residency(spec, num_microbatches, self._purpose, self._at_rest)
        lines = start_up_lines(spec.schedule, spec.residency, *told)
        return lines + at_once_lines(spec, num_microbatches, self._purpose)

    def after_step(
        self, iteration: int, num_microbatches: int, costs: CostModel | None
    ) -> StepResidency | None:
        """Of a log interval's last iteration. costs: as measured, None so far. Communicates over the world then."""
        spec, session = self._runner.spec, self._session
        if spec.residency is None or iteration % session.config.logging.log_interval:
            return None
        rank, planned, planned_moves = planned_residency(
            spec, num_microbatches, self._purpose, self._at_rest, costs, self._runner.wire
        )
        tracker = self._engine.memory_tracker
        gradients = tracker.peak("grads") + tracker.peak("extra")
        held = HeldBytes(self._engine.persistent_bytes(), tracker.peak("gathered"), gradients, None)
        tracker.reset_peaks()
        assert self._runner.wire is not None, "a residency without a wire"
        moves = measured_moves(self._engine.model, self._runner.wire, self._runner.step_s)
        own = [dataclasses.asdict(one) for one in (held, moves)]
        told = session.gather([session.ps.pp_rank, *own])
        mine = [(HeldBytes(**held), StepMoves(**moves)) for of, held, moves in told if of == rank]
        measured, _ = max(mine, key=lambda one: one[0].total)
        _, moves = max(mine, key=lambda one: one[1].exposed_share or 0.0)  # the one that has waited longest
        return StepResidency(iteration, rank, planned, measured, planned_moves, moves)
