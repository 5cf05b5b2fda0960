"""What a step is decided on, as ranks of a pipeline pass it on, what is decided, and what is done again (floor 0).

A state is exact whichever way it came together: each region of the model has its number on one stage and zero on all
others, so ranks that add in any order come to the bits of `MixedPrecisionOptimizer.prepare` (see clip_grads, [Note: the
norm's bits]). A partial state's norm is at most the whole one's, in these bits too (rounding keeps order): where the
whole model may step unclipped, so might every rank with what it knew.

[Note: messages of undone forwards] All ranks come to the same decision, and do again what stands before their VALIDATE.
By then a rank may have sent outputs that the next one was to receive only behind its own VALIDATE. That one knows the
rank's row: it receives them and drops them, so that what comes next on the route is of the forwards done again.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from megatron.core.pipeline_parallel.plan.ir import RECV_F, SEND_F, F, Kind, Plan, RawOp, Row


@dataclasses.dataclass(frozen=True)
class ValidationState:
    """sums: [regions of the whole model], squared sums of gradients, undivided. num_zeros: elements of gradients that
    are zero, where they are counted. nonfinite: some loss or gradient is not finite. extras: of no meaning here, added
    up with the rest (losses, flags). stepped: some rank steps on what it knows."""

    sums: tuple[float, ...]
    num_zeros: float
    nonfinite: bool
    extras: tuple[float, ...] = ()
    stepped: bool = False

    def __add__(self, other: ValidationState) -> ValidationState:
        return ValidationState(
            _added(self.sums, other.sums, "regions"),
            self.num_zeros + other.num_zeros,
            self.nonfinite or other.nonfinite,
            _added(self.extras, other.extras, "extras"),
            self.stepped or other.stepped,
        )

    @property
    def finite(self) -> bool:
        return not self.nonfinite and all(map(math.isfinite, self.sums))

    @property
    def numbers(self) -> list[float]:
        """For a message: `like` reads it. All are fp64."""
        return [self.num_zeros, float(self.nonfinite), float(self.stepped), *self.sums, *self.extras]

    def like(self, numbers: Sequence[float]) -> ValidationState:
        """Another one of the same model, from its `numbers`."""
        assert len(numbers) == len(self.numbers), f"{len(numbers)} numbers, not {len(self.numbers)}"
        num_zeros, nonfinite, stepped, *rest = numbers
        sums, extras = tuple(rest[: len(self.sums)]), tuple(rest[len(self.sums) :])
        return ValidationState(sums, num_zeros, nonfinite != 0.0, extras, stepped != 0.0)


def _added(one: tuple[float, ...], other: tuple[float, ...], what: str) -> tuple[float, ...]:
    assert len(one) == len(other), f"{len(one)} and {len(other)} {what}"
    return tuple(a + b for a, b in zip(one, other, strict=True))


@dataclasses.dataclass(frozen=True)
class Decision:
    """coefficient: what gradients are multiplied with; None: the step is skipped. clean: nothing but an unclipped step
    of finite gradients, which is what ranks step on before they know all."""

    coefficient: float | None
    clean: bool


class Go(enum.Enum):
    """What follows VALIDATE, on all ranks alike. ON: the rest of the row. AGAIN: the forwards before it once more, then
    the rest. STOP: the forwards are dropped, and the step ends here."""

    ON = "on"
    AGAIN = "again"
    STOP = "stop"


@dataclasses.dataclass(frozen=True)
class Validation:
    """What VALIDATE does. decide: communicates over the pipeline, perhaps changes the weights. forget: a stage's
    forward of a microbatch did not happen (stage, microbatch): nothing of it is kept, or counted."""

    decide: Callable[[], Go]
    forget: Callable[[int, int], None]


class RollbackOps(NamedTuple):
    """forwards: (stage, microbatch) of a rank's forwards before VALIDATE. surplus: receives of its row that stand
    behind VALIDATE, whose messages have been sent before the sender's; in the order of their route."""

    forwards: tuple[tuple[int, int], ...]
    surplus: tuple[RawOp, ...]


def rollback_ops(plan: Plan, rank: int) -> RollbackOps:
    """plan: verified. Nothing where it has no VALIDATE."""
    row = plan.rows[rank]
    validate = _validate(row)
    sent: set[int] = set()
    if rank > 0:
        previous = plan.rows[rank - 1]
        sent = {op[2] for op in previous[: _validate(previous)] if op[0] == SEND_F}
    return RollbackOps(
        tuple((op[1], op[2]) for op in row[:validate] if op[0] == F),
        tuple(op for op in row[validate:] if op[0] == RECV_F and op[1] == rank and op[2] in sent),
    )


def _validate(row: Row) -> int:
    return next((place for place, op in enumerate(row) if op[0] == Kind.VALIDATE), 0)
