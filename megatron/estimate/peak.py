"""The moment at which a rank holds the most, and who has it: one record, and one wording for page, log and errors
(floor 0, pure)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from megatron.core.words import size_text

MOST_HOLDERS = 10


class MemoryHolder(NamedTuple):
    """Who holds memory. kind: of bytes. what: the path of a module, or the name of a unit, or of a message."""

    kind: str
    what: str
    num_bytes: int


class Peak(NamedTuple):
    """The moment at which a pipeline rank holds the most. operation: by its text. unit: in use, "" where none is known
    to be. held: bytes by kind. holders: the largest ones."""

    rank: int
    operation: str
    unit: str
    held: Mapping[str, int]
    holders: tuple[MemoryHolder, ...]

    @property
    def total(self) -> int:
        return sum(self.held.values())


def step_peak(rank: int, part: str, held: Mapping[str, int]) -> Peak:
    """Of a part of the optimizer's step, in which kinds of bytes have no other owner."""
    holders = [MemoryHolder(kind, "", size) for kind, size in held.items()]
    holders.sort(key=lambda holder: -holder.num_bytes)
    return Peak(rank, part, "", held, tuple(holders[:MOST_HOLDERS]))


def beside(peak: Peak, kind: str, num_bytes: int) -> Peak:
    """With further bytes."""
    holders = sorted((*peak.holders, MemoryHolder(kind, "", num_bytes)), key=lambda one: -one.num_bytes)
    held = {**peak.held, kind: num_bytes}
    return peak._replace(held=held, holders=tuple(holders[:MOST_HOLDERS]))


def kinds_text(held: Mapping[str, int]) -> str:
    """Bytes by kind, the largest first."""
    return ", ".join(
        f"{kind} {size_text(size)}" for kind, size in sorted(held.items(), key=lambda one: -one[1])
    )


def peak_lines(peak: Peak) -> list[str]:
    """What page, log and errors say of a peak."""
    kinds = kinds_text(peak.held)
    where = f"{peak.operation}, {peak.unit}" if peak.unit else peak.operation
    lines = [f"pipeline rank {peak.rank} holds the most in {where}: {size_text(peak.total)} ({kinds})"]
    for kind, what, num_bytes in peak.holders:
        lines.append(f"  {size_text(num_bytes)} {kind}{f' of {what}' if what else ''}")
    return lines


def peak_json(peak: Peak) -> dict[str, Any]:
    """The same as plain values."""
    return {
        "operation": peak.operation,
        "unit": peak.unit,
        "holders": [one._asdict() for one in peak.holders],
    }
