"""Loss on held-out data: no dropout, no gradients, the same loss function as training."""

from __future__ import annotations

import gc
from collections.abc import Mapping

from megatron.core.transport.parallel_state import ParallelState
from megatron.training.config.config import Config
from megatron.training.config.microbatches import ends_at
from megatron.training.report.reporter import Evaluated
from megatron.training.report.step_metrics import StepMetrics
from megatron.training.run.data import EvaluationSet, StepBatches
from megatron.training.run.parts import RunParts
from megatron.training.run.pipeline import PipelineRunner
from megatron.training.state import StepTask, TrainState


class Evaluator:
    """A run's evaluations: between iterations where the flags ask for one, and at the end. All ranks take part."""

    def __init__(self, parts: RunParts) -> None:
        self._parts, self._config, self._state = parts, parts.session.config, parts.state
        self._newest: tuple[int, list[Evaluated]] = -1, []  # on the validation sets, with its iteration

    def is_due(self, iteration: int) -> bool:
        """Whether `if_due` evaluates after an iteration: every --eval-interval, where there are validation sets."""
        return ends_at(iteration, self._config.evaluation.eval_interval) and bool(self._parts.data.valid)

    def if_due(self) -> None:
        """After an iteration: on the validation sets."""
        iteration, training = self._state.iteration, self._config.training
        if not self.is_due(iteration):
            return
        collect = gc.collect if training.manual_gc and training.manual_gc_eval else lambda: 0
        with self._parts.clock.paused():
            collect()
            self._report(self._validate(), f"iteration {iteration}")
            collect()

    def at_end(self) -> None:
        """After the last iteration: on the validation sets and on the test sets. What has just been evaluated is not
        evaluated again, on other samples: the weights of one iteration have one validation loss."""
        iteration = self._state.iteration
        again = self._newest[0] == iteration
        found = self._newest[1] if again else self._validate()
        self._report(found, f"iteration {iteration} on validation set", again=again)
        self._report(self._evaluate(self._parts.data.test, "test", 0), f"iteration {iteration} on test set")

    def _validate(self) -> list[Evaluated]:
        """The next evaluation goes on reading behind this one; with --full-validation each reads the whole sets."""
        found = self._evaluate(self._parts.data.valid, "validation", self._state.consumed_valid_samples)
        self._newest = self._state.iteration, found
        if not self._config.data.full_validation:
            self._state.consumed_valid_samples += _samples_of_one(self._config)
        return found

    def _evaluate(self, sets: list[EvaluationSet], split: str, first: int) -> list[Evaluated]:
        """first: the sample of the split that this evaluation begins with."""
        config, session, pipeline = self._config, self._parts.session, self._parts.pipeline
        per_batch = config.last_num_microbatches
        last, reads = first + _samples_of_one(config) - 1, pipeline.spec.reads_data(session.ps.pp_rank)
        found = []
        for held_out in sets:
            count = len(held_out.batches) if held_out.whole else config.evaluation.eval_iters * per_batch
            batches = StepBatches(iter(held_out.batches if reads else ()), reads=reads)
            with session.watchdog.phase("evaluate"):
                task = StepTask(self._state.iteration, count)
                losses = evaluate(pipeline, session.ps, batches, task, per_batch)
            samples = "all samples" if held_out.whole else f"samples {first} to {last}"
            found.append(Evaluated(split, held_out.name, losses, f"{samples} of the {split} set"))
        return found

    def _report(self, found: list[Evaluated], where: str, *, again: bool = False) -> None:
        for one in found:
            self._parts.reporter.evaluated(where, one, again=again)


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
    pipeline: PipelineRunner, ps: ParallelState, batches: StepBatches, task: StepTask, at_a_time: int
) -> Mapping[str, float]:
    """Mean of each reported loss over the task's microbatches of this rank and all its data-parallel peers.

    The task counts every microbatch of the evaluation (iterations x microbatches an iteration); the pipeline takes
    at_a_time of them, of which it holds the batches. Communicates over the pipeline, and over world once.
    """
    numbers = StepMetrics(ps.device.torch_device)
    for first in range(0, task.num_microbatches, at_a_time):
        batches.begin_step()
        count = min(at_a_time, task.num_microbatches - first)
        pipeline.evaluate(batches, numbers, StepTask(task.iteration, count))
    totals = numbers.reduce(ps)
    return {name: total / max(count, 1.0) for name, (total, count) in totals.losses.items()}
