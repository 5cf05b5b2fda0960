"""Loss on held-out data: no dropout, no gradients, the same loss function as training."""

from __future__ import annotations

from collections.abc import Mapping

from megatron.core.parallel_state import ParallelState
from megatron.training.pipeline import PipelineRunner
from megatron.training.step_batches import StepBatches
from megatron.training.step_numbers import StepNumbers


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
    numbers = StepNumbers(ps.device.torch_device)
    for first in range(0, num_microbatches, microbatches_at_a_time):
        batches.begin_step()
        count = min(microbatches_at_a_time, num_microbatches - first)
        runner.evaluate(batches, numbers, iteration=iteration, num_microbatches=count)
    totals = numbers.reduce(ps)
    return {name: total / max(count, 1.0) for name, (total, count) in totals.losses.items()}
