"""The loop: iterations, and what happens between them: evaluation, checkpoints, and the decision to stop."""

from __future__ import annotations

import dataclasses
import datetime
import gc
import time

import torch

from megatron.core.transport import waiting
from megatron.training import global_vars
from megatron.training.config.config import train_step_flops
from megatron.training.config.microbatches import ends_at
from megatron.training.engine import Engine
from megatron.training.guard.console import lost_output
from megatron.training.guard.exit_status import ExitStatus, TrainingExit, stopped_status
from megatron.training.guard.nan_policy import NanPolicy, NonFiniteError
from megatron.training.guard.signals import SignalHandler
from megatron.training.guard.weight_check import NonFiniteWeightsError, check_replicas
from megatron.training.report import metrics
from megatron.training.report.reporter import Reporter, log_memory, report_model
from megatron.training.report.session import Session
from megatron.training.report.step_metrics import StepMetrics
from megatron.training.run.data import DatasetsProvider, build_data_iterators
from megatron.training.run.evaluate import Evaluator, first_validation_sample
from megatron.training.run.measuring import measuring_of
from megatron.training.run.parts import RunParts
from megatron.training.run.pipeline import PipelineRunner
from megatron.training.run.planned_memory import PlannedMemory
from megatron.training.run.profiling import RunProfiler
from megatron.training.run.run_checkpoints import RunCheckpoints
from megatron.training.run.step import StepRunner
from megatron.training.run.validated_step import ValidatedStepRunner
from megatron.training.state import StepResult, StepTask, TrainState


@dataclasses.dataclass(frozen=True)
class Ending:
    """Why the loop stopped."""

    status: ExitStatus
    reason: str


