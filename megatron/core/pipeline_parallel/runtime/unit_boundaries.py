"""A computation's way through the units of its stage: operations in its middle, and waits for weights.

[Note: boundaries] Hooks tell which unit begins (`UnitListener`), and know nothing of plans; one `UnitBoundaries` hears
them for all executors of a run. A computation that is under way goes on to the access that has the unit (`Crossing`):
it does what the row wants done once so many accesses have begun, and then waits for the weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from megatron.core.module import ModelError
from megatron.core.pipeline_parallel.plan.ir import BW, Kind, PlanError, RawOp, W, op_text
from megatron.core.pipeline_parallel.plan.units import StageUnits
from megatron.core.pipeline_parallel.runtime.data_parallel_lane import DataParallelLane


class UnitBoundaries:
    """The `UnitListener` of a run: hands on to the computation under way, if there is one with units."""

    def __init__(self) -> None:
        self._crossing: Crossing | None = None

    def unit_begins(self, chunk: int, unit: int) -> None:
        if self._crossing is not None:
            self._crossing.unit_begins(chunk, unit)

    def attend(self, crossing: Crossing | None) -> None:
        """A computation is under way from now on, or none."""
        self._crossing = crossing


class Crossing:
    """One computation with units. operations: (place in the row, operation) that belong to it, in rising k. chunk:
    local number of its stage. Raises PlanError for an operation that waits for more accesses than there are."""

    def __init__(
        self,
        op: RawOp,
        chunk: int,
        units: StageUnits,
        operations: Sequence[tuple[int, RawOp]],
        lane: DataParallelLane,
    ) -> None:
        self._op, self._chunk, self._lane = op, chunk, lane
        self._operations = tuple(operations)
        self._accesses = units.accesses(op) or ((),)
        for _, one in operations:
            if one[3] > len(self._accesses):
                raise PlanError(
                    f"{op_text(one)} waits for access {one[3]} of {self}, which has {len(self._accesses)}"
                )
        self._reads = units.reads(op) or ((),)
        self._adds = op[0] in (W, BW)
        self._begun = self._done = 0  # accesses, operations

    def __str__(self) -> str:
        return op_text(self._op)

    @contextlib.contextmanager
    def under_way(self, boundaries: UnitBoundaries | None) -> Iterator[None]:
        """Inside, the computation is called. Its first access begins before, whatever the model does until its units
        run; the others as `boundaries` hears of them, without it before the call too. Behind it all have begun."""
        self._done = 0
        self._advance(1)
        if boundaries is None:
            for begun in range(2, len(self._accesses) + 1):
                self._advance(begun)
            yield
            return
        boundaries.attend(self)
        try:
            yield
        finally:
            boundaries.attend(None)
        self._operate(len(self._accesses))

    def unit_begins(self, chunk: int, unit: int) -> None:
        """Go on to the access that has the unit, unless that is the one under way.

        Raises ModelError where the unit is not to come any more, and its weights are gone or its gradients summed.
        """
        assert chunk == self._chunk, f"chunk {chunk} runs inside of {self}, which is of chunk {self._chunk}"
        if unit in self._accesses[self._begun - 1]:
            return
        for at in range(self._begun, len(self._accesses)):
            if unit in self._accesses[at]:
                self._advance(at + 1)
                return
        self._came_late(unit)

    def _advance(self, begun: int) -> None:
        """The next accesses have begun, so many in all."""
        self._begun = begun
        self._operate(begun)
        for unit in self._reads[begun - 1]:
            self._lane.wait(self._op[1], unit)

    def _operate(self, begun: int) -> None:
        while self._done < len(self._operations) and self._operations[self._done][1][3] <= begun:
            self._done += 1
            self._lane.perform(*self._operations[self._done - 1])

    def _came_late(self, unit: int) -> None:
        stage = self._op[1]
        freed = any(unit in access for access in self._reads) and not self._lane.has_weights(stage, unit)
        if freed or (self._adds and self._is_reduced(unit)):
            name = self._lane.name(stage, unit)
            before = " and ".join(
                repr(self._lane.name(stage, one)) for one in self._accesses[self._begun - 1]
            )
            raise ModelError(
                f"{self}: unit {name!r} runs after {before}, where the plan has it over: its "
                f"{'weights are freed' if freed else 'gradients are summed'} by then. Units must run in one order, the "
                "model's own or that of --fsdp-unit-modules: name the module around those that run in turn, or leave "
                "this one out"
            )

    def _is_reduced(self, unit: int) -> bool:
        """Whether an operation in this computation's middle has taken the unit's gradients."""
        name, done = self._lane.name(self._op[1], unit), self._operations[: self._done]
        return any(op[0] == Kind.REDUCE and name in self._lane.names(op) for _, op in done)
