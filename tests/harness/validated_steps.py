"""Training by the trainer's steps that are validated afterwards."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.transport.parallel_state import ParallelState
from megatron.training.config.config import Config
from megatron.training.engine import Engine
from megatron.training.guard.nan_policy import NanPolicy
from megatron.training.run.data import StepBatches
from megatron.training.run.parts import RunParts
from megatron.training.run.pipeline import PipelineRunner
from megatron.training.run.validated_step import ValidatedStepRunner
from megatron.training.state import StepResult, StepTask, TrainState
from tests.harness.layouts import Layout, Pieces, Run, session_of
from tests.harness.ranks import RankContext


def parts_of(
    config: Config, ps: ParallelState, engine: Engine, runner: PipelineRunner, policy: NanPolicy
) -> RunParts:
    """What steps take of a run."""
    return RunParts(session_of(config, ps), engine, runner, policy, TrainState.start(config))


def train_validated(
    ctx: RankContext, layout: Layout, words: Sequence[str], global_batch: int, steps: int
) -> tuple[list[float], list[float], Pieces, int]:
    """Losses, norms, main weights, and how many steps were taken back. layout: with flags of validation and clip."""
    run = Run(ctx, layout, words, global_batch=global_batch)
    results = validated_results(run, steps)
    sums = [result.losses["lm loss"] for result in results]
    return (
        [total / count for total, count in sums],
        [result.grad_norm for result in results],
        run.main_weights(),
        sum(result.rolled_back for result in results),
    )


def validated_results(run: Run, steps: int) -> list[StepResult]:
    """What came of the first steps of a run."""
    policy = NanPolicy("skip", 100, dynamic_loss_scale=False)
    parts = parts_of(run.config, run.ps, run.engine, run.runner, policy)
    runner = ValidatedStepRunner(parts, lambda _: None)
    batches = StepBatches(
        (one for step in range(1, steps + 1) for one in run.microbatches(step)),
        reads=run.spec.reads_data(run.ps.pp_rank),
    )
    results: list[StepResult] = []
    for step in range(1, steps + 1):
        results += runner.step(batches, StepTask(step, run.num_microbatches))
    return [*results, *runner.settle(batches)]