class TrainingLoop:
    """Iterations, and what happens between them: evaluation, checkpoints, and the decision to stop."""

    def __init__(
        self, session: Session, signals: SignalHandler, engine: Engine, pipeline: PipelineRunner
    ) -> None:
        config = self._config = session.config
        policy, limit = config.reliability.nan_policy, config.reliability.nan_max_skips
        nan_policy = NanPolicy(policy, limit, dynamic_loss_scale=engine.scaler.dynamic)
        self.state = TrainState.start(config)
        self._session, self._signals, self._batch = session, signals, config.batch_schedule()
        self._parts = parts = RunParts(session, engine, pipeline, nan_policy, self.state)
        self.checkpoints, self._evaluator = RunCheckpoints(parts), Evaluator(parts)
        validated = config.parallel.enable_optimizer_post_validation
        self._steps = ValidatedStepRunner(parts, self._begins) if validated else StepRunner(parts)
        self._memory_logged = False
        self.memory: PlannedMemory | None = None  # once it is known what runs
        self._begun_at = 0  # samples consumed before the newest step
        global_vars.provide(
            batch_schedule=self._batch,
            num_microbatches=lambda: self._batch.num_microbatches(self._begun_at),
            global_batch_size=lambda: self._batch.global_batch_size(self._begun_at),
        )

    def run(self, datasets_provider: DatasetsProvider) -> Ending:
        """Load, train, evaluate, save. Raises what STATUS_TABLE lists, and TrainingExit."""
        session, skip_train = self._session, self._config.evaluation.skip_train
        if self._config.checkpoint.ckpt_convert_format is not None:
            return self._convert()
        self._start(datasets_provider)
        reporter, profiler, failed = self._parts.reporter, self._profiler, None
        try:
            ending = None if skip_train else self._train()
            if ending is None:
                self._evaluator.at_end()
                ending = Ending(ExitStatus.DONE, "evaluated" if skip_train else "trained to the end")
            self.checkpoints.finish(blocking=True)
            profiler.finish(self.state.iteration)
            reporter.ended(ending.status, ending.reason, lost=session.gather(lost_output()))
            return ending
        except (TrainingExit, NonFiniteWeightsError):  # on all ranks alike
            self.checkpoints.finish(blocking=True)  # one of before is good, and may still be being written
            raise
        except torch.OutOfMemoryError as error:
            failed = error
            raise
        finally:
            profiler.close(failed)
            reporter.close()
            del self._parts.data  # with it its loaders' processes end, which the interpreter would wait for

    def _convert(self) -> Ending:
        """--ckpt-convert-format: write what --load has, and end."""
        self.checkpoints.load()
        self.checkpoints.save()
        flags = self._config.checkpoint
        self._session.print_rank_0(f"> converted checkpoint: {flags.load} -> {flags.save}")
        return Ending(ExitStatus.DONE, "converted")

    def _start(self, datasets_provider: DatasetsProvider) -> None:
        """What the log says of a run first; then its checkpoint, data, and who reports."""
        parts, session, config, state = self._parts, self._session, self._config, self.state
        num_microbatches = self._batch.num_microbatches(state.consumed_train_samples)
        about = report_model(session, parts.engine, num_microbatches)
        self._measuring = measuring_of(parts)
        self._measuring.report_residency(num_microbatches)
        self.memory = PlannedMemory(parts, num_microbatches)
        self.memory.report()
        self.checkpoints.load()
        self._begun_at = state.consumed_train_samples
        state.consumed_valid_samples = first_validation_sample(state, config)
        with session.watchdog.phase("build data"), waiting.ended_by(self._signals.end_waiting):
            reads = parts.pipeline.spec.reads_data(session.ps.pp_rank)
            parts.data = build_data_iterators(session, datasets_provider, state, reads=reads)
        if not config.evaluation.skip_train:
            self.checkpoints.compare_data()
        parts.reporter = Reporter(session, parts.engine, state, parts.clock, about)
        self._profiler = RunProfiler(parts, state.iteration + 1)
        self._measuring.begin(state.iteration + 1)
        handle = parts.reporter.writers.handle
        global_vars.provide(tensorboard_writer=handle("TensorBoard"), wandb_writer=handle("wandb"))

    # --- the loop

    def _train(self) -> Ending | None:
        """Iterate to the end of the run (None) or to a reason to stop earlier."""
        session, state = self._session, self.state
        if state.finished:
            session.print_rank_0(
                f"nothing to train: iteration {state.iteration} of {state.train_iters} is done"
            )
            return None
        began = metrics.datetime_line("before the start of training step", datetime.datetime.now())
        # By the rank that has just said where its numbers go: behind that.
        session.print_rank_last("training ...", began, brief="training ...")
        if self._config.training.manual_gc:
            gc.disable()
            gc.collect()
        self._parts.reporter.start_interval()
        while not state.finished:
            number = state.iteration + self._steps.num_undecided + 1
            with self._profiler.iteration(number):
                flags = self._iteration(number)
            self.checkpoints.finish()
            if self._steps.num_undecided:
                continue  # nothing is due, and the step before has been seen to
            self._evaluator.if_due()
            ending = self._ending(flags)
            last = ending is not None or state.finished
            if self.checkpoints.is_due(state.iteration, last=last):
                with self._parts.clock.paused():
                    self.checkpoints.save(wait=last)
            if ending is not None:
                return ending
        return None

    def _iteration(self, number: int) -> tuple[float, ...]:
        """The next step; returns the flags (signal, duration) summed over ranks, of the last step decided on."""
        steps, training, session, data = self._steps, self._config.training, self._session, self._parts.data
        self._begins(number)
        num_microbatches = self._batch.num_microbatches(self._begun_at)
        if number in training.iterations_to_skip:  # draw the batch, train on nothing
            data.train.begin_step()
            data.train.microbatch(num_microbatches - 1)
            self.state.skipped_train_samples += self._count_batch(number)
            self._parts.reporter.batch_skipped("batch skipped (--iterations-to-skip)")
            # No step's reduction carries the flags: they are summed by themselves.
            return StepMetrics(session.device.torch_device).reduce(session.ps, self._flags()).flags
        flags: tuple[float, ...] = (0.0, 0.0)  # nobody wants to stop
        try:
            for result in steps.step(data.train, StepTask(number, num_microbatches, self._flags())):
                flags = self._step_done(result)
            if steps.num_undecided and self._has_to_be_decided(number):
                for result in steps.settle(data.train):
                    flags = self._step_done(result)
        except NonFiniteError as error:
            if error.verdict.save_first and self._config.checkpoint.save is not None:
                self.checkpoints.save()
            raise TrainingExit(error.status, str(error)) from error
        if training.manual_gc and ends_at(number, training.manual_gc_interval):
            gc.collect()
        return flags

    def _has_to_be_decided(self, number: int) -> bool:
        """Whether something behind this iteration needs the weights as they will stay."""
        config = self._config
        return (
            number >= self.state.train_iters
            or self._evaluator.is_due(number)
            or self.checkpoints.is_due(number)
            or ends_at(number, config.training.exit_interval)
            or ends_at(number, config.ddp.check_weight_hash_across_dp_replicas_interval)
            or number + 1 in config.training.iterations_to_skip
            or (config.logging.log_params_norm and self._parts.reporter.is_due(number))
        )

    def _step_done(self, result: StepResult) -> tuple[float, ...]:
        """A step is decided on: count it, and report it. Returns the flags."""
        state, session, engine = self.state, self._session, self._parts.engine
        number = result.task.iteration
        assert number == state.iteration + 1, f"iteration {number} after {state.iteration}"
        if ends_at(number, self._config.ddp.check_weight_hash_across_dp_replicas_interval):
            check_replicas(engine, session.ps, number)
        if not self._memory_logged:
            self._memory_logged = True
            log_memory(session, engine, f"after iteration {number}")
        batch_size = self._count_batch(number)
        state.num_floating_point_operations_so_far += train_step_flops(self._config, batch_size)
        bubbles, residency = self._measuring.after_step(result.task)
        self._parts.reporter.step_done(result, batch_size=batch_size, bubbles=bubbles, residency=residency)
        if self.memory is not None:
            self.memory.after_step(result.task)
        self._measuring.between_steps(result.task)
        return result.flags

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
        self._session.watchdog.step(number)
        global_vars.set_progress(
            iteration=number - 1,
            curr_iteration=number - 1,
            consumed_train_samples=self._begun_at,
            consumed_valid_samples=self.state.consumed_valid_samples,
        )

    def _flags(self) -> tuple[float, ...]:
        """What this rank wants the others to know: it heard a signal, the run's time is up."""
        minutes = self._config.training.exit_duration_in_mins
        elapsed_s = time.monotonic() - self._session.started_at
        time_is_up = minutes is not None and elapsed_s > minutes * 60.0
        return (float(self._signals.requested() is not None), float(time_is_up))

    def _ending(self, flags: tuple[float, ...]) -> Ending | None:
        """A reason to stop after this iteration, the same on all ranks. Communicates over the world if there is one."""
        signalled, time_is_up = flags
        training, iteration, status = self._config.training, self.state.iteration, ExitStatus.DONE
        if not (signalled or time_is_up or ends_at(iteration, training.exit_interval)):
            return None
        # Every rank names what any has heard, when all have said what there is to say of the step.
        heard = self._session.gather(self._signals.requested())
        if signalled:
            name = next(filter(None, heard))
            is_signal = name.startswith("SIG")
            why, reason = (
                (f"after receiving {name}.", f"received {name}") if is_signal else (f"after {name}.", name)
            )
            status = stopped_status(self._config.checkpoint.save)
        elif time_is_up:
            why, reason = f"after {training.exit_duration_in_mins or 0} minutes", "--exit-duration-in-mins"
        else:
            why, reason = f"at iteration {iteration}", "--exit-interval"
        self._session.print_rank_0(metrics.datetime_line(f"exiting program {why}", datetime.datetime.now()))
        return Ending(status, reason)
