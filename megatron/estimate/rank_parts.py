"""What the account of a rank is made of, and what it says (floor 0, pure)."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megatron.core.pipeline_parallel.plan import ir
from megatron.estimate.description import ModelPiece
from megatron.estimate.peak import Peak, beside, step_peak

BETWEEN_STEPS = ("evaluation", "save", "load")


class HeldMoment(NamedTuple):
    """Behind the operation at `place`, where access is -1; else at the beginning of that access of its computation, or
    behind the operation at `place` in its middle."""

    place: int
    access: int
    held: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.held.values())


SUMS = "all-grads-sync"  # the part of a step behind its row, by the timer's name


@dataclasses.dataclass(frozen=True)
class RankParts:
    """What an account is made of.

    at_rest: bytes between steps by the tracker's categories. stages: the pieces of each of the rank's stages, in the
    order of the forward. filed: of a stage that is one piece, of what B files the units whose W's it is for, by place
    in the stage, and bytes. batch_bytes: of a microbatch's batch, kept for the step; 0 where none is. exchange: what
    summing a unit takes beside its gradients, by its name, whether over instances, and whether it was summed before in
    the step. resting: bytes of a unit's gradients at rest that have no memory from a step's beginning to its first sum.
    slots: by unit whose weights and gradients lie in one of a double buffer, which; what would take one waits until it
    is free. drawn: microbatches of the step whose batches are there before the row begins, because the row is of its
    last microbatches only, or are kept of a step that is not decided on. step: what parts of a step behind its row take
    at most beside what is there, by kind: SUMS that wait for its end, "grad-norm", "optimizer", and "rollback" of
    one that is taken back.
    """

    at_rest: Mapping[str, int]
    stages: Mapping[int, Sequence[ModelPiece]]
    batch_bytes: int = 0
    exchange: Mapping[tuple[str, bool, bool], int] = dataclasses.field(default_factory=dict)
    resting: Mapping[str, int] = dataclasses.field(default_factory=dict)
    slots: Mapping[str, int] = dataclasses.field(default_factory=dict)
    drawn: int = 0
    step: Mapping[str, Mapping[str, int]] = dataclasses.field(default_factory=dict)
    filed: Mapping[int, Sequence[tuple[frozenset[int], int]]] = dataclasses.field(default_factory=dict)

    @property
    def snapshot_bytes(self) -> int:
        """Of copies that a step is taken back to, which stay until it is decided on."""
        return self.step.get("optimizer", {}).get("snapshot", 0)


@dataclasses.dataclass(frozen=True)
class RankAccount:
    """Of one pipeline rank, in a step after the first. at_rest: between steps, with what lasts. moments: in the order
    of the row. step: behind it, or where operations of validated steps stand, the most that each part of what
    ends a step holds, by kind. beside: the most that an evaluation, a save and a load hold."""

    rank: int
    row: ir.Row
    at_rest: Mapping[str, int]
    moments: tuple[HeldMoment, ...]
    step: Mapping[str, Mapping[str, int]]
    peak: Peak
    beside: Mapping[str, Mapping[str, int]] = dataclasses.field(default_factory=dict)

    def with_beside(
        self, taken: Mapping[str, Mapping[str, int]], evaluation: RankAccount | None, copies: int
    ) -> RankAccount:
        """With what runs between steps. taken: by its name, what it takes by kind. copies: bytes that an asynchronous
        save keeps here, which from then on are there beside everything."""
        kept = Counter({"saved": copies})
        held = {name: dict(Counter(self.at_rest) + Counter(kinds) + kept) for name, kinds in taken.items()}
        if evaluation is not None:
            held["evaluation"] = dict(Counter(evaluation.peak.held) + kept)
        in_step = beside(self.peak, "saved", copies) if copies else self.peak
        peaks = [in_step, *(step_peak(self.rank, *one) for one in held.items())]
        most = max(peaks, key=lambda peak: peak.total)
        return dataclasses.replace(self, beside=held, peak=most, at_rest=dict(Counter(self.at_rest) + kept))

    @property
    def most(self) -> dict[str, int]:
        """The most of each kind, whenever."""
        every = [*(moment.held for moment in self.moments), *self.step.values()]
        kinds = dict.fromkeys(kind for held in every for kind in held)
        return {kind: most for kind in kinds if (most := max(held.get(kind, 0) for held in every))}

    def behind(self) -> dict[int, Mapping[str, int]]:
        """What is held behind each operation, by its place."""
        found: dict[int, Mapping[str, int]] = {}
        for moment in self.moments:
            if moment.access < 0:
                found.setdefault(moment.place, moment.held)  # the last one is the row's end
        return found
