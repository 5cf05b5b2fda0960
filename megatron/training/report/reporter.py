"""What the run says: Megatron's lines on the last rank, scalars to every writer, progress to a terminal."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core.pipeline_parallel.plan.measured_lines import Bubbles, MeasuredPlan
from megatron.core.pipeline_parallel.plan.residency_lines import StepResidency
from megatron.training.config.flops import train_step_flops
from megatron.training.guard.console import lost_output, say
from megatron.training.guard.exit_status import ExitStatus
from megatron.training.report import metrics
from megatron.training.report.run_clock import RunClock
from megatron.training.report.writers import Writers, append_progress, open_writers
from megatron.training.run.build import Engine
from megatron.training.run.session import Session
from megatron.training.run.state import TrainState
from megatron.training.run.step import StepResult


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
        self._session = session
        self._engine = engine
        self._state = state
        self._log = session.config.logging
        self._totals = metrics.IntervalTotals()  # since the last line
        self._unrecorded = metrics.IntervalTotals()  # since the last record
        self._first_iteration = state.iteration + 1
        self._clock = clock
        self._interval_started = clock.now()
        self._flops = 0.0
        self._memory_told = False
        self._lost_told: set[tuple[int, str]] = set()  # rank, stream
        self._scalars: dict[str, float] = {}  # of plans and their measurement, that no record has had yet
        assert session.folder.path is not None, "a run without a folder"
        self.writers: Writers = open_writers(
            session.config,
            session.folder.path,
            enabled=session.ps.is_last_rank,
            resumed_iteration=state.iteration,
        )
        self._progress_line("Starting job")

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
        config, state = self._session.config, self._state
        tokens = batch_size * config.model.seq_length
        for totals in (self._totals, self._unrecorded):
            totals.add_iteration(
                result.losses, skipped=result.skipped, tokens=tokens, rolled_back=result.rolled_back
            )
        self._flops += train_step_flops(config, batch_size)
        if result.note:
            self._session.print_rank_last(f" iteration {state.iteration}: {result.note}")
        due, extra = self._is_printed(state.iteration)
        measured = [one for one in (bubbles, residency) if one is not None]
        for one in measured:
            self._scalars.update(one.scalars())
        if self.is_due(state.iteration):
            self._report(result, batch_size, printed=due or extra)
        for line in (line for one in measured for line in one.lines()):
            self._session.print_rank_last(line)
        if due:
            self._report_timers()
            self._report_memory()
            self._start_interval(result.ended_at)
        self.writers.iteration_done(state.iteration)
        self._tell_lost(self._session.ps.rank, lost_output())

    def is_due(self, iteration: int) -> bool:
        """Whether an iteration has a line or a record."""
        return any(self._is_printed(iteration)) or iteration % self._log.tensorboard_log_interval == 0

    def _is_printed(self, iteration: int) -> tuple[bool, bool]:
        """Whether an interval ends there, and whether it is the run's first."""
        return iteration % self._log.log_interval == 0, iteration == self._first_iteration

    def batch_skipped(self, why: str) -> None:
        """An iteration without a step."""
        self._session.print_rank_last(f" iteration {self._state.iteration}: {why}")
        self.writers.iteration_done(self._state.iteration)

    def _report(self, result: StepResult, batch_size: int, *, printed: bool) -> None:
        """One iteration's line, and its record.

        The line is the mean over --log-interval, the record the mean over --tensorboard-log-interval.
        """
        norm = self._engine.optimizer.params_norm() if self._log.log_params_norm else None
        elapsed_s = result.ended_at - self._interval_started
        line = self._line(result, batch_size, elapsed_s, norm)
        tokens_per_s = self._totals.tokens / elapsed_s if elapsed_s > 0 else 0.0
        if printed:
            self._session.print_rank_last(metrics.iteration_line(line))
            self.writers.progress(line, tokens_per_s=tokens_per_s)
        if line.iteration % self._log.tensorboard_log_interval == 0:
            record = dataclasses.replace(
                line,
                losses=self._unrecorded.losses(),
                skipped_iterations=self._unrecorded.skipped_iterations,
                nan_iterations=self._unrecorded.nan_iterations,
                rollbacks=None if line.rollbacks is None else self._unrecorded.rollbacks,
            )
            scalars = metrics.iteration_scalars(record, tokens_per_s=tokens_per_s)
            if self._log.log_memory_to_tensorboard:
                scalars.update(metrics.memory_scalars(self._session.device.memory()))
            scalars.update(self._scalars)
            self._scalars = {}
            self.writers.record(scalars, step=record.iteration, samples=record.consumed_samples)
            self._unrecorded.reset()

    def _line(
        self, result: StepResult, batch_size: int, elapsed_s: float, params_norm: float | None
    ) -> metrics.IterationRecord:
        state, totals = self._state, self._totals
        validated = self._session.config.parallel.enable_optimizer_post_validation
        tflops = self._flops / (elapsed_s * self._session.ps.world_size * 1e12) if elapsed_s > 0 else 0.0
        return metrics.IterationRecord(
            iteration=state.iteration,
            train_iters=state.train_iters,
            consumed_samples=state.consumed_train_samples,
            skipped_samples=state.skipped_train_samples,
            elapsed_s=elapsed_s / max(totals.iterations, 1),
            learning_rate=result.learning_rate,
            decoupled_learning_rate=result.decoupled_learning_rate,
            global_batch_size=batch_size,
            losses=totals.losses(),
            loss_scale=result.loss_scale,
            grad_norm=result.grad_norm,
            num_zeros=result.num_zeros,
            params_norm=params_norm,
            throughput_tflops=tflops if self._log.log_throughput else None,
            skipped_iterations=totals.skipped_iterations,
            nan_iterations=totals.nan_iterations,
            rollbacks=totals.rollbacks if validated else None,
            when=datetime.datetime.now(),
        )

    def _report_timers(self) -> None:
        """Gather the timers of all ranks and print the block of the phases."""
        timers, iterations = self._session.timers, max(self._totals.iterations, 1)
        if timers.log_level == 0:
            return  # nothing is timed, so there is nothing to gather
        if self._log.log_timers_to_tensorboard:
            timers.write(
                None, self.writers, self._state.iteration,
                gather=self._session.gather, normalizer=iterations, reset=False,
            )  # fmt: skip
        if block := timers.log(gather=self._session.gather, normalizer=iterations):
            self._session.print_rank_last(block)

    def _report_memory(self) -> None:
        """Each rank's memory, once: at the first line after the first iteration, when all of it is in use."""
        if not self._memory_told and self._state.iteration > self._first_iteration:
            figures = self._session.device.memory()
            say(metrics.memory_line(self._session.ps.rank, self._state.iteration, figures))
            self._memory_told = True

    def start_interval(self) -> None:
        """The first interval of the run begins."""
        self._start_interval(self._clock.now())

    def _start_interval(self, now: float) -> None:
        self._totals.reset()
        self._flops = 0.0
        self._interval_started = now

    def evaluated(self, where: str, found: Evaluated) -> None:
        """Print and record one evaluation."""
        for line in metrics.validation_lines(
            where, found.losses, set_name=found.set_name, samples=found.samples
        ):
            self._session.print_rank_last(line)
        scalars: dict[str, Any] = metrics.validation_scalars(
            found.losses, set_name=found.set_name, split=found.split
        )
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
        save = self._session.config.checkpoint.save
        if self._log.log_progress and save is not None and self._session.ps.is_last_rank:
            state = self._state
            append_progress(
                save,
                event,
                job_id=self._session.env.slurm_job_id or "",
                world_size=self._session.ps.world_size,
                iteration=state.iteration,
                consumed_samples=state.consumed_train_samples,
                flops=state.num_floating_point_operations_so_far,
            )

    def close(self) -> None:
        self.writers.close()
