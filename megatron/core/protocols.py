"""The joint of the house: what models, engines and pipelines know of each other.

Models report weight gradients to a `WeightGradSink` that is a constructor argument of each layer; engines listen
to the sink. Neither imports the other.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class WeightGradSink(Protocol):
    """Where layers put what their weight gradients are made of."""

    def put(self, key: str, x: Tensor | None, dy: Tensor) -> None:
        """One contribution to the gradient filed under `key` (see `ParamMeta.grad_keys`).

        x floating [tokens..., in], dy [tokens..., out]: a matrix, gradient dy^T x.
        x integer [tokens...], dy [tokens..., out]: a lookup table, rows of dy added at x.
        x None, dy [tokens..., out] or [out]: a bias or norm, gradient the sum over tokens.
        """

    def done(self, key: str, microbatch: int) -> None:
        """The contribution of `microbatch` to `key` is complete: the only signal that engines act on."""


class GradListener(Protocol):
    """An engine that reduces gradients hears of every finished contribution."""

    def grad_ready(self, key: str, microbatch: int) -> None: ...
