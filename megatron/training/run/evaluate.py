"""Loss on held-out data: no dropout, no gradients, the same loss function as training."""

from __future__ import annotations

import gc
from collections.abc import Mapping

from megatron.core.transport.parallel_state import ParallelState
from megatron.training.config.config import Config
from megatron.training.config.microbatches import ends_at
from megatron.training.report.reporter import Evaluated, Reporter
from megatron.training.report.run_clock import RunClock
from megatron.training.report.session import Session
from megatron.training.report.step_metrics import StepMetrics
from megatron.training.run.data import DataIterators, EvaluationSet
from megatron.training.run.pipeline import PipelineRunner
from megatron.training.run.step_batches import StepBatches
from megatron.training.state import TrainState


class Evaluator:
    """A run's evaluations: between iterations where the flags ask for one, and at the end. All ranks take part."""

    def __init__(
        self,
        session: Session,
        runner: PipelineRunner,
        reporter: Reporter,
        clock: RunClock,
        state: TrainState,
        data: DataIterators,
    ) -> None:
        self._session = session
        self._config = session.config
        self._runner = runner
        self._reporter = reporter
        self._clock = clock
        self._state = state
        self._data = data
        self._reads = runner.spec.reads_data(session.ps.pp_rank)
        self._newest: tuple[int, list[Evaluated]] | None = None  # iteration, of its validation sets

    def if_due(self) -> None:
        """After an iteration: on the validation sets, every --eval-interval iterations."""
        iteration = self._state.iteration
        if not self.is_due(iteration):
            return
        with self._clock.paused():
            self._evaluate_here(iteration)

    def is_due(self, iteration: int) -> bool:
        """Whether `if_due` evaluates after an iteration."""
        return ends_at(iteration, self._config.evaluation.eval_interval) and bool(self._data.valid)

    def _evaluate_here(self, iteration: int) -> None:
        collect = self._config.training.manual_gc and self._config.training.manual_gc_eval
        if collect:
            gc.collect()
        self._newest = iteration, self._evaluate(self._data.valid, "validation")
        self._count_validation_samples()
        self._report(self._newest[1], f"iteration {iteration}")
        if collect:
            gc.collect()

    def at_end(self) -> None:
        """After the last iteration: on the validation sets and on the test sets. What has just been evaluated is not
        evaluated again, on other samples: the weights of one iteration have one validation loss."""
        iteration = self._state.iteration
        if self._newest is None or self._newest[0] != iteration:
            self._newest = iteration, self._evaluate(self._data.valid, "validation")
            self._count_validation_samples()
        self._report(self._newest[1], f"iteration {iteration} on validation set")
        self._report(self._evaluate(self._data.test, "test"), f"iteration {iteration} on test set")

    def _evaluate(self, sets: list[EvaluationSet], split: str) -> list[Evaluated]:
        flags, found = self._config.evaluation, []
        per_batch = self._config.training.global_batch_size // (
            self._config.training.micro_batch_size * self._session.ps.dp_size
        )
        first = self._state.consumed_valid_samples if split == "validation" else 0
        last = first + _samples_of_one(self._config) - 1
        for held_out in sets:
            count = len(held_out.batches) if held_out.whole else flags.eval_iters * per_batch
            with self._session.watchdog.phase("evaluate"):
                losses = evaluate(
                    self._runner,
                    self._session.ps,
                    StepBatches(iter(held_out.batches if self._reads else ()), reads=self._reads),
                    iteration=self._state.iteration,
                    num_microbatches=count,
                    microbatches_at_a_time=per_batch,
                )
            samples = "all samples" if held_out.whole else f"samples {first} to {last}"
            samples += f" of the {split} set"
            found.append(Evaluated(split, held_out.name, losses, samples))
        return found

    def _report(self, found: list[Evaluated], where: str) -> None:
        for one in found:
            self._reporter.evaluated(where, one)

    def _count_validation_samples(self) -> None:
        """Where the next evaluation goes on reading; one that reads the whole set starts at its beginning."""
        if not self._config.data.full_validation:
            self._state.consumed_valid_samples += _samples_of_one(self._config)


def first_validation_sample(state: TrainState, config: Config) -> int:
    """Where a run that has loaded its state begins to read. An evaluation of its own (--skip-train) starts at the
    beginning: it needs no more samples than it asks for. One behind training that was finished before reads again what
    the evaluation of the last iteration has read, if one was due there."""
    if config.evaluation.skip_train:
        return 0
    again = state.finished and ends_at(state.iteration, config.evaluation.eval_interval)
    return max(0, state.consumed_valid_samples - (_samples_of_one(config) if again else 0))


def _samples_of_one(config: Config) -> int:
    """Of all ranks, in one evaluation."""
    return config.evaluation.eval_iters * config.training.global_batch_size


def evaluate(
    runner: PipelineRunner,
    ps: ParallelState,
    batches: StepBatches,
    *,
    iteration: int,
    num_microbatches: int,
    microbatches_at_a_time: int,
) -> Mapping[str, float]:
    """Mean of each reported loss over `num_microbatches` of this rank and all its data-parallel peers.

    num_microbatches counts every microbatch of the evaluation (iterations x microbatches an iteration); the pipeline
    takes `microbatches_at_a_time` of them, of which it holds the batches. Communicates over the pipeline, and over
    world once.
    """
    numbers = StepMetrics(ps.device.torch_device)
    for first in range(0, num_microbatches, microbatches_at_a_time):
        batches.begin_step()
        count = min(microbatches_at_a_time, num_microbatches - first)
        runner.evaluate(batches, numbers, iteration=iteration, num_microbatches=count)
    totals = numbers.reduce(ps)
    return {name: total / max(count, 1.0) for name, (total, count) in totals.losses.items()}
