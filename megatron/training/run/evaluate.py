"""Loss on held-out data: no dropout, no gradients, the same loss function as training."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Mapping

from megatron.core.transport.parallel_state import ParallelState
from megatron.training.config.config import Config
from megatron.training.config.microbatches import ends_at
from megatron.training.report.reporter import Evaluated, Reporter
from megatron.training.report.session import Session
from megatron.training.report.step_metrics import StepMetrics
from megatron.training.report.timers import RunClock
from megatron.training.run.data import DataIterators, EvaluationSet
from megatron.training.run.pipeline import PipelineRunner
from megatron.training.run.step_batches import StepBatches
from megatron.training.state import TrainState


@dataclasses.dataclass
class Evaluator:
    """A run's evaluations: between iterations where the flags ask for one, and at the end. All ranks take part.

    newest: the iteration of the last evaluation on the validation sets, and what it found.
    """

    session: Session
    runner: PipelineRunner
    reporter: Reporter
    clock: RunClock
    state: TrainState
    data: DataIterators
    newest: tuple[int, list[Evaluated]] | None = None

    def is_due(self, iteration: int) -> bool:
        """Whether `if_due` evaluates after an iteration: every --eval-interval, where there are validation sets."""
        return ends_at(iteration, self.session.config.evaluation.eval_interval) and bool(self.data.valid)

    def if_due(self) -> None:
        """After an iteration: on the validation sets."""
        iteration, training = self.state.iteration, self.session.config.training
        if not self.is_due(iteration):
            return
        collect = gc.collect if training.manual_gc and training.manual_gc_eval else lambda: 0
        with self.clock.paused():
            collect()
            self._report(self._validate(), f"iteration {iteration}")
            collect()

    def at_end(self) -> None:
        """After the last iteration: on the validation sets and on the test sets. What has just been evaluated is not
        evaluated again, on other samples: the weights of one iteration have one validation loss."""
        iteration = self.state.iteration
        found = self.newest[1] if self.newest and self.newest[0] == iteration else self._validate()
        self._report(found, f"iteration {iteration} on validation set")
        self._report(self._evaluate(self.data.test, "test", 0), f"iteration {iteration} on test set")

    def _validate(self) -> list[Evaluated]:
        """The next evaluation goes on reading behind this one; with --full-validation each reads the whole sets."""
        found = self._evaluate(self.data.valid, "validation", self.state.consumed_valid_samples)
        self.newest = self.state.iteration, found
        if not self.session.config.data.full_validation:
            self.state.consumed_valid_samples += _samples_of_one(self.session.config)
        return found

    def _evaluate(self, sets: list[EvaluationSet], split: str, first: int) -> list[Evaluated]:
        """first: the sample of the split that this evaluation begins with."""
        config, ps = self.session.config, self.session.ps
        per_batch = config.training.global_batch_size // (config.training.micro_batch_size * ps.dp_size)
        last, reads = first + _samples_of_one(config) - 1, self.runner.spec.reads_data(ps.pp_rank)
        found = []
        for held_out in sets:
            count = len(held_out.batches) if held_out.whole else config.evaluation.eval_iters * per_batch
            with self.session.watchdog.phase("evaluate"):
                losses = evaluate(
                    self.runner,
                    ps,
                    StepBatches(iter(held_out.batches if reads else ()), reads=reads),
                    iteration=self.state.iteration,
                    num_microbatches=count,
                    microbatches_at_a_time=per_batch,
                )
            samples = "all samples" if held_out.whole else f"samples {first} to {last}"
            found.append(Evaluated(split, held_out.name, losses, f"{samples} of the {split} set"))
        return found

    def _report(self, found: list[Evaluated], where: str) -> None:
        for one in found:
            self.reporter.evaluated(where, one)


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
