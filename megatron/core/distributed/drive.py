"""What the engine does when a unit runs: the hooks' events as gathers, frees and reductions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from megatron.core.distributed.engine_parts import Reduction, Weights
from megatron.core.distributed.sharding import Cut, Sharding
from megatron.core.distributed.units import Unit
from megatron.core.module import ModelError


class _Engine(Protocol):
    @property
    def units(self) -> Sequence[Unit]: ...

    @property
    def sharding(self) -> Sharding: ...

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

    def enter_backward(self, unit: int, *, differentiable: bool) -> None:
        """Raises ModelError where weights would be freed that a second backward reads."""
        if differentiable:
            if self._engine.sharding.weights is not Cut.WHOLE:
                raise ModelError(
                    f"unit {self._engine.units[unit].name!r}: create_graph=True with --data-parallel-sharding-strategy "
                    "optim_grads_params, which frees weights behind a backward, so that a backward through it could "
                    "not read them; use optim_grads, optim or no_shard, whose weights stay whole"
                )
            return  # it takes no part in the step: gradients of parameters come with the backward through it
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
