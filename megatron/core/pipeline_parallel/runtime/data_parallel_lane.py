"""One rank's operations of data parallelism, as its row has them: done by the engine, followed, timed and named.

In the trainer the engine (`GradSync`) is `DistributedDataParallel`, whose `gathers` is an `AllGatherPipeline` and whose
`reductions` is a `GradReducePipeline`.

[Note: waiting] An UNSHARD only begins to gather. Whoever needs the weights first waits for them, once; a RESHARD that
comes before anybody did waits too.

[Note: boundaries] Hooks tell which unit begins (`UnitListener`), and know nothing of plans; one `UnitBoundaries` hears
them for all executors of a run. A computation that is under way goes on to the access that has the unit (`Crossing`):
it does what the row wants done once so many accesses have begun, and then waits for the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from megatron.core.module import ModelError
from megatron.core.pipeline_parallel.plan import ir
from megatron.core.pipeline_parallel.plan.held.units import StageUnits
from megatron.core.pipeline_parallel.plan.ir import IS_BESIDE, PlanError, RawOp, Row, op_text
from megatron.core.pipeline_parallel.runtime.recorder import Recorder, Region
from megatron.core.protocols import GradSync
from megatron.core.transport.peer_loss import PeerLostError

Placed = tuple[int, RawOp]  # an operation and its place in the row


@dataclass(eq=False)
class _Operation:
    """Of the row, made once. units: of each its number in the stage, its name, and what does the operation. The rest is
    of an UNSHARD that has begun: left: so many units were not waited for; waited_s: for the others."""

    place: int
    op: RawOp
    units: Sequence[tuple[int, str, Callable[[], None]]]
    start_s: float = 0.0
    end_s: float = 0.0
    left: int = 0
    waited_s: float = 0.0


class DataParallelLane:
    """Runs the operations of a row's lane.

    units: of this rank's stages, by global stage. chunks: local number of each stage. Units of one name are one unit.
    `spent_s` grows by what operations and waits take. Raises PlanError for units that there are not.
    """

    def __init__(
        self, row: Row, grad_sync: GradSync, units: Mapping[int, StageUnits], chunks: Mapping[int, int]
    ) -> None:
        self._wait = grad_sync.gathers.wait
        self._numbers = {
            stage: [grad_sync.unit_number(chunk, unit) for unit in range(len(units[stage].units))]
            for stage, chunk in chunks.items()
        }
        self._names = {stage: [unit.name for unit in units[stage].units] for stage in chunks}
        calls: dict[int, Callable[[int], None]] = {
            ir.UNSHARD: grad_sync.gathers.start,
            ir.RESHARD: grad_sync.gathers.free,
            ir.REDUCE: grad_sync.reductions.start,
            ir.HSDP_ALL_REDUCE: grad_sync.reductions.start_outer,
        }
        self._operations: dict[int, _Operation] = {}  # by place in the row
        for place, op in enumerate(row):
            if IS_BESIDE[op[0]]:
                kind, stage = op[:2]
                names, numbers = self._names[stage], self._numbers[stage]
                if op[5] > len(names):
                    raise PlanError(f"{op_text(op)}: stage {stage} has {len(names)} units")
                every = range(op[4], op[5]) if op[4] >= 0 else range(len(names))
                doing = [(one, names[one], partial(calls[kind], numbers[one])) for one in every]
                self._operations[place] = _Operation(place, op, doing)
        # What the row gathers; all else is always whole.
        gathers = (one for one in self._operations.values() if one.op[0] == ir.UNSHARD)
        self._come_and_go = {name for one in gathers for _, name, _ in one.units}
        self._gathered: set[str] = set()
        self._gathers: dict[str, _Operation] = {}  # that nobody has waited for yet
        self._recorder: Recorder | None = None
        self._region: Region | None = None
        self._recorded: set[int] = set()
        self.spent_s = 0.0

    def begin(self, recorder: Recorder | None, region: Region | None = None) -> None:
        """A row begins. recorder: who is told of operations, if anybody: of each once, the first time that it runs.
        region: of a profiler that runs."""
        self._recorder, self._region = recorder, region
        self._recorded.clear()
        self._gathered.clear()
        self._gathers.clear()

    def drop(self) -> None:
        """What was gathered is gone: the row is through, it broke off, or its forwards are to be repeated."""
        for gather in self._gathers.values():
            self._record(gather)
        self._gathered.clear()
        self._gathers.clear()

    def perform(self, placed: Placed) -> None:
        """Do one operation."""
        operation = self._operations[placed[0]]
        if self._region is None:
            self._perform(operation)
            return
        with self._region(op_text(placed[1])):
            self._perform(operation)

    def _perform(self, operation: _Operation) -> None:
        op, kind = operation.op, operation.op[0]
        operation.start_s = start = self._now()
        for unit, name, call in operation.units:
            if kind == ir.RESHARD:
                if name in self._gathers:
                    self.wait(op[1], unit)
                self._gathered.discard(name)
            try:
                call()
            except Exception as error:
                _locate(error, f"{op_text(op)}, unit {name!r}")
                raise
        operation.end_s = end = self._now()
        self.spent_s += end - start
        operation.left, operation.waited_s = len(operation.units), 0.0
        if kind == ir.UNSHARD:
            for _, name, _ in operation.units:
                self._gathered.add(name)
                self._gathers[name] = operation
        else:
            self._record(operation)

    def wait(self, stage: int, unit: int) -> None:
        """Return once the unit's weights are whole."""
        name = self._names[stage][unit]
        gather = self._gathers.pop(name, None)
        if gather is None:
            return
        start = self._now()
        try:
            self._wait(self._numbers[stage][unit])
        except Exception as error:
            _locate(error, f"waiting for {op_text(gather.op)}, unit {name!r}")
            raise
        gather.end_s = self._now()
        gather.waited_s += gather.end_s - start
        self.spent_s += gather.end_s - start
        gather.left -= 1
        if not gather.left:
            self._record(gather)

    def came_late(self, stage: int, unit: int, *, read: bool, reductions: Iterable[int]) -> str | None:
        """What is over for a unit that begins only now: its weights are gone, where they are read, or its gradients are
        summed by one of these operations of the row; None where nothing is."""
        name = self._names[stage][unit]
        if read and name in self._come_and_go and name not in self._gathered:
            return "weights are freed"
        summed = any(name == one for place in reductions for _, one, _ in self._operations[place].units)
        return "gradients are summed" if summed else None

    def names(self, stage: int, units: Iterable[int]) -> str:
        """In an error."""
        return " and ".join(repr(self._names[stage][unit]) for unit in units)

    def _now(self) -> float:
        return 0.0 if self._recorder is None else self._recorder.now()

    def _record(self, done: _Operation) -> None:
        if self._recorder is not None and done.place not in self._recorded:
            self._recorded.add(done.place)
            self._recorder.record(done.place, done.start_s, done.end_s, done.waited_s)


