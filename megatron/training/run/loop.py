"""The loop: iterations, and what happens between them: evaluation, checkpoints, and the decision to stop."""

from __future__ import annotations

import dataclasses
import datetime
import gc
import time

from megatron.training import global_vars
from megatron.training.config.config import train_step_flops
from megatron.training.config.microbatches import ends_at
from megatron.training.engine import Engine
from megatron.training.guard.console import lost_output
from megatron.training.guard.exit_status import ExitStatus, TrainingExit
from megatron.training.guard.nan_policy import NanPolicy, NonFiniteError
from megatron.training.guard.signals import SignalHandler
from megatron.training.guard.weight_check import NonFiniteWeightsError, check_replicas
from megatron.training.report import metrics
from megatron.training.report.reporter import Reporter, log_memory, report_model
from megatron.training.report.session import Session
from megatron.training.report.step_metrics import StepMetrics
from megatron.training.report.timers import RunClock
from megatron.training.run.data import DataIterators, DatasetsProvider, build_data_iterators
from megatron.training.run.evaluate import Evaluator, first_validation_sample
from megatron.training.run.pipeline import PipelineRunner
from megatron.training.run.replan import Replanner
from megatron.training.run.residency import ResidencyReport
from megatron.training.run.run_checkpoints import RunCheckpoints
from megatron.training.run.step import StepRunner, Steps
from megatron.training.run.validated_step import ValidatedStepRunner
from megatron.training.state import StepResult, StepTask, TrainState

NO_FLAGS = (0.0, 0.0)  # nobody wants to stop


@dataclasses.dataclass(frozen=True)
class Ending:
    """Why the loop stopped."""

    status: ExitStatus
    reason: str


