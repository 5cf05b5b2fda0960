"""One optimizer step: microbatches, one look at the numbers, one decision that all ranks share, one update.

Nothing changes before the decision: a step that is skipped, repeated or aborted leaves weights and optimizer as they
were.

[Note: where gradients are divided] Backward runs on each microbatch's mean loss (its token sum with
`--calculate-per-token-loss`) times the loss scale. Gradients are summed over microbatches and data parallel ranks,
and divided once, inside the optimizer, by `StepRunner._divisor`. With `--ddp-average-in-collective` the reduction
divides by the data parallel ranks, which `FlatBuffer.grads_divided_by` records and the optimizer takes back out of
the divisor.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron.core import collectives, host_data
from megatron.core.distributed.sharding import Cut
from megatron.core.optimizer.clip_grads import clip_coefficient
from megatron.core.optimizer.mixed_precision import GradStats
from megatron.core.parallel_state import ParallelState
from megatron.training.build import Engine
from megatron.training.config import Config
from megatron.training.nan_policy import (
    Decision,
    NanPolicy,
    NonFiniteError,
    NonFiniteSite,
    RerunResult,
    Verdict,
    compare_rerun,
    first_site,
)
from megatron.training.pipeline import PipelineRunner
from megatron.training.step_batches import StepBatches
from megatron.training.step_numbers import StepNumbers, Totals
from megatron.training.timers import Timers
from megatron.training.watchdog import Watchdog


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What the loop hears of a step. losses: name -> (sum, count) over the global batch."""

    losses: Mapping[str, tuple[float, float]]
    flags: tuple[float, ...]
    loss_scale: float
    grad_norm: float | None
    num_zeros: int | None
    skipped: bool
    note: str


@dataclasses.dataclass(frozen=True)
class _Attempt:
    """One run of the step's microbatches, gradients reduced."""

    totals: Totals
    divisor: float
    stats: GradStats

    @property
    def nonfinite(self) -> bool:
        return self.totals.nonfinite_microbatches > 0 or self.stats.nonfinite


