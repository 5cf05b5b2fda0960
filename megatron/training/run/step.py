"""One optimizer step: microbatches, one look at the numbers, one decision that all ranks share, one update.

Nothing changes before the decision: a step that is skipped, repeated or aborted leaves weights and optimizer as they
were. (`validated_step` steps before it is known, and takes back what proves wrong.) A step that was taken counts once
the weights that it made are known to be finite on all ranks (`weight_check`).

[Note: where gradients are divided] Backward runs on each microbatch's mean loss (its token sum with
`--calculate-per-token-loss`) times the loss scale. Gradients are summed over microbatches and data parallel ranks,
and divided once, inside the optimizer, by `StepRunner.divisor`. With `--ddp-average-in-collective` the reduction
divides by the data parallel ranks, which `FlatBuffer.grads_divided_by` records and the optimizer takes back out of
the divisor.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Protocol

from megatron.core.optimizer.clip_grads import clip_coefficient
from megatron.core.transport import collectives, host_data
from megatron.core.transport.parallel_state import ParallelState
from megatron.training.config.config import Config
from megatron.training.engine import Engine
from megatron.training.guard.nan_policy import (
    Decision,
    NanPolicy,
    NonFiniteError,
    RerunResult,
    Verdict,
    compare_rerun,
)
from megatron.training.guard.nonfinite_search import digest, find_site
from megatron.training.guard.watchdog import Watchdog
from megatron.training.guard.weight_check import WeightCheck
from megatron.training.report.run_clock import RunClock
from megatron.training.report.step_metrics import StepMetrics, Totals
from megatron.training.report.timers import Timers
from megatron.training.run.pipeline import PipelineRunner
from megatron.training.run.step_batches import StepBatches
from megatron.training.state import StepResult, StepTask


class Steps(Protocol):
    """What the loop asks of whoever runs its steps."""

    @property
    def num_undecided(self) -> int:
        """Steps that have run and are not decided on."""

    def step(self, batches: StepBatches, task: StepTask) -> Iterable[StepResult]:
        """Train on the next microbatches of this rank; gives the steps decided on meanwhile, in order. One that asks
        for an end (flags) is the last of them: nothing is begun behind it. Raises NonFiniteError and
        NonFiniteWeightsError, on every rank alike, behind the last that was decided on."""

    def settle(self, batches: StepBatches) -> Iterable[StepResult]:
        """Decide on what is not decided on: before weights are saved or evaluated. Raises as `step`."""


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One run of a step's microbatches, gradients reduced: what is decided by. num_zeros: where they are counted."""

    totals: Totals
    divisor: float
    norm: float
    nonfinite: bool
    num_zeros: int | None


