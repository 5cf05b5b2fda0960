"""The microbatches of one step on one rank: forward, loss, backward, in order; numbers summed over data parallel.

[Note: where gradients are divided] Backward runs on each microbatch's mean loss (its token sum with
`--calculate-per-token-loss`) times the loss scale. Gradients are summed over microbatches and data-parallel ranks and
divided once, inside the optimizer, by `Totals.divisor`. Nothing is divided in the reduction.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core import collectives
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.module import ModelContext
from megatron.core.parallel_state import ParallelState
from megatron.training.timers import Timers

LossFunc = Callable[[Tensor], tuple[Any, ...]]
ForwardStep = Callable[[Iterator[Any], nn.Module], tuple[Tensor, LossFunc]]


@dataclasses.dataclass(frozen=True)
class MicrobatchLoss:
    """loss: scalar to differentiate. num_tokens: count that `loss` is the sum over, or None when it is a mean."""

    loss: Tensor
    num_tokens: Tensor | None
    report: Mapping[str, Any]


def evaluate_loss(output: Tensor, loss_func: LossFunc) -> MicrobatchLoss:
    """Call the user's loss function, in either of Megatron's two shapes: (mean, report) or (sum, tokens, report)."""
    result = loss_func(output)
    if len(result) == 3:
        loss, num_tokens, report = result
        return MicrobatchLoss(loss, torch.as_tensor(num_tokens, device=loss.device), report)
    if len(result) == 2:
        return MicrobatchLoss(result[0], None, result[1])
    raise ValueError(
        f"the loss function returned {len(result)} values; return (loss, report) or (loss sum, num tokens, report)"
    )


class StepNumbers:
    """Sums over the microbatches of one step, packed into one float64 vector for one all-reduce.

    Layout: [microbatches with a non-finite loss, tokens, flags..., (sum, count) for each reported loss].
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._nonfinite = torch.zeros((), dtype=torch.float64, device=device)
        self._tokens = torch.zeros((), dtype=torch.float64, device=device)
        self._report: dict[str, Tensor] = {}  # name -> [sum, count]
        self._finite: list[Tensor] = []  # one flag a microbatch, of this rank

    def add(self, result: MicrobatchLoss) -> None:
        finite = torch.isfinite(result.loss.detach())
        self._finite.append(finite)
        self._nonfinite += ~finite
        if result.num_tokens is not None:
            self._tokens += result.num_tokens
        for name, value in result.report.items():
            pair = _sum_and_count(value, self._device)
            self._report[name] = self._report[name] + pair if name in self._report else pair

    @property
    def first_nonfinite_microbatch(self) -> int | None:
        """This rank's first microbatch with a non-finite loss."""
        return next(
            (i for i, finite in enumerate(self._finite) if not bool(finite)), None
        )  # sync: a failed step

    def reduce(self, ps: ParallelState, flags: tuple[float, ...] = ()) -> Totals:
        """Sum over the data-parallel ranks. Communicates over dp, once; syncs with the device, once."""
        names = list(self._report)
        head = torch.tensor(flags, dtype=torch.float64, device=self._device)
        vector = torch.cat([torch.stack([self._nonfinite, self._tokens]), head, *self._report.values()])
        collectives.all_reduce(vector, ps.dp_group)
        nonfinite, tokens, *rest = vector.tolist()  # sync: the step's only look at its own numbers
        pairs = rest[len(flags) :]
        losses = {name: (pairs[2 * i], pairs[2 * i + 1]) for i, name in enumerate(names)}
        return Totals(int(nonfinite), tokens, tuple(rest[: len(flags)]), losses)


@dataclasses.dataclass(frozen=True)
class Totals:
    """One step's numbers over all data-parallel ranks."""

    nonfinite_microbatches: int
    num_tokens: float
    flags: tuple[float, ...]
    losses: Mapping[str, tuple[float, float]]  # name -> (sum, count); their ratio is what is logged


def _sum_and_count(value: Any, device: torch.device) -> Tensor:
    """A reported loss as [sum, count] in float64: a pair as it is, a single number with count 1."""
    if isinstance(value, tuple | list):
        parts = [torch.as_tensor(v, dtype=torch.float64, device=device).detach().reshape(()) for v in value]
        assert len(parts) == 2, f"a reported loss is a number or (sum, count), got {len(parts)} values"
        return torch.stack(parts)
    flat = torch.as_tensor(value, dtype=torch.float64, device=device).detach().reshape(-1)
    assert flat.numel() in (1, 2), f"a reported loss is a number or (sum, count), got {flat.numel()} values"
    return flat if flat.numel() == 2 else torch.cat([flat, flat.new_ones(1)])


def run_microbatches(
    model: DistributedDataParallel,
    context: ModelContext,
    ps: ParallelState,
    forward_step: ForwardStep,
    batches: Iterator[Any],
    *,
    iteration: int,
    num_microbatches: int,
    loss_scale: float,
    per_token_loss: bool,
    timers: Timers,
    reduce_gradients: bool = True,
) -> StepNumbers:
    """Forward and backward of every microbatch; main gradients hold the sums afterwards.

    With `reduce_gradients`, the last microbatch's backward starts the all-reduces over dp as gradients finish, and
    they are complete on return. Without, gradients stay this rank's own.
    """
    numbers = StepNumbers(ps.device.torch_device)
    model.zero_grad_buffer()
    for index in range(num_microbatches):
        context.begin_microbatch(iteration, index, index * ps.dp_size + ps.dp_rank)
        model.begin_microbatch(index, last=reduce_gradients and index == num_microbatches - 1)
        with timers("forward-compute", log_level=2):
            output, loss_func = forward_step(batches, model.module)
            result = evaluate_loss(output, loss_func)
            numbers.add(result)
            loss = _loss_to_differentiate(result, per_token_loss)
            del output, result  # the graph alone keeps what backward needs
        with timers("backward-compute", log_level=2):
            (loss * loss_scale if loss_scale != 1.0 else loss).backward()
    if reduce_gradients:
        with timers("all-grads-sync", log_level=2):
            model.finish()
    return numbers


def _loss_to_differentiate(result: MicrobatchLoss, per_token_loss: bool) -> Tensor:
    if per_token_loss:
        if result.num_tokens is None:
            raise ValueError(
                "--calculate-per-token-loss needs a loss function that returns (loss sum, num tokens, report)"
            )
        return result.loss
    return result.loss if result.num_tokens is None else result.loss / result.num_tokens.clamp(min=1)
