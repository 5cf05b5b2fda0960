"""What the run says: Megatron's lines on the last rank, scalars to every writer, progress to a terminal."""

from __future__ import annotations

import datetime
import time
from collections.abc import Mapping
from typing import Any

from megatron.training import metrics
from megatron.training.build import Engine
from megatron.training.flops import train_step_flops
from megatron.training.session import Session
from megatron.training.state import TrainState
from megatron.training.step import StepResult
from megatron.training.writers import Writers, open_writers


class Reporter:
    """Collects an interval's numbers and prints them at its end. Every rank has one; the last rank speaks."""

    def __init__(self, session: Session, engine: Engine, state: TrainState) -> None:
        self._session = session
        self._engine = engine
        self._state = state
        self._log = session.config.logging
        self._totals = metrics.IntervalTotals()
        self._first_iteration = state.iteration + 1
        self._interval_started = time.monotonic()
        self._flops = 0.0
        self._memory_told = False
        self.writers: Writers = open_writers(
            session.config, enabled=session.ps.is_last_rank, resumed_iteration=state.iteration
        )

    def step_done(self, result: StepResult, *, batch_size: int) -> None:
        """Count one finished iteration, and print its line if it is time. Communicates when timers are on."""
        config, state = self._session.config, self._state
        tokens = batch_size * config.model.seq_length
        self._totals.add_iteration(result.losses, skipped=result.skipped, tokens=tokens)
        self._flops += train_step_flops(config, batch_size)
        if result.note:
            self._session.print_rank_last(f" iteration {state.iteration}: {result.note}")
        if metrics.should_log(
            state.iteration, self._log.log_interval, first_iteration_of_run=self._first_iteration
        ):
            self._interval_done(result, batch_size)

    def _interval_done(self, result: StepResult, batch_size: int) -> None:
        elapsed_s = time.monotonic() - self._interval_started
        record = self._record(result, batch_size, elapsed_s)
        tokens_per_s = self._totals.tokens / elapsed_s if elapsed_s > 0 else 0.0
        self._session.print_rank_last(metrics.iteration_line(record))
        scalars = metrics.iteration_scalars(record, tokens_per_s=tokens_per_s)
        self._report_timers()
        self._report_memory(scalars)
        self.writers.record(scalars, step=record.iteration, samples=record.consumed_samples)
        self.writers.progress(record, tokens_per_s=tokens_per_s)
        self.start_interval()

    def _record(self, result: StepResult, batch_size: int, elapsed_s: float) -> metrics.IterationRecord:
        engine, state, totals = self._engine, self._state, self._totals
        per_iteration_s = elapsed_s / max(totals.iterations, 1)
        tflops = self._flops / (elapsed_s * self._session.ps.world_size * 1e12) if elapsed_s > 0 else 0.0
        config = self._session.config
        return metrics.IterationRecord(
            iteration=state.iteration,
            train_iters=state.train_iters,
            consumed_samples=state.consumed_train_samples,
            skipped_samples=state.skipped_train_samples,
            elapsed_s=per_iteration_s,
            learning_rate=engine.scheduler.lr,
            decoupled_learning_rate=engine.scheduler.decoupled_lr,
            global_batch_size=batch_size,
            losses=totals.losses(),
            loss_scale=result.loss_scale,
            grad_norm=result.grad_norm,
            num_zeros=result.num_zeros,
            params_norm=engine.optimizer.params_norm() if self._log.log_params_norm else None,
            throughput_tflops=tflops if config.logging.log_throughput else None,
            skipped_iterations=totals.skipped_iterations,
            nan_iterations=totals.nan_iterations,
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

    def _report_memory(self, scalars: dict[str, float]) -> None:
        figures = self._session.device.memory()
        if self._log.log_memory_to_tensorboard:
            scalars.update(metrics.memory_scalars(figures))
        if not self._memory_told and self._state.iteration > self._first_iteration:
            print(metrics.memory_line(self._session.ps.rank, self._state.iteration, figures), flush=True)
            self._memory_told = True

    def start_interval(self) -> None:
        """Forget the interval: after its line, and after a pause for evaluation or saving."""
        self._totals.reset()
        self._flops = 0.0
        self._interval_started = time.monotonic()

    def pause(self) -> float:
        """Seconds of the interval so far; give them to `resume` when training goes on."""
        return time.monotonic() - self._interval_started

    def resume(self, elapsed_s: float) -> None:
        """Go on with an interval that `pause` left, so that its iterations carry their own time only."""
        self._interval_started = time.monotonic() - elapsed_s

    def evaluated(self, where: str, losses: Mapping[str, float], set_name: str) -> None:
        """Print and record one evaluation."""
        for line in metrics.validation_lines(where, losses, set_name=set_name):
            self._session.print_rank_last(line)
        scalars: dict[str, Any] = metrics.validation_scalars(losses, set_name=set_name)
        if not self._log.log_validation_ppl_to_tensorboard:
            scalars = {tag: value for tag, value in scalars.items() if not tag.endswith(" ppl")}
        self.writers.record(scalars, step=self._state.iteration, samples=self._state.consumed_train_samples)

    def saved(self, directory: str) -> None:
        """A checkpoint was committed."""
        self.writers.checkpoint_saved(self._state.iteration, directory)

    def close(self) -> None:
        self.writers.close()
