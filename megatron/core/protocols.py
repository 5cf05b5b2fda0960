"""The joint of the house: what models, engines, pipelines and optimizers know of each other.

Models report weight gradients to a `WeightGradSink` that is a constructor argument of each layer; engines listen
to the sink. A pipeline's executor drives `Stage`s (models) and a `GradSync` (data parallel engine); whoever decides
on a step drives a `Stepper` (optimizer). None of them imports another.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Operand(Protocol):
    """An input of a linear layer that this rank holds a part of: whole only once it has been gathered."""

    def start(self) -> None:
        """Begin to gather; communicates (tp). A second call does nothing."""

    def whole(self) -> Tensor:
        """[tokens..., in]; communicates (tp) at the first call, unless the gather is under way."""


class WeightGradSink(Protocol):
    """Where layers put what their weight gradients are made of."""

    @property
    def deferring(self) -> bool:
        """Whether `put` only files what it is given, so that gathering an operand ahead would be early."""

    @property
    def keeps_gathered(self) -> bool:
        """Whether F keeps inputs that it has gathered (sequence parallel), so that W need not gather them again."""

    def put(
        self, key: str, x: Tensor | Operand | None, dy: Tensor, ends: tuple[int, ...] | None = None
    ) -> None:
        """One contribution to the gradient filed under `key` (see `ParamMeta.grad_keys`).

        x floating [tokens..., in], dy [tokens..., out]: a matrix, gradient dy^T x.
        x integer [tokens...], dy [tokens..., out]: a lookup table, rows of dy added at x.
        x None, dy [tokens..., out]: a bias, gradient the sum over tokens; dy of the gradient's shape: the gradient.
        ends: of experts, whose gradients are one [experts, ...]; where each one's rows of x [rows, in], if there is
        one, and dy [rows, out] end.
        """


class GradListener(Protocol):
    """An engine that reduces gradients hears of every contribution. Where it has a set `fresh`, only of the beginnings
    of those whose keys are in there: all others are added to what there is."""

    def grad_begins(self, key: str) -> bool:
        """A contribution to `key` is about to be written: its buffer, which may be another one than before, has memory
        on return. True: what is in it is to be overwritten, False: added to."""

    def grad_ready(self, key: str, microbatch: int) -> None:
        """A contribution is complete."""


class Work(Protocol):
    """Something under way; `wait` returns once its result can be used."""

    def wait(self) -> None: ...


class Stage(Protocol):
    """One chunk of the model in one pipeline stage. Microbatches are numbered within the step."""

    @property
    def splits(self) -> bool:
        """Whether B and W can run apart from each other."""

    def forward(self, microbatch: int, hidden: Tensor | None) -> Tensor | None:
        """F. hidden: [s, b, h] of the stage before, None where this one begins the model. The output to hand on, [s, b,
        h], None where the loss was computed. Keeps what the backward needs, not the output itself."""

    def backward(self, microbatch: int, grad: Tensor | None) -> Tensor | None:
        """BW: gradient of the output, [s, b, h] or None after the loss, -> of the input (None where it begins)."""

    def backward_input(self, microbatch: int, grad: Tensor | None) -> Tensor | None:
        """B: as `backward`, weight gradients filed for later."""

    def backward_weight(self, microbatch: int, units: tuple[int, int] | None = None) -> None:
        """W: the weight gradients that B filed. units: (first, end) of those whose gradients are meant, all if None."""

    def check_empty(self) -> None:
        """After the step's last operation: assert that nothing is kept for any microbatch."""


class WeightGatherer(Protocol):
    """The weights of an engine's units, by their numbers. What begins here runs beside computations."""

    def start(self, unit: int) -> None:
        """UNSHARD: begin to make the unit's weights whole."""

    def wait(self, unit: int) -> None:
        """Return once the unit's weights are whole."""

    def free(self, unit: int) -> None:
        """RESHARD: free what `start` gathered."""


class GradReducer(Protocol):
    """The gradients of an engine's units, by their numbers. What begins here runs beside computations."""

    def start(self, unit: int) -> None:
        """REDUCE: begin to sum what has been contributed to the unit's gradients since the last sum."""

    def start_outer(self, unit: int) -> None:
        """HSDP_ALL_REDUCE: begin to sum what `start` has summed over distributed optimizer instances."""


class GradSync(Protocol):
    """A data parallel engine seen from a pipeline: what the plan's operations of data parallelism call, unit by unit.

    All communicate over data parallel ranks, which make the same calls in the same order, and raise PeerLostError.
    """

    gathers: WeightGatherer
    reductions: GradReducer

    def unit_number(self, chunk: int, unit: int) -> int:
        """The engine's number of a unit. chunk: local number of a model chunk. unit: its place in the chunk's
        `StageUnits.units`."""

    def finish(self) -> None:
        """After the step's last operation: whatever was not reduced is; gradients are complete, and the same on all
        ranks that share them."""

    def weights_changed(self) -> None:
        """The optimizer has written this rank's weights: what was gathered is out of date, and freed."""


class UnitListener(Protocol):
    """Hears when a model comes to the units of its chunks, in forwards, backwards and W's."""

    def unit_begins(self, chunk: int, unit: int) -> None:
        """The first module of a unit is about to run, its first gradient has arrived, it is about to be recomputed, or
        its first weight gradient to be added. It may be told more than once. The unit's weights can be read on return.
        """


class Stepper(Protocol):
    """An optimizer whose step can be decided on, and undone."""

    def step(self, divisor: float, clip_coefficient: float = 1.0) -> None:
        """Update the weights with gradients * clip_coefficient / divisor."""

    def snapshot(self) -> None:
        """Keep weights and optimizer state as they are; until `commit`, steps leave the gradients as they are."""

    def snapshot_bytes(self) -> int:
        """What `snapshot` takes."""

    def rollback(self) -> None:
        """Put back what `snapshot` kept, bit for bit."""

    def commit(self) -> None:
        """Forget what `snapshot` kept."""
