"""What each unit keeps gathered or unreduced, so that the fewest bytes travel in the memory given (floor 0, pure).

In a microbatch with everything freed at once, a unit is gathered `gathers` times (2: forward and backward) and its
gradients are reduced once. In a step of m microbatches

    what is kept                          bytes held            travels less by
    weights, from forward to backward     its full weights      (gathers - 1) m gathers
    weights, for the step                 its full weights      gathers m - 1 gathers
    gradients, unreduced                  its full gradients    m - 1 reductions

"""

from __future__ import annotations

import dataclasses
from enum import Enum


class ReshardPlanError(ValueError):
    """--fsdp-reshard-policy and --fsdp-memory-budget do not go together, or not with the strategy."""


class Keep(Enum):
    """How long a unit's weights stay gathered."""

    NOTHING = "nothing"  # freed after its forward, and after its backward
    TO_BACKWARD = "to_backward"  # from the forward to the backward of the same microbatch
    STEP = "step"  # gathered once a step, freed after its last backward


@dataclasses.dataclass(frozen=True)
class UnitFacts:
    """What the plan needs to know of a unit.

    gather_bytes: its full weights; reduce_bytes: its full gradients as they travel; gathers: in a microbatch that
    keeps nothing: 2, but 1 where backward reads no weights, for the last unit of the forward (its backward follows at
    once), and for one that stays from its first to its last use; late_bytes: what its gradients hold while they stay
    unreduced (0: reduce_bytes).
    """

    name: str
    gather_bytes: int
    reduce_bytes: int
    gathers: int = 2
    late_bytes: int = 0

    def __post_init__(self) -> None:
        assert min(self.gather_bytes, self.reduce_bytes, self.late_bytes) >= 0, self
        assert self.gathers >= 1, self

    @property
    def unreduced_bytes(self) -> int:
        return self.late_bytes or self.reduce_bytes


@dataclasses.dataclass(frozen=True)
class UnitPolicy:
    """What a unit keeps. reduce_late: its gradients are reduced once a step, after the last microbatch."""

    keep: Keep = Keep.NOTHING
    reduce_late: bool = False
