"""Loss on held-out data: no dropout, no gradients, the same loss function as training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from megatron.core.module import ModelContext
from megatron.core.parallel_state import ParallelState
from megatron.training.forward_backward import ForwardStep, StepNumbers, evaluate_loss


def evaluate(
    model: nn.Module,
    context: ModelContext,
    ps: ParallelState,
    forward_step: ForwardStep,
    batches: Iterator[Any],
    *,
    iteration: int,
    num_microbatches: int,
) -> Mapping[str, float]:
    """Mean of each reported loss over `num_microbatches` of this rank and all its data-parallel peers.

    num_microbatches counts every microbatch of the evaluation (iterations x microbatches an iteration). Communicates
    over dp, once. The model's training mode is restored.
    """
    numbers = StepNumbers(ps.device.torch_device)
    was_training = model.training
    model.eval()
    with torch.no_grad():
        for index in range(num_microbatches):
            context.begin_microbatch(iteration, index, index * ps.dp_size + ps.dp_rank)
            output, loss_func = forward_step(batches, model)
            numbers.add(evaluate_loss(output, loss_func))
            del output
    model.train(was_training)
    totals = numbers.reduce(ps)
    return {name: total / max(count, 1.0) for name, (total, count) in totals.losses.items()}
