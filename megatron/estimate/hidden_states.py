"""Who has what stages hand on, and what follows from pieces in a row (floor 0, pure).

[Note: who has a hidden state] What a stage hands on belongs to whoever still has it: the one that has to send it, or
whose send is not known to be complete; the one that has received it and not used it; the backward that will read it as
its input or its output; the W that it is filed for. It is counted once, as a message where only messages have it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from megatron.core.pipeline_parallel.plan import ir
from megatron.core.pipeline_parallel.plan.held.sends import Key
from megatron.estimate.description import OUTSIDE, ModelPiece


class SharedStates:
    """Tensors that stages hand on. See [Note: who has a hidden state]."""

    def __init__(self) -> None:
        self._holders: dict[Key, set[str]] = {}
        self._bytes: dict[Key, int] = {}
        self.kept = self.in_messages = 0  # bytes that activations have, and those that only messages have

    def hold(self, key: Key, num_bytes: int, *holders: str) -> None:
        self._count(key, -1)
        self._bytes[key] = num_bytes
        self._holders.setdefault(key, set()).update(holders)
        self._count(key, 1)

    def let_go(self, key: Key, holder: str) -> None:
        self._count(key, -1)
        holders = self._holders.get(key, set())
        holders.discard(holder)
        if not holders:
            self._holders.pop(key, None)
            self._bytes.pop(key, None)
        self._count(key, 1)

    def _count(self, key: Key, sign: int) -> None:
        if (size := self._bytes.get(key)) is None:
            return
        if self._holders[key] <= _IN_MESSAGES:
            self.in_messages += sign * size
        else:
            self.kept += sign * size


_IN_MESSAGES = {"arriving", "leaving", "sent"}


def joined(pieces: Sequence[ModelPiece]) -> ModelPiece:
    return functools.reduce(ModelPiece.then, pieces)


def without_zeros(held: Mapping[str, int]) -> dict[str, int]:
    """Without what is nothing."""
    return {kind: size for kind, size in held.items() if size}


def filed_from_outside(piece: ModelPiece) -> int:
    """What B files of the gradient that it was handed."""
    return piece.modules[OUTSIDE].filed_bytes if OUTSIDE in piece.modules else 0


def is_of(piece: ModelPiece, unit: str) -> bool:
    """Whether a piece is of a unit, by its modules' paths."""
    return any(path == unit or path.startswith(f"{unit}.") for path in piece.modules)


def filed_by_units(pieces: Sequence[ModelPiece], names: Sequence[str]) -> list[tuple[frozenset[int], int]]:
    """Of what the B of a stage files: for each piece the units whose W's it waits for, by place, and bytes. names: of
    the stage's units."""
    return [
        (frozenset(at for at, name in enumerate(names) if is_of(piece, name)), piece.filed_bytes)
        for piece in pieces
    ]


def batch_ends(row: ir.Row) -> dict[int, tuple[int, ...]]:
    """Transfers that are posted together: by the last, all of them. What belongs to accesses of the next computation
    may stand between them (`compile_row`)."""
    batches: list[list[int]] = []
    open_one = False
    for place, op in enumerate(row):
        if ir.IS_TRANSFER[op[0]]:
            if not open_one:
                batches.append([])
            batches[-1].append(place)
            open_one = True
        elif not (ir.IS_BESIDE[op[0]] and op[3]):
            open_one = False
    return {batch[-1]: tuple(batch) for batch in batches}
