"""Optimizer steps that no rank waits for all others to make: `--enable-optimizer-post-validation`.

[Note: one step behind] A step that has run is decided on while the next one's first forwards run (see post_validator).
Until then it has not happened for anybody but the weights: the loop's counters, the learning rate and the log wait for
the decision. The loss scale has to go ahead, because forwards multiply with it: it moves as after a clean step, and is
put right with the rest. Where the decision is to run a step again, or to abort, the step under way is dropped, and what
it has drawn of the data is kept for when it comes again.

[Note: weights behind the decision] Ranks ask each other for the weights that a step made (`WeightCheck`) right after
it, and once more where the decision took it back or made it; they hear the answer behind the step that was under way
then, so that nobody waits inside of a plan. The step is told to the loop after that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from megatron.core.optimizer.clip_grads import StepRules
from megatron.core.pipeline_parallel.post_validation.channel import StateChannel
from megatron.core.pipeline_parallel.post_validation.validator import Completed, PostValidator, StepOutcome
from megatron.core.transport.host_data import host_values
from megatron.training.guard.nan_policy import StepAction, Verdict
from megatron.training.guard.weight_check import WeightCheck
from megatron.training.report.step_metrics import StepMetrics, Totals
from megatron.training.run.data import StepBatches
from megatron.training.run.parts import RunParts
from megatron.training.run.step import Attempt, StepRunner
from megatron.training.state import StepResult, StepTask


@dataclasses.dataclass
class _Undecided:
    """A step that has run. scaler: its state in that step. numbers: this rank's. ended_at: None while it still runs."""

    task: StepTask
    divisor: float
    loss_scale: float
    scaler: dict[str, Any]
    numbers: StepMetrics
    ended_at: float | None = None


class ValidatedStepRunner(StepRunner):
    """Steps over the validator of this rank, whose `StepOwner` it is. What has to be run in the old way is: a step once
    more, or the search for what is not finite. begins: is told of the iteration of a step that is run so, although the
    one behind it had begun."""

    def __init__(self, parts: RunParts, begins: Callable[[int], None]) -> None:
        super().__init__(parts)
        config, self._begins = self.config, begins
        self._running: StepTask | None = None
        self._undecided: _Undecided | None = None
        self._failed: tuple[_Undecided, StepOutcome, Verdict] | None = None
        self._check: WeightCheck | None = None  # of a step that is not decided on
        self._results: list[tuple[StepResult, WeightCheck]] = []
        self._validator = parts.pipeline.validator = PostValidator(
            self.engine.optimizer,
            StateChannel(self.ps),
            self,
            StepRules(config.optimizer.clip_grad, skips_nonfinite=self.checks).decide,
            rank=self.ps.pp_rank,
            num_ranks=self.ps.pp_size,
            after=config.parallel.post_validation_after,
            count_zero_grads=config.logging.log_num_zeros_in_grad,
        )

    # For the loop ------------------------------------------------------------------------------------

    @property
    def num_undecided(self) -> int:
        return int(self._validator.pending)

    def step(self, batches: StepBatches, task: StepTask) -> Iterator[StepResult]:
        """Communicates over the world, but waits for it only where a step is decided on at once."""
        batches.begin_step(keep_last=self._validator.pending)
        self._running = task
        with self.phase("forward-backward"):
            done = self.parts.pipeline.train_and_step(batches, task)
        self._running = None
        if self._validator.pending:
            self._check = WeightCheck(self.engine.optimizer)
        if not done:
            batches.step_back()
        elif self._undecided is not None:
            self._undecided.ended_at = self.parts.clock.now()
        yield from self._decided_on(batches)

    def settle(self, batches: StepBatches) -> Iterator[StepResult]:
        with self.phase("optimizer"):
            self._validator.validate_now()
        yield from self._decided_on(batches)

    def _decided_on(self, batches: StepBatches) -> Iterator[StepResult]:
        results, self._results = self._results, []
        for result, check in results:
            check.passed(f"iteration {result.task.iteration}")
            yield result
        if self._failed is not None:
            (step, outcome, verdict), self._failed = self._failed, None
            # Summed as those of the second run will be: bits are compared.
            totals = step.numbers.reduce(self.ps, step.task.flags)
            self._begins(step.task.iteration)
            attempt = self._of_outcome(step, outcome, totals)
            yield self.conclude(attempt, verdict, batches, outcome.rolled_back)

    def _of_outcome(self, step: _Undecided, outcome: StepOutcome, totals: Totals) -> Attempt:
        num_zeros = outcome.num_zeros if self.config.logging.log_num_zeros_in_grad else None
        of_gradients = step.divisor, outcome.norm, outcome.nonfinite, num_zeros
        return Attempt(step.task, step.loss_scale, totals, *of_gradients)

    # For the validator, while a step runs (`StepOwner`) -------------------------------------------------------

    def complete(self) -> Completed:
        """With --calculate-per-token-loss it waits for the number of tokens of all ranks."""
        task, scaler = self._running, self.engine.scaler
        assert task is not None, "a step is complete that is not under way"
        assert self._undecided is None, "a step is complete before the one before it was decided on"
        numbers = self.parts.pipeline.finish_gradients()
        num_tokens = numbers.num_tokens(self.ps) if self.config.model.calculate_per_token_loss else 0.0
        divisor = self.divisor(num_tokens, task.num_microbatches)
        self._undecided = _Undecided(task, divisor, scaler.scale, scaler.state(), numbers)
        scaler.update(False)
        vector = numbers.vector(self.ps, task.flags)
        own = host_values(vector)  # sync: it travels with the state, from host to host
        seen = numbers.totals(own, len(task.flags)).nonfinite_microbatches > 0
        return Completed(divisor, seen, tuple(own))

    def settle_weights(self) -> None:
        self.engine.model.settle_weights()

    def weights_changed(self) -> None:
        self.engine.model.weights_changed()

    def decided(self, outcome: StepOutcome) -> bool:
        """See [Note: one step behind]. Whether nothing asks for an end."""
        step, self._undecided = self._undecided, None
        check, self._check = self._check, None
        assert step is not None, "a decision on no step"
        self.engine.scaler.load_state(step.scaler)
        verdict = self.verdict(nonfinite=outcome.nonfinite and self.checks)
        if verdict.decision in (StepAction.RERUN, StepAction.ABORT):
            self._failed = step, outcome, verdict
            return False
        self.engine.model.release_gradients()
        totals = step.numbers.totals(outcome.extras, len(step.task.flags))
        assert (verdict.decision is StepAction.SKIP) == (outcome.coefficient is None), (verdict, outcome)
        attempt = self._of_outcome(step, outcome, totals)
        ended_at = self.parts.clock.now() if step.ended_at is None else step.ended_at
        result = self.counted(attempt, verdict, outcome.rolled_back, ended_at)
        if check is None or not outcome.clean:
            check = WeightCheck(self.engine.optimizer)
        self._results.append((result, check))
        return not any(totals.flags)
