"""A model whose blocks sleep, as a stage of ours and as a module for torch.distributed.pipelining: the same work.

A block adds its weight to what it is given. Its forward, the gradient of its input and the gradient of its weight each
sleep for a time of their own; the numbers are real, so that both sides' weight gradients can be compared. The first
block too computes the gradient of its input, as if layers were before it: all blocks take the same.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.pipeline_parallel.runtime.stage import ModelStage
from megatron.core.weight_grad import WeightGradAccumulator


class Sleeper:
    """Plain sleeps to the end of a computation.

    late_s: how late the system wakes a sleeper, by which it sleeps less. slept_over_s: by how much all computations
    together took longer than they were meant to, so far.
    """

    def __init__(self, late_s: float = 0.0) -> None:
        self.late_s = late_s
        self.slept_over_s = 0.0

    def fill(self, start: float, seconds: float) -> None:
        """Sleep for the rest of what began at `start` (`time.monotonic`) and takes so long."""
        time.sleep(max(0.0, start + seconds - self.late_s - time.monotonic()))
        self.slept_over_s += time.monotonic() - start - seconds

    def calibrate(self, seconds: float, num_sleeps: int) -> None:
        """Take late_s from a few sleeps of this length, the median."""
        late = []
        for _ in range(num_sleeps):
            start = time.monotonic()
            time.sleep(seconds)
            late.append(time.monotonic() - start - seconds)
        self.late_s = statistics.median(late)


class Times:
    """Seconds of a block's forward, input gradient and weight gradient, slept by one sleeper."""

    def __init__(self, sleeper: Sleeper, f_s: float, b_s: float, w_s: float) -> None:
        self.sleeper, self.f_s, self.b_s, self.w_s = sleeper, f_s, b_s, w_s


def input_leaf(x: Tensor) -> Tensor:
    return x if x.requires_grad else x.detach().requires_grad_()


# Ours ------------------------------------------------------------------------------------------------


class _FiledBlock(torch.autograd.Function):
    """What its weight's gradient is made of goes to a sink, as in the framework's layers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, key: str, weight: Tensor, times: Times, sink: SleepingGrads) -> Tensor:
        start = time.monotonic()
        ctx.key, ctx.times, ctx.sink = key, times, sink
        output = x + weight
        times.sleeper.fill(start, times.f_s)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.times.sleeper.fill(time.monotonic(), ctx.times.b_s)
        ctx.sink.put(ctx.key, None, grad)
        return grad, None, None, None, None


class SleepingGrads(WeightGradAccumulator):
    """The framework's accumulator; each of its gradients takes time."""

    def __init__(self, times: Times) -> None:
        super().__init__()
        self._times = times

    def _compute(self, key: str, x: Any, dy: Tensor, microbatch: int) -> None:
        start = time.monotonic()
        super()._compute(key, x, dy, microbatch)
        self._times.sleeper.fill(start, self._times.w_s)


class OurStage:
    """A chunk: some blocks, a `ModelStage` over them, and their gradients."""

    def __init__(
        self, blocks: Sequence[int], inputs: Sequence[Tensor], times: Times, *, begins: bool, ends: bool
    ) -> None:
        width = inputs[0].shape[1]
        self._inputs, self._times, self._begins, self._ends = inputs, times, begins, ends
        self._weights = {f"block{block}": torch.full((width,), 0.25) for block in blocks}
        self._sink = SleepingGrads(times)
        self._sink.bind_new(dict.fromkeys(self._weights, (width,)), torch.float32, torch.device("cpu"))
        self.stage = ModelStage(self._run, self._sink, begins=begins, ends=ends)

    @property
    def grads(self) -> dict[str, Tensor]:
        """Summed over all steps."""
        return self._sink.main_grads

    def _run(self, microbatch: int, hidden: Tensor | None) -> Tensor:
        x = input_leaf(self._inputs[microbatch]) if hidden is None else hidden
        for key, weight in self._weights.items():
            x = _FiledBlock.apply(x, key, weight, self._times, self._sink)
        return x.mean() if self._ends else x


class PlainStage:
    """`protocols.Stage` of blocks that only sleep, without autograd: what a step takes over its sleeps is due to the
    executor and its messages. hands_on: what stages pass to each other."""

    splits = True

    def __init__(self, num_blocks: int, hands_on: Tensor, times: Times, *, ends: bool) -> None:
        self._num_blocks, self._hands_on, self._times, self._ends = num_blocks, hands_on, times, ends

    def forward(self, microbatch: int, hidden: Tensor | None) -> Tensor | None:
        self._sleep(self._times.f_s)
        return None if self._ends else self._hands_on.detach()

    def backward(self, microbatch: int, grad: Tensor | None) -> Tensor:
        self._sleep(self._times.b_s, self._times.w_s)
        return self._hands_on.detach()

    def backward_input(self, microbatch: int, grad: Tensor | None) -> Tensor:
        self._sleep(self._times.b_s)
        return self._hands_on.detach()

    def backward_weight(self, microbatch: int) -> None:
        self._sleep(self._times.w_s)

    def check_empty(self) -> None:
        pass

    def _sleep(self, *each_s: float) -> None:
        for _ in range(self._num_blocks):
            for seconds in each_s:
                self._times.sleeper.fill(time.monotonic(), seconds)


# Torch's ---------------------------------------------------------------------------------------------


class _InputPath(torch.autograd.Function):
    """The forward sleeps here, and the input gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, times: Times) -> Tensor:
        start = time.monotonic()
        ctx.times = times
        output = x.view_as(x)
        times.sleeper.fill(start, times.f_s)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.times.sleeper.fill(time.monotonic(), ctx.times.b_s)
        return grad, None


class _WeightPath(torch.autograd.Function):
    """The weight gradient sleeps here."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, times: Times) -> Tensor:
        ctx.times = times
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.times.sleeper.fill(time.monotonic(), ctx.times.w_s)
        return grad, None


class TorchBlock(nn.Module):
    """Both paths meet in an addition: there torch's split backward parts them."""

    def __init__(self, width: int, times: Times) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), 0.25))
        self._times = times

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = _InputPath.apply(x, self._times) + _WeightPath.apply(self.weight, self._times)
        return added


class TorchStage(nn.Module):
    """A chunk: some blocks."""

    def __init__(self, blocks: Sequence[int], width: int, times: Times) -> None:
        super().__init__()
        self._keys = [f"block{block}" for block in blocks]
        self.blocks = nn.ModuleList(TorchBlock(width, times) for _ in blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = input_leaf(x)
        for block in self.blocks:
            x = block(x)
        return x

    @property
    def grads(self) -> dict[str, Tensor]:
        """Summed over all steps."""
        found = zip(self._keys, self.parameters(), strict=True)
        return {key: weight.grad for key, weight in found if weight.grad is not None}