class TrainingLoop:
    """Iterations, and what happens between them: evaluation, checkpoints, and the decision to stop."""

    def __init__(
        self, session: Session, signals: SignalHandler, engine: Engine, runner: PipelineRunner
    ) -> None:
        config = self._config = session.config
        self.session, self.engine, self.state = session, engine, TrainState.start(config)
        self._signals, self._runner, self._batch = signals, runner, config.batch_schedule()
        policy = NanPolicy(
            config.reliability.nan_policy,
            config.reliability.nan_max_skips,
            dynamic_loss_scale=engine.scaler.dynamic,
        )
        self.checkpoints = RunCheckpoints(session, engine, self.state, policy, runner)
        self._clock = RunClock()
        common = config, session.ps, engine, runner, policy
        steps = StepRunner(*common, session.timers, session.watchdog, self._clock)
        self._steps: Steps = steps
        if config.parallel.enable_optimizer_post_validation:
            self._steps = ValidatedStepRunner(*common, steps, self._clock, self._begins)
        self._memory_logged = False
        self._begun_at = 0  # samples consumed before the newest step
        global_vars.provide(
            num_microbatches=lambda: self._batch.num_microbatches(self._begun_at),
            global_batch_size=lambda: self._batch.global_batch_size(self._begun_at),
        )

    def run(self, datasets_provider: DatasetsProvider) -> Ending:
        """Load, train, evaluate, save. Raises what STATUS_TABLE lists, and TrainingExit."""
        session, skip_train = self.session, self._config.evaluation.skip_train
        data = self._start(datasets_provider)
        evaluator = Evaluator(session, self._runner, self._reporter, self._clock, self.state, data)
        try:
            ending = None if skip_train else self._train(data, evaluator)
            if ending is None:
                evaluator.at_end()
                ending = Ending(ExitStatus.DONE, "evaluated" if skip_train else "trained to the end")
            self.checkpoints.finish(blocking=True)
            self._reporter.ended(ending.status, ending.reason, lost=session.gather(lost_output()))
            return ending
        except (TrainingExit, NonFiniteWeightsError):  # on all ranks alike
            self.checkpoints.finish(blocking=True)  # one of before is good, and may still be being written
            raise
        finally:
            self._reporter.close()

    def _start(self, datasets_provider: DatasetsProvider) -> DataIterators:
        """What the log says of a run first; then its checkpoint, data, and who reports."""
        session, config, state = self.session, self._config, self.state
        num_microbatches = self._batch.num_microbatches(state.consumed_train_samples)
        report_model(session, self._runner.spec, self.engine, num_microbatches)
        self._residency = ResidencyReport(session, self._runner, self.engine)
        session.print_rank_last(*self._residency.lines(num_microbatches))
        self.checkpoints.load()
        self._begun_at = state.consumed_train_samples
        state.consumed_valid_samples = first_validation_sample(state, config)
        with session.watchdog.phase("build data"):
            reads = self._runner.spec.reads_data(session.ps.pp_rank)
            data = build_data_iterators(session, datasets_provider, state, reads=reads)
        if not config.evaluation.skip_train:
            self.checkpoints.compare_data(data)
        self._reporter = self.checkpoints.reporter = Reporter(session, self.engine, state, self._clock)
        first = state.iteration + 1
        self._replanner = Replanner(session, self._runner, self.engine, self._reporter, self._clock, first)
        handle = self._reporter.writers.handle
        global_vars.provide(tensorboard_writer=handle("TensorBoard"), wandb_writer=handle("wandb"))
        return data

    # --- the loop

    def _train(self, data: DataIterators, evaluator: Evaluator) -> Ending | None:
        """Iterate to the end of the run (None) or to a reason to stop earlier."""
        session, state = self.session, self.state
        if state.finished:
            session.print_rank_0(
                f"nothing to train: iteration {state.iteration} of {state.train_iters} is done"
            )
            return None
        now = datetime.datetime.now()
        session.print_rank_0("training ...", metrics.datetime_line("before the start of training step", now))
        if self._config.training.manual_gc:
            gc.disable()
            gc.collect()
        self._reporter.start_interval()
        while not state.finished:
            flags = self._iteration(data, evaluator)
            self.checkpoints.finish()
            if self._steps.num_undecided:
                continue  # nothing is due, and the step before has been seen to
            evaluator.if_due()
            ending = self._ending(flags)
            last = ending is not None or state.finished
            if self.checkpoints.is_due(state.iteration, last=last):
                with self._clock.paused():
                    self.checkpoints.save(wait=last)
            if ending is not None:
                return ending
        return None

    def _iteration(self, data: DataIterators, evaluator: Evaluator) -> tuple[float, ...]:
        """One step; returns the flags (signal, duration) summed over ranks, of the last step that is decided on."""
        steps, training = self._steps, self._config.training
        number = self.state.iteration + steps.num_undecided + 1
        self._begins(number)
        num_microbatches = self._batch.num_microbatches(self._begun_at)
        if number in training.iterations_to_skip:
            self._skip_batch(data, number, num_microbatches)
            # No step's reduction carries the flags: they are summed by themselves.
            return StepMetrics(self.session.device.torch_device).reduce(self.session.ps, self._flags()).flags
        flags: tuple[float, ...] = NO_FLAGS
        try:
            for result in steps.step(data.train, StepTask(number, num_microbatches, self._flags())):
                flags = self._step_done(result)
            if steps.num_undecided and self._has_to_be_decided(number, evaluator):
                for result in steps.settle(data.train):
                    flags = self._step_done(result)
        except NonFiniteError as error:
            if error.verdict.save_first and self._config.checkpoint.save is not None:
                self.checkpoints.save()
            raise TrainingExit(error.status, str(error)) from error
        if training.manual_gc and ends_at(number, training.manual_gc_interval):
            gc.collect()
        return flags

    def _has_to_be_decided(self, number: int, evaluator: Evaluator) -> bool:
        """Whether something behind this iteration needs the weights as they will stay."""
        config = self._config
        return (
            number >= self.state.train_iters
            or evaluator.is_due(number)
            or self.checkpoints.is_due(number)
            or ends_at(number, config.training.exit_interval)
            or ends_at(number, config.ddp.check_weight_hash_across_dp_replicas_interval)
            or number + 1 in config.training.iterations_to_skip
            or (config.logging.log_params_norm and self._reporter.is_due(number))
        )

    def _step_done(self, result: StepResult) -> tuple[float, ...]:
        """A step is decided on: count it, and report it. Returns the flags."""
        state, session = self.state, self.session
        number, num_microbatches = result.task.iteration, result.task.num_microbatches
        assert number == state.iteration + 1, f"iteration {number} after {state.iteration}"
        if ends_at(number, self._config.ddp.check_weight_hash_across_dp_replicas_interval):
            check_replicas(self.engine, session.ps, number)
        if not self._memory_logged:
            self._memory_logged = True
            log_memory(session, self.engine, f"after iteration {number}")
        batch_size = self._count_batch(number)
        state.num_floating_point_operations_so_far += train_step_flops(self._config, batch_size)
        bubbles = self._replanner.after_step(number, num_microbatches)
        residency = self._residency.after_step(number, num_microbatches, self._replanner.costs)
        self._reporter.step_done(result, batch_size=batch_size, bubbles=bubbles, residency=residency)
        self._replanner.between_steps(number, num_microbatches)
        return result.flags

    def _skip_batch(self, data: DataIterators, number: int, num_microbatches: int) -> None:
        """--iterations-to-skip: draw the batch, train on nothing."""
        data.train.begin_step()
        data.train.microbatch(num_microbatches - 1)
        self.state.skipped_train_samples += self._count_batch(number)
        self._reporter.batch_skipped("batch skipped (--iterations-to-skip)")

    def _count_batch(self, number: int) -> int:
        """Iteration `number` is over: its samples are consumed. Returns how many."""
        batch_size = self._batch.global_batch_size(self.state.consumed_train_samples)
        self.state.iteration = number
        self.state.consumed_train_samples += batch_size
        return batch_size

    def _begins(self, number: int) -> None:
        """A step runs now, perhaps once more. Tells the watchdog and user code: get_args().curr_iteration and its like
        count what has run before it."""
        self._begun_at = self.state.consumed_train_samples
        if self._steps.num_undecided:
            # It took a batch as large as they are now: with a batch that grows, sizes change between decisions.
            self._begun_at += self._batch.global_batch_size(self._begun_at)
        self.session.watchdog.step(number)
        global_vars.set_progress(
            iteration=number - 1,
            curr_iteration=number - 1,
            consumed_train_samples=self._begun_at,
            consumed_valid_samples=self.state.consumed_valid_samples,
        )

    def _flags(self) -> tuple[float, ...]:
        """What this rank wants the others to know: it heard a signal, the run's time is up."""
        minutes = self._config.training.exit_duration_in_mins
        elapsed_s = time.monotonic() - self.session.started_at
        time_is_up = minutes is not None and elapsed_s > minutes * 60.0
        return (float(self._signals.requested() is not None), float(time_is_up))

    def _ending(self, flags: tuple[float, ...]) -> Ending | None:
        """A reason to stop after this iteration, the same on all ranks."""
        signalled, time_is_up = flags
        training, state, now = self._config.training, self.state, datetime.datetime.now()
        if signalled:
            name = self._signals.requested() or "a signal on another rank"
            self.session.print_rank_0(metrics.datetime_line(f"exiting program after receiving {name}.", now))
            status = ExitStatus.STOPPED if self._config.checkpoint.save else ExitStatus.STOPPED_UNSAVED
            return Ending(status, f"received {name}")
        if time_is_up:
            minutes = training.exit_duration_in_mins or 0
            self.session.print_rank_0(metrics.datetime_line(f"exiting program after {minutes} minutes", now))
            return Ending(ExitStatus.DONE, "--exit-duration-in-mins")
        if ends_at(state.iteration, training.exit_interval):
            self.session.print_rank_0(
                metrics.datetime_line(f"exiting program at iteration {state.iteration}", now)
            )
            return Ending(ExitStatus.DONE, "--exit-interval")
        return None
