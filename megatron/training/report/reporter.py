"""What the run says: Megatron's lines on the last rank, scalars to every writer, progress to a terminal."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core.pipeline_parallel.plan.measuring.measured_lines import Bubbles, MeasuredPlan
from megatron.core.pipeline_parallel.plan.planned_residency import StepResidency
from megatron.training.config.config import train_step_flops
from megatron.training.engine import Engine
from megatron.training.guard.console import lost_output, say
from megatron.training.guard.exit_status import ExitStatus
from megatron.training.report import metrics
from megatron.training.report.session import Session
from megatron.training.report.timers import RunClock
from megatron.training.report.writers import append_progress, open_writers
from megatron.training.state import StepResult, TrainState


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """Losses on held-out data. split: "validation", "test". set_name: "" where there is one set. samples: which of it,
    in words."""

    split: str
    set_name: str
    losses: Mapping[str, float]
    samples: str


class Reporter:
    """Collects an interval's numbers and prints them at its end. Every rank has one; the last rank speaks."""

    def __init__(self, session: Session, engine: Engine, state: TrainState, clock: RunClock) -> None:
        self._session, self._engine, self._state, self._clock = session, engine, state, clock
        self._log = session.config.logging
        self._totals = metrics.IntervalTotals()  # since the last line
        self._unrecorded = metrics.IntervalTotals()  # since the last record
        self._first_iteration = state.iteration + 1
        self._memory_said = False
        self._lost_told: set[tuple[int, str]] = set()  # rank, stream
        self._scalars: dict[str, float] = {}  # of plans and their measurement, that no record has had yet
        self.start_interval()
        assert session.folder.path is not None, "a run without a folder"
        self.writers = open_writers(
            session.config,
            session.folder.path,
            enabled=session.ps.is_last_rank,
            resumed_iteration=state.iteration,
        )
        self._progress_line("Starting job")

    def start_interval(self, now: float | None = None) -> None:
        """An interval begins, now or then by the run's clock."""
        self._totals.reset()
        self._flops = 0.0
        self._interval_started = self._clock.now() if now is None else now

    def step_done(
        self,
        result: StepResult,
        *,
        batch_size: int,
        bubbles: Bubbles | None = None,
        residency: StepResidency | None = None,
    ) -> None:
        """Count one finished iteration, and print its line if it is time. Communicates when timers are on.

        The extra line after a run's first iteration is a look at an interval that goes on: nothing is reset.
        """
        session, iteration = self._session, self._state.iteration
        tokens = batch_size * session.config.model.seq_length
        for totals in (self._totals, self._unrecorded):
            totals.add_iteration(
                result.losses, skipped=result.skipped, tokens=tokens, rolled_back=result.rolled_back
            )
        self._flops += train_step_flops(session.config, batch_size)
        if result.note:
            session.print_rank_last(f" iteration {iteration}: {result.note}")
        measured = [one for one in (bubbles, residency) if one is not None]
        for one in measured:
            self._scalars.update(one.scalars())
        if self.is_due(iteration):
            self._report(result, batch_size)
        for line in (line for one in measured for line in one.lines()):
            session.print_rank_last(line)
        if self._ends_interval(iteration):
            self._report_timers()
            if not self._memory_said and iteration > self._first_iteration:  # when all of it is in use
                self._memory_said = True
                say(metrics.memory_line(session.ps.rank, iteration, session.device.memory()))
            self.start_interval(result.ended_at)
        self.writers.iteration_done(iteration)
        self._tell_lost(session.ps.rank, lost_output())

    def is_due(self, iteration: int) -> bool:
        """Whether an iteration has a line or a record."""
        return self._has_line(iteration) or iteration % self._log.tensorboard_log_interval == 0

    def _ends_interval(self, iteration: int) -> bool:
        return iteration % self._log.log_interval == 0

    def _has_line(self, iteration: int) -> bool:
        return self._ends_interval(iteration) or iteration == self._first_iteration

    def batch_skipped(self, why: str) -> None:
        """An iteration without a step."""
        self._session.print_rank_last(f" iteration {self._state.iteration}: {why}")
        self.writers.iteration_done(self._state.iteration)

    def _report(self, result: StepResult, batch_size: int) -> None:
        """One iteration's line, and its record.

        The line is the mean over --log-interval, the record the mean over --tensorboard-log-interval.
        """
        line = self._line(result, batch_size)
        if self._has_line(line.iteration):
            self._session.print_rank_last(metrics.iteration_line(line))
            self.writers.progress(line)
        if line.iteration % self._log.tensorboard_log_interval == 0:
            record = dataclasses.replace(line, **self._counted(self._unrecorded))
            scalars = metrics.iteration_scalars(record)
            if self._log.log_memory_to_tensorboard:
                scalars.update(metrics.memory_scalars(self._session.device.memory()))
            self.writers.record(
                {**scalars, **self._scalars}, step=record.iteration, samples=record.consumed_samples
            )
            self._scalars = {}
            self._unrecorded.reset()

    def _line(self, result: StepResult, batch_size: int) -> metrics.IterationRecord:
        state, totals, log = self._state, self._totals, self._log
        elapsed_s = result.ended_at - self._interval_started
        device_s = elapsed_s * self._session.ps.world_size * 1e12  # for TFLOP/s of one device
        return metrics.IterationRecord(
            iteration=state.iteration,
            train_iters=state.train_iters,
            consumed_samples=state.consumed_train_samples,
            skipped_samples=state.skipped_train_samples or None,
            elapsed_s=elapsed_s / max(totals.iterations, 1),
            learning_rate=result.learning_rate,
            decoupled_learning_rate=result.decoupled_learning_rate,
            global_batch_size=batch_size,
            loss_scale=result.loss_scale,
            grad_norm=result.grad_norm,
            num_zeros=result.num_zeros,
            params_norm=self._engine.optimizer.params_norm() if log.log_params_norm else None,
            throughput_tflops=_rate(self._flops, device_s) if log.log_throughput else None,
            tokens_per_s=_rate(totals.tokens, elapsed_s),
            when=datetime.datetime.now(),
            **self._counted(totals),
        )

    def _counted(self, totals: metrics.IntervalTotals) -> dict[str, Any]:
        validated = self._session.config.parallel.enable_optimizer_post_validation
        return {
            "losses": totals.losses(),
            "skipped_iterations": totals.skipped_iterations,
            "nan_iterations": totals.nan_iterations,
            "rollbacks": totals.rollbacks if validated else None,
        }

    def _report_timers(self) -> None:
        """Gather the timers of all ranks and print the block of the phases."""
        session, iterations = self._session, max(self._totals.iterations, 1)
        timers, gather = session.timers, session.gather
        if timers.log_level == 0:
            return  # nothing is timed, so there is nothing to gather
        if self._log.log_timers_to_tensorboard:
            step = self._state.iteration
            timers.write(None, self.writers, step, gather=gather, normalizer=iterations, reset=False)
        if block := timers.log(gather=gather, normalizer=iterations):
            session.print_rank_last(block)

    def evaluated(self, where: str, found: Evaluated) -> None:
        """Print and record one evaluation."""
        name, losses = found.set_name, found.losses
        for line in metrics.validation_lines(where, losses, set_name=name, samples=found.samples):
            self._session.print_rank_last(line)
        scalars = metrics.validation_scalars(losses, set_name=name, split=found.split)
        if not self._log.log_validation_ppl_to_tensorboard:
            scalars = {tag: value for tag, value in scalars.items() if not tag.endswith(" ppl")}
        self.writers.record(scalars, step=self._state.iteration, samples=self._state.consumed_train_samples)

    def saved(self, iteration: int, directory: str) -> None:
        """The checkpoint of `iteration` was committed."""
        self.writers.checkpoint_saved(iteration, directory)
        self._progress_line(f"Saved checkpoint\t{directory}")

    def planned_again(self, plan: MeasuredPlan) -> None:
        """The pipeline's schedule was solved again."""
        self._session.print_rank_last(plan.line())
        fields = dataclasses.asdict(plan)
        self.writers.event("plan", fields.pop("iteration"), **fields)

    def _tell_lost(self, rank: int, lost: Sequence[str]) -> None:
        """What could not be printed, once: nobody reads it on the console."""
        for stream in lost:
            if (rank, stream) not in self._lost_told:
                self._lost_told.add((rank, stream))
                self.writers.event("console", self._state.iteration, rank=rank, lost=stream)

    def ended(self, status: ExitStatus, reason: str, *, lost: Sequence[Sequence[str]]) -> None:
        """The run is over, in good order. lost: of each rank, `console.lost_output`."""
        for rank, streams in enumerate(lost):
            self._tell_lost(rank, streams)
        self.writers.event("exit", self._state.iteration, status=int(status), reason=reason)

    def _progress_line(self, event: str) -> None:
        """--log-progress, on one rank."""
        session, state = self._session, self._state
        if self._log.log_progress and session.config.checkpoint.save and session.ps.is_last_rank:
            job, ranks = session.env.slurm_job_id or "", session.ps.world_size
            append_progress(session.config.checkpoint.save, event, job_id=job, world_size=ranks, state=state)

    def close(self) -> None:
        self.writers.close()


def _rate(amount: float, elapsed_s: float) -> float:
    return amount / elapsed_s if elapsed_s > 0 else 0.0