class StepRunner:
    """Runs optimizer steps over one engine, each to its end."""

    num_undecided = 0

    def __init__(
        self,
        config: Config,
        ps: ParallelState,
        engine: Engine,
        runner: PipelineRunner,
        nan_policy: NanPolicy,
        timers: Timers,
        watchdog: Watchdog,
        clock: RunClock,
    ) -> None:
        self._config = config
        self._ps = ps
        self._engine = engine
        self._runner = runner
        self._nan_policy = nan_policy
        self._timers = timers
        self._watchdog = watchdog
        self._clock = clock

    def step(self, batches: StepBatches, task: StepTask) -> Iterable[StepResult]:
        """See `Steps`."""
        batches.begin_step()
        attempt = self._attempt(batches, task)
        verdict = self._nan_policy.decide(
            nonfinite=attempt.nonfinite and self.checks, scale_at_minimum=self._engine.scaler.at_minimum
        )
        return [self.conclude(attempt, verdict, batches, task)]

    def settle(self, batches: StepBatches) -> Iterable[StepResult]:
        """See `Steps`."""
        return ()

    def conclude(
        self,
        attempt: Attempt,
        verdict: Verdict,
        batches: StepBatches,
        task: StepTask,
        *,
        rolled_back: bool = False,
    ) -> StepResult:
        """Do as decided with a step whose gradients are there, and that has changed nothing, or nothing any more
        (rolled_back). Raises NonFiniteError, NonFiniteWeightsError."""
        loss_scale = self._engine.scaler.scale
        if verdict.decision is Decision.RERUN:
            attempt, verdict = self._rerun(attempt, batches, task)
        if verdict.decision is Decision.ABORT:
            numbers = self._run(batches, task, reduce_gradients=False)
            site = find_site(numbers, self._engine, self._ps)
            raise NonFiniteError(site, task.iteration, verdict)
        if verdict.decision is not Decision.SKIP:
            with self.phase("optimizer"):
                coefficient = clip_coefficient(attempt.norm, self._config.optimizer.clip_grad)
                self._engine.optimizer.step(attempt.divisor, coefficient)
                check = WeightCheck(self._engine, self._ps)
                self._engine.model.weights_changed()
                check.passed(task.iteration)
        return self.decided(attempt, verdict, task, loss_scale, rolled_back=rolled_back)

    def decided(
        self,
        attempt: Attempt,
        verdict: Verdict,
        task: StepTask,
        loss_scale: float,
        *,
        ended_at: float | None = None,
        rolled_back: bool = False,
    ) -> StepResult:
        """Move the clocks of a step that is as it will stay: loss scale, learning rate. ended_at: None: now."""
        engine, skipped = self._engine, verdict.decision is Decision.SKIP
        engine.scaler.update(skipped)
        if not skipped:
            engine.scheduler.step(self.batch_size(task))
        return StepResult(
            task,
            losses=attempt.totals.losses,
            flags=attempt.totals.flags,
            loss_scale=loss_scale,
            learning_rate=engine.scheduler.lr,
            decoupled_learning_rate=engine.scheduler.decoupled_lr,
            grad_norm=None if skipped else attempt.norm,
            num_zeros=None if skipped else attempt.num_zeros,
            skipped=skipped,
            note=verdict.reason,
            ended_at=self._clock.now() if ended_at is None else ended_at,
            rolled_back=rolled_back,
        )

    @property
    def checks(self) -> bool:
        """Whether what is not finite is not stepped on."""
        return self._config.reliability.check_for_nan_in_loss_and_grad or self._nan_policy.dynamic_loss_scale

    def batch_size(self, task: StepTask) -> int:
        """Samples of all ranks."""
        return task.num_microbatches * self._config.training.micro_batch_size * self._ps.dp_size

    def divisor(self, num_tokens: float, num_microbatches: int) -> float:
        """What the summed gradients are divided by: see [Note: where gradients are divided]."""
        scale = self._engine.scaler.scale
        if self._config.model.calculate_per_token_loss:
            return scale * max(num_tokens, 1.0)
        return scale * num_microbatches * self._ps.dp_size

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A part of the step, for the watchdog and the timers of level 1, which start together on all ranks."""
        log = self._config.logging
        if log.barrier_with_L1_time and log.timing_log_level > 0:
            collectives.barrier(self._ps.control_group)
        with self._watchdog.phase(name), self._timers(name, log_level=1):
            yield

    def _attempt(self, batches: StepBatches, task: StepTask) -> Attempt:
        with self.phase("forward-backward"):
            numbers = self._run(batches, task, reduce_gradients=True)
        with self.phase("grad-norm"):
            totals = numbers.reduce(self._ps, task.flags)
            divisor = self.divisor(totals.num_tokens, task.num_microbatches)
            stats = self._engine.optimizer.prepare(
                divisor, count_zero_grads=self._config.logging.log_num_zeros_in_grad
            )
        nonfinite = totals.nonfinite_microbatches > 0 or stats.nonfinite
        return Attempt(totals, divisor, stats.norm, nonfinite, stats.num_zeros)

    def _run(self, batches: StepBatches, task: StepTask, *, reduce_gradients: bool) -> StepMetrics:
        return self._runner.train(
            batches,
            iteration=task.iteration,
            num_microbatches=task.num_microbatches,
            reduce_gradients=reduce_gradients,
        )

    def _rerun(self, first: Attempt, batches: StepBatches, task: StepTask) -> tuple[Attempt, Verdict]:
        """The same step again, from the same weights, batches and dropout masks."""
        before = digest(first.totals, self._engine)
        second = self._attempt(batches, task)
        result = compare_rerun(before, digest(second.totals, self._engine), second_nonfinite=second.nonfinite)
        # Equal digests on one rank say nothing of another: one differing rank makes the result differ.
        rank_differs = any(host_data.all_gather_json(result is RerunResult.DIFFERENT, self._ps.control_group))
        result = RerunResult.DIFFERENT if rank_differs else result
        return second, self._nan_policy.decide(
            nonfinite=True, rerun=result, scale_at_minimum=self._engine.scaler.at_minimum
        )
