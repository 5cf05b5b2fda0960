"""Gradients and losses that go wrong on command, on one stage of a pipeline: for whoever wraps a forward step.

A factor that is a power of two leaves digits alone, and what a stage hands on to the stages before it is put right
again: they know nothing of the fault but what they are told.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor, nn

LARGE = 2.0**12  # gradients multiplied with this are clipped by any limit that a test uses


@dataclasses.dataclass(frozen=True)
class Fault:
    """In one iteration. stage: as a share of the pipeline, 0 = first, 1 = last. factor: gradients of that stage are
    multiplied with it; inf, nan: in loss too where `loss`. microbatch: of the rank's own; None: all. attempts: of the
    iteration, in which it happens, counted from 1."""

    iteration: int
    stage: float
    factor: float
    loss: bool = False
    microbatch: int | None = 1
    attempts: range = range(1, 1_000)

    @classmethod
    def parse(cls, text: str) -> Fault:
        """iteration:stage:factor[:loss][:first-last attempt], as in 3:1:nan:loss:1-1."""
        iteration, stage, factor, *more = text.split(":")
        first, last = next((word.split("-") for word in more if "-" in word), ("1", "999"))
        attempts = range(int(first), int(last) + 1)
        return cls(int(iteration), float(stage), float(factor), "loss" in more, attempts=attempts)


class _Scaled(torch.autograd.Function):
    """The value as it is, its gradient times a factor; factor 0: none."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        return (torch.zeros_like(grad) if ctx.factor == 0.0 else grad * ctx.factor), None


class Faults:
    """Of one rank. Counts the attempts of each iteration by forwards of its first microbatch on a stage."""

    def __init__(self, faults: list[Fault]) -> None:
        self._faults = faults
        self._attempts: dict[tuple[int, int], int] = {}

    def into(
        self, model: nn.Module, stage: int, num_stages: int, iteration: int, microbatch: int
    ) -> list[Fault]:
        """Before the model's forward: the faults of this one. `out_of` makes them of its output."""
        if not model.training:
            return []
        key = stage, iteration
        if microbatch == 0:
            self._attempts[key] = self._attempts.get(key, 0) + 1
        mine = [
            fault
            for fault in self._faults
            if fault.iteration == iteration
            and round(fault.stage * (num_stages - 1)) == stage
            and fault.microbatch in (None, microbatch)
            and self._attempts[key] in fault.attempts
        ]
        if stage:
            held: Any = model
            for fault in mine:
                back = 1.0 / fault.factor if math.isfinite(fault.factor) else 0.0
                held.set_input_tensor(_Scaled.apply(held._input, back))
        return mine

    @staticmethod
    def out_of(output: Tensor, mine: list[Fault]) -> Tensor:
        for fault in mine:
            output = output * fault.factor if fault.loss else _Scaled.apply(output, fault.factor)
        return output
