"""What a rank does again when its last step proves wrong: the forwards before VALIDATE, as the plan says it.

[Note: messages of undone forwards] All ranks come to the same decision, and do again what stands before their VALIDATE.
By then a rank may have sent outputs that the next one was to receive only behind its own VALIDATE. That one knows the
rank's row: it receives them and drops them, so that what comes next on the route is of the forwards done again.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.pipeline_parallel.plan.ir import RECV_F, SEND_F, F, Kind, Plan, RawOp, Row


@dataclass(frozen=True)
class Undone:
    """forwards: (stage, microbatch) of a rank's forwards before VALIDATE. surplus: receives of its row that stand
    behind VALIDATE, whose messages have been sent before the sender's; in the order of their route."""

    forwards: tuple[tuple[int, int], ...]
    surplus: tuple[RawOp, ...]


def undone(plan: Plan, rank: int) -> Undone:
    """plan: verified. Nothing where it has no VALIDATE."""
    before, behind = _halves(plan.rows[rank])
    sent: set[int] = set()
    if rank > 0:
        sent = {op[2] for op in _halves(plan.rows[rank - 1])[0] if op[0] == SEND_F}
    return Undone(
        tuple((op[1], op[2]) for op in before if op[0] == F),
        tuple(op for op in behind if op[0] == RECV_F and op[1] == rank and op[2] in sent),
    )


def _halves(row: Row) -> tuple[Row, Row]:
    place = next((place for place, op in enumerate(row) if op[0] == Kind.VALIDATE), 0)
    return row[:place], row[place:]
