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

from megatron.core.optimizer.clip_grads import clip_coefficient
from megatron.core.transport import collectives, host_data
from megatron.training.guard.nan_policy import NonFiniteError, RerunResult, StepAction, Verdict, compare_rerun
from megatron.training.guard.weight_check import WeightCheck, find_site, step_digest
from megatron.training.report.step_metrics import StepMetrics, Totals
from megatron.training.run.data import StepBatches
from megatron.training.run.parts import RunParts
from megatron.training.state import StepResult, StepTask


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One run of a step's microbatches, gradients reduced: what is decided by. num_zeros: where they are counted."""

    task: StepTask
    loss_scale: float
    totals: Totals
    divisor: float
    norm: float
    nonfinite: bool
    num_zeros: int | None


class StepRunner:
    """Runs optimizer steps over one engine, each to its end.

    `step` and `settle` raise NonFiniteError and NonFiniteWeightsError, on every rank alike, behind the last step that
    was decided on.
    """

    def __init__(self, parts: RunParts) -> None:
        self.parts, self.engine = parts, parts.engine
        self.config, self.ps = parts.session.config, parts.session.ps

    @property
    def num_undecided(self) -> int:
        """Steps that have run and are not decided on."""
        return 0

    def step(self, batches: StepBatches, task: StepTask) -> Iterable[StepResult]:
        """Train on the next microbatches of this rank; gives the steps decided on meanwhile, in order. One that asks
        for an end (flags) is the last of them: nothing is begun behind it. Communicates over the world."""
        batches.begin_step()
        attempt = self._attempt(batches, task)
        verdict = self.verdict(nonfinite=attempt.nonfinite and self.checks)
        return [self.conclude(attempt, verdict, batches)]

    def settle(self, batches: StepBatches) -> Iterable[StepResult]:
        """Decide on what is not decided on: before weights are saved or evaluated."""
        return ()

    def verdict(self, *, nonfinite: bool, rerun: RerunResult = RerunResult.NOT_RUN) -> Verdict:
        """What --nan-policy makes of a step, the same on all ranks."""
        at_minimum = self.engine.scaler.at_minimum
        return self.parts.policy.decide(nonfinite=nonfinite, rerun=rerun, scale_at_minimum=at_minimum)

    def conclude(
        self, attempt: Attempt, verdict: Verdict, batches: StepBatches, rolled_back: bool = False
    ) -> StepResult:
        """Do as decided with a step whose gradients are there, and that has changed nothing, or nothing any more
        (rolled_back). Raises NonFiniteError, NonFiniteWeightsError."""
        engine, task = self.engine, attempt.task
        if verdict.decision is StepAction.RERUN:
            attempt, verdict = self._rerun(attempt, batches)
        if verdict.decision is StepAction.ABORT:
            numbers = self.parts.pipeline.train(batches, task, reduce_gradients=False)
            site = find_site(numbers.first_nonfinite_microbatch, engine, self.ps)
            raise NonFiniteError(site, task.iteration, verdict)
        if verdict.decision is not StepAction.SKIP:
            with self.phase("optimizer"):
                coefficient = clip_coefficient(attempt.norm, self.config.optimizer.clip_grad)
                engine.optimizer.step(attempt.divisor, coefficient)
                check = WeightCheck(engine.optimizer)
                engine.model.weights_changed()
                check.passed(f"iteration {task.iteration}")
        return self.counted(attempt, verdict, rolled_back, self.parts.clock.now())

    def counted(self, attempt: Attempt, verdict: Verdict, rolled_back: bool, ended_at: float) -> StepResult:
        """Move the clocks of a step that is as it will stay: loss scale, learning rate."""
        engine, skipped = self.engine, verdict.decision is StepAction.SKIP
        engine.scaler.update(skipped)
        if not skipped:
            engine.scheduler.step(
                attempt.task.num_microbatches * self.config.training.micro_batch_size * self.ps.dp_size
            )
        return StepResult(
            attempt.task,
            losses=attempt.totals.losses,
            layers=attempt.totals.layers,
            flags=attempt.totals.flags,
            loss_scale=attempt.loss_scale,
            learning_rate=engine.scheduler.lr,
            decoupled_learning_rate=engine.scheduler.decoupled_lr,
            grad_norm=None if skipped else attempt.norm,
            num_zeros=None if skipped else attempt.num_zeros,
            skipped=skipped,
            note=verdict.reason,
            ended_at=ended_at,
            rolled_back=rolled_back,
        )

    @property
    def checks(self) -> bool:
        """Whether what is not finite is not stepped on."""
        return self.config.reliability.check_for_nan_in_loss_and_grad or self.parts.policy.dynamic_loss_scale

    def divisor(self, num_tokens: float, num_microbatches: int) -> float:
        """What the summed gradients are divided by: see [Note: where gradients are divided]."""
        scale = self.engine.scaler.scale
        if self.config.model.calculate_per_token_loss:
            return scale * max(num_tokens, 1.0)
        return scale * num_microbatches * self.ps.dp_size

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A part of the step, for the watchdog and the timers of level 1, which start together on all ranks."""
        session, log = self.parts.session, self.config.logging
        if log.barrier_with_L1_time and log.timing_log_level > 0:
            collectives.barrier(self.ps.control_group)
        with session.watchdog.phase(name), session.timers(name, log_level=1):
            yield

    def _attempt(self, batches: StepBatches, task: StepTask) -> Attempt:
        with self.phase("forward-backward"):
            numbers: StepMetrics = self.parts.pipeline.train(batches, task)
        with self.phase("grad-norm"):
            totals = numbers.reduce(self.ps, task.flags)
            divisor = self.divisor(totals.num_tokens, task.num_microbatches)
            counts = self.config.logging.log_num_zeros_in_grad
            stats = self.engine.optimizer.prepare(divisor, count_zero_grads=counts)
        nonfinite = totals.nonfinite_microbatches > 0 or stats.nonfinite
        of_gradients = divisor, stats.norm, nonfinite, stats.num_zeros
        return Attempt(task, self.engine.scaler.scale, totals, *of_gradients)

    def _rerun(self, first: Attempt, batches: StepBatches) -> tuple[Attempt, Verdict]:
        """The same step again, from the same weights, batches and dropout masks."""
        before = step_digest(first.totals.losses, self.engine)
        second = self._attempt(batches, first.task)
        after = step_digest(second.totals.losses, self.engine)
        result = compare_rerun(before, after, second_nonfinite=second.nonfinite)
        # Equal digests on one rank say nothing of another: one differing rank makes the result differ.
        if any(host_data.all_gather_json(result is RerunResult.DIFFERENT, self.ps.control_group)):
            result = RerunResult.DIFFERENT
        return second, self.verdict(nonfinite=True, rerun=result)
