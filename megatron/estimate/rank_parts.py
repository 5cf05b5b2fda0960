"""What the account of a rank is made of, and one of its moments (floor 0, pure)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megatron.estimate.description import ModelPiece


class HeldMoment(NamedTuple):
    """Behind the operation at `place`, where access is -1; else at the beginning of that access of its computation, or
    behind the operation at `place` in its middle."""

    place: int
    access: int
    held: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.held.values())


@dataclasses.dataclass(frozen=True)
class RankParts:
    """What an account is made of.

    at_rest: bytes between steps by the tracker's categories. stages: the pieces of each of the rank's stages, in the
    order of the forward. batch_bytes: of a microbatch's batch, kept for the step; 0 where none is. exchange: what
    summing a unit takes beside its gradients, by its name, whether over instances, and whether it was summed before in
    the step. resting: bytes of a unit's gradients at rest that have no memory from a step's beginning to its first sum.
    slots: by unit whose weights and gradients lie in one of a double buffer, which; what would take one waits until it
    is free. drawn: microbatches of the step whose batches are there before the row begins, because the row is of its
    last microbatches only. step: what parts of the optimizer's step take at most beside what is there at the end of the
    row, by kind.
    """

    at_rest: Mapping[str, int]
    stages: Mapping[int, Sequence[ModelPiece]]
    batch_bytes: int = 0
    exchange: Mapping[tuple[str, bool, bool], int] = dataclasses.field(default_factory=dict)
    resting: Mapping[str, int] = dataclasses.field(default_factory=dict)
    slots: Mapping[str, int] = dataclasses.field(default_factory=dict)
    drawn: int = 0
    step: Mapping[str, Mapping[str, int]] = dataclasses.field(default_factory=dict)