class StepRunner:
    """Runs optimizer steps over one engine."""

    def __init__(
        self,
        config: Config,
        ps: ParallelState,
        engine: Engine,
        runner: PipelineRunner,
        nan_policy: NanPolicy,
        timers: Timers,
        watchdog: Watchdog,
    ) -> None:
        self._config = config
        self._ps = ps
        self._engine = engine
        self._runner = runner
        self._nan_policy = nan_policy
        self._timers = timers
        self._watchdog = watchdog

    def step(
        self, batches: StepBatches, *, iteration: int, num_microbatches: int, flags: tuple[float, ...]
    ) -> StepResult:
        """Train on the next `num_microbatches` microbatches of this rank.

        iteration: the one this step completes. flags: summed over all ranks with the step's numbers, for the loop.
        Raises NonFiniteError, on every rank alike.
        """
        engine, scaler = self._engine, self._engine.scaler
        batches.begin_step()
        loss_scale = scaler.scale
        attempt = self._attempt(batches, iteration, num_microbatches, flags)
        nonfinite = attempt.nonfinite and self._checks
        verdict = self._nan_policy.decide(nonfinite=nonfinite, scale_at_minimum=scaler.at_minimum)
        note = verdict.reason
        if verdict.decision is Decision.RERUN:
            attempt, verdict = self._rerun(attempt, batches, iteration, num_microbatches, flags)
            note = verdict.reason
        if verdict.decision is Decision.ABORT:
            raise NonFiniteError(self._find_site(batches, iteration, num_microbatches), iteration, verdict)
        skipped = verdict.decision is Decision.SKIP
        with self._phase("optimizer"):
            if not skipped:
                coefficient = clip_coefficient(attempt.stats.norm, self._config.optimizer.clip_grad)
                engine.optimizer.step(attempt.divisor, coefficient)
                engine.model.weights_changed()
            scaler.update(skipped)
        return StepResult(
            losses=attempt.totals.losses,
            flags=attempt.totals.flags,
            loss_scale=loss_scale,
            grad_norm=None if skipped else attempt.stats.norm,
            num_zeros=None if skipped else attempt.stats.num_zeros,
            skipped=skipped,
            note=note,
        )

    @property
    def _checks(self) -> bool:
        return self._config.reliability.check_for_nan_in_loss_and_grad or self._nan_policy.dynamic_loss_scale

    def _attempt(
        self, batches: StepBatches, iteration: int, num_microbatches: int, flags: tuple[float, ...]
    ) -> _Attempt:
        with self._phase("forward-backward"):
            numbers = self._run(batches, iteration, num_microbatches, reduce_gradients=True)
        with self._phase("grad-norm"):
            totals = numbers.reduce(self._ps, flags)
            divisor = self._divisor(totals, num_microbatches)
            stats = self._engine.optimizer.prepare(
                divisor, count_zero_grads=self._config.logging.log_num_zeros_in_grad
            )
        return _Attempt(totals, divisor, stats)

    def _run(
        self, batches: StepBatches, iteration: int, num_microbatches: int, *, reduce_gradients: bool
    ) -> StepNumbers:
        return self._runner.train(
            batches,
            iteration=iteration,
            num_microbatches=num_microbatches,
            loss_scale=self._engine.scaler.scale,
            reduce_gradients=reduce_gradients,
        )

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """A part of the step, for the watchdog and the timers of level 1, which start together on all ranks."""
        log = self._config.logging
        if log.barrier_with_L1_time and log.timing_log_level > 0:
            collectives.barrier(self._ps.control_group)
        with self._watchdog.phase(name), self._timers(name, log_level=1):
            yield

    def _divisor(self, totals: Totals, num_microbatches: int) -> float:
        """What the summed gradients are divided by: see [Note: where gradients are divided]."""
        scale = self._engine.scaler.scale
        if self._config.model.calculate_per_token_loss:
            return scale * max(totals.num_tokens, 1.0)
        return scale * num_microbatches * self._ps.dp_size

    def _rerun(
        self,
        first: _Attempt,
        batches: StepBatches,
        iteration: int,
        num_microbatches: int,
        flags: tuple[float, ...],
    ) -> tuple[_Attempt, Verdict]:
        """The same step again, from the same weights, batches and dropout masks."""
        before = self._digest(first)
        second = self._attempt(batches, iteration, num_microbatches, flags)
        result = compare_rerun(before, self._digest(second), second_nonfinite=second.nonfinite)
        # Equal digests on one rank say nothing of another: one differing rank makes the result differ.
        rank_differs = any(host_data.all_gather_json(result is RerunResult.DIFFERENT, self._ps.control_group))
        result = RerunResult.DIFFERENT if rank_differs else result
        return second, self._nan_policy.decide(
            nonfinite=True, rerun=result, scale_at_minimum=self._engine.scaler.at_minimum
        )

    def _digest(self, attempt: _Attempt) -> bytes:
        """Bits of the losses and of this rank's part of every reduced gradient."""
        digest = hashlib.blake2b(repr(sorted(attempt.totals.losses.items())).encode())
        buffer = self._engine.model.buffer
        for grad in map(buffer.main_grad_part, buffer.names):  # not the buckets: their padding means nothing
            # A copy: numpy pins what it is given, and memory of cut gradients comes and goes.
            bits = grad.detach().clone().cpu().view(torch.uint8)  # sync: a failed step
            digest.update(bits.numpy().data)
        return digest.digest()

    def _find_site(self, batches: StepBatches, iteration: int, num_microbatches: int) -> NonFiniteSite:
        """Run the step once more without reducing, and see on which rank and in which parameter it goes wrong."""
        numbers = self._run(batches, iteration, num_microbatches, reduce_gradients=False)
        mine = self._local_site(numbers)
        sites: list[Any] = host_data.all_gather_json(
            None if mine is None else dataclasses.asdict(mine), self._ps.control_group
        )
        found = first_site(None if site is None else NonFiniteSite(**site) for site in sites)
        # Finite on every rank and yet not in the sum: the sum itself overflowed.
        return found or NonFiniteSite(
            self._ps.rank, value="finite on every rank, but the sum over ranks is not"
        )

    def _local_site(self, numbers: StepNumbers) -> NonFiniteSite | None:
        """This rank's own, from gradients that were not reduced; None where all is finite."""
        microbatch = numbers.first_nonfinite_microbatch
        rank, pp_rank = self._ps.rank, self._ps.pp_rank
        weight = next(self._nonfinite_weights(), None)
        if weight is not None:
            return NonFiniteSite(rank, microbatch, weight, bad_weight=True, pp_rank=pp_rank)
        gradient = next(self._nonfinite_gradients(), None)
        if gradient is not None or microbatch is not None:
            return NonFiniteSite(rank, microbatch, gradient, pp_rank=pp_rank)
        return None

    def _nonfinite_weights(self) -> Iterator[str]:
        """Parameters of which the part that this rank updates is not finite."""
        buffer = self._engine.model.buffer
        return (name for name in buffer.names if not _is_finite(buffer.main_weight_part(name)))

    def _nonfinite_gradients(self) -> Iterator[str]:
        """Parameters whose own gradient of this rank is not finite, after a step without reduction, in model order."""
        model = self._engine.model
        whole = model.buffer.sharding.main_grads is Cut.WHOLE
        found = frozenset(model.nonfinite_keys())  # of gradients that are gone: where they are not whole
        for name in model.buffer.names:
            for key in model.buffer.param_meta[name].grad_keys:
                if not _is_finite(model.buffer.main_grad(key)) if whole else key in found:
                    yield name


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())  # sync: a failed step
