"""What a rank does again when its last step proves wrong: the forwards before VALIDATE, as the plan says it.

[Note: messages of undone forwards] All ranks come to the same decision, and do again what stands before their VALIDATE.
By then a rank may have sent outputs that the next one was to receive only behind its own VALIDATE. That one knows the
rank's row: it receives them and drops them, so that what comes next on the route is of the forwards done again.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron.core.pipeline_parallel.plan.ir import RECV_F, SEND_F, F, Kind, Plan, RawOp, Row


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