class UnitBoundaries:
    """The `UnitListener` of a run: hands on to the computation under way (`crossing`), if there is one with units."""

    def __init__(self) -> None:
        self.crossing: Crossing | None = None

    def unit_begins(self, chunk: int, unit: int) -> None:
        if self.crossing is not None:
            self.crossing.unit_begins(chunk, unit)


class Crossing:
    """One computation with units, which is called inside a `with` of it. operations: that belong to it, in rising k.
    chunk: local number of its stage. boundaries: who tells of units that begin; without, all accesses begin before the
    call. Raises PlanError for an operation that waits for more accesses than there are.

    The first access begins before the call too, whatever the model does until its units run. Behind it all have begun.
    """

    def __init__(
        self,
        op: RawOp,
        chunk: int,
        units: StageUnits,
        operations: Sequence[Placed],
        lane: DataParallelLane,
        boundaries: UnitBoundaries | None,
    ) -> None:
        self._op, self._chunk, self._lane, self._boundaries = op, chunk, lane, boundaries
        self._operations = tuple(operations)
        self._accesses, self._reads = zip(*((use.units, use.reads) for use in units.uses(op)), strict=True)
        for _, one in operations:
            if one[3] > len(self._accesses):
                raise PlanError(
                    f"{op_text(one)} waits for access {one[3]} of {op_text(op)}, which has {len(self._accesses)}"
                )
        self._begun = self._done = 0  # accesses, operations

    def __enter__(self) -> None:
        self._done = 0
        self._advance(1)
        if self._boundaries is not None:
            self._boundaries.crossing = self
            return
        for begun in range(2, len(self._accesses) + 1):
            self._advance(begun)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._boundaries is not None:
            self._boundaries.crossing = None
        if kind is None:
            self._operate(len(self._accesses))

    def unit_begins(self, chunk: int, unit: int) -> None:
        """Go on to the access that has the unit, unless that is the one under way.

        Raises ModelError where the unit is not to come any more, and its weights are gone or its gradients summed.
        """
        assert chunk == self._chunk, (
            f"chunk {chunk} runs inside of {op_text(self._op)}, which is of chunk {self._chunk}"
        )
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
            self._lane.perform(self._operations[self._done - 1])

    def _came_late(self, unit: int) -> None:
        stage, lane = self._op[1], self._lane
        sums = self._operations[: self._done] if self._op[0] in (ir.W, ir.BW) else ()
        reductions = [place for place, op in sums if op[0] == ir.REDUCE]
        read = any(unit in access for access in self._reads)
        over = lane.came_late(stage, unit, read=read, reductions=reductions)
        if over is not None:
            before = lane.names(stage, self._accesses[self._begun - 1])
            late = lane.names(stage, [unit])
            raise ModelError(
                f"{op_text(self._op)}: unit {late} runs after {before}, where the plan has it over: "
                f"its {over} by then. Units must run in one order, the model's own or that of --fsdp-unit-modules: "
                "name the module around those that run in turn, or leave this one out"
            )


def _locate(error: Exception, what: str) -> None:
    """An error says what was being done. By hand: between computations nothing is in the caches, and a context manager
    for each operation costs as much as the operation's own lines."""
    if isinstance(error, PeerLostError):
        raise error.at(what) from error
    error.add_note(what)
