"""What the engine does when a unit runs: the hooks' events as gathers, frees and reductions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from megatron.core.distributed.engine_parts import Reduction, Weights
from megatron.core.distributed.units import Unit


class _Engine(Protocol):
    @property
    def units(self) -> Sequence[Unit]: ...

    @property
    def more_microbatches(self) -> bool: ...

    def backward_reached(self) -> None: ...


class Drive:
    """The `UnitDriver` of an engine."""

    def __init__(self, engine: _Engine, reduction: Reduction, weights: Weights) -> None:
        self._engine, self._reduction, self._weights = engine, reduction, weights
        self._training = False
        self._evaluating = False

    def begin_forward(self, *, training: bool) -> None:
        self._training, self._evaluating = training, not training
        self._weights.begin(training=training, repeats=self._engine.more_microbatches)

    def end_forward(self, *, training: bool) -> None:
        self._evaluating = False
        if not training:
            self._weights.leave_evaluation()

    def enter_forward(self, unit: int, *, recomputing: bool) -> None:
        if not recomputing and not self._evaluating:
            self._reduction.forward_reached(unit)
        self._weights.need(unit)

    def leave_forward(self, unit: int, *, recomputing: bool) -> None:
        if recomputing:
            self._weights.leave_recompute(unit)
        else:
            self._weights.leave_forward(unit, training=self._training)

    def enter_backward(self, unit: int) -> None:
        self._engine.backward_reached()
        self._reduction.make_room(unit)  # before more is gathered: activations are at their most
        if self._engine.units[unit].backward_reads:
            self._weights.need(unit)

    def passed(self, unit: int, *, last: bool) -> None:
        """Autograd runs the calls of a forward one after the other: between two of them weights need not be whole."""
        if last:
            self._reduction.passed(unit)
        if last or not self._engine.units[unit].lasts:
            self._weights.passed(unit)
