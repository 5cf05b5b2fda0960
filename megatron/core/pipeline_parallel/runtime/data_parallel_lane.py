"""One rank's operations of data parallelism, as its row has them: done by the engine, followed, timed and named.

[Note: waiting] An UNSHARD only begins to gather. Whoever needs the weights first waits for them, once; a RESHARD that
comes before anybody did waits too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from megatron.core.peer_loss import PeerLostError
from megatron.core.pipeline_parallel.plan.ir import Kind, PlanError, RawOp, Row, op_text
from megatron.core.pipeline_parallel.plan.kinds import IS_DATA_PARALLEL
from megatron.core.pipeline_parallel.plan.units import StageUnits
from megatron.core.pipeline_parallel.runtime.recorder import Recorder
from megatron.core.protocols import GradSync


@dataclass
class _Gather:
    """An UNSHARD of which not all units were waited for. left: how many. waited_s: for the others."""

    place: int
    op: RawOp
    start_s: float
    end_s: float
    left: int
    waited_s: float = 0.0


class DataParallelLane:
    """Runs the operations of a row's lane.

    units: of this rank's stages, by global stage. chunks: local number of each stage. Units of one name are one unit.
    `spent_s` grows by what operations and waits take. Raises PlanError for units that there are not.
    """

    def __init__(
        self, row: Row, grad_sync: GradSync, units: Mapping[int, StageUnits], chunks: Mapping[int, int]
    ) -> None:
        self._grad_sync, self._units, self._chunks = grad_sync, units, chunks
        self._calls: dict[int, Callable[[int, int], None]] = {
            Kind.UNSHARD: grad_sync.unshard,
            Kind.RESHARD: grad_sync.reshard,
            Kind.REDUCE: grad_sync.reduce,
            Kind.HSDP_ALL_REDUCE: grad_sync.sum_outer,
        }
        for op in row:
            if IS_DATA_PARALLEL[op[0]] and self._of(op).stop > len(units[op[1]].units):
                raise PlanError(f"{op_text(op)}: stage {op[1]} has {len(units[op[1]].units)} units")
        # What the row gathers; all else is always whole.
        self._come_and_go = {name for op in row if op[0] == Kind.UNSHARD for name in self.names(op)}
        self._gathered: set[str] = set()
        self._gathers: dict[str, _Gather] = {}  # that nobody has waited for yet
        self._recorder: Recorder | None = None
        self._recorded: set[int] = set()
        self.spent_s = 0.0

    def begin(self, recorder: Recorder | None) -> None:
        """A row begins. recorder: who is told of operations, if anybody: of each once, the first time that it runs."""
        self._recorder = recorder
        self._recorded.clear()
        self._gathered.clear()
        self._gathers.clear()

    def drop(self) -> None:
        """What was gathered is gone: the row is through, it broke off, or its forwards are to be repeated."""
        for gather in self._gathers.values():
            self._record(gather)
        self._gathered.clear()
        self._gathers.clear()

    def name(self, stage: int, unit: int) -> str:
        """The unit's name, which is the rank's."""
        return self._units[stage].units[unit].name

    def names(self, op: RawOp) -> list[str]:
        """Those of the units that an operation is about."""
        return [self.name(op[1], unit) for unit in self._of(op)]

    def has_weights(self, stage: int, unit: int) -> bool:
        """Whether the unit's weights are whole, or about to be."""
        name = self.name(stage, unit)
        return name in self._gathered or name not in self._come_and_go

    def perform(self, place: int, op: RawOp) -> None:
        """Do one operation. place: in the row."""
        kind, stage = op[0], op[1]
        start = self._now()
        for unit in self._of(op):
            if kind == Kind.RESHARD:
                self.wait(stage, unit)
                self._gathered.discard(self.name(stage, unit))
            with _named(f"{op_text(op)}, unit {self.name(stage, unit)!r}"):
                self._calls[kind](self._chunks[stage], unit)
        end = self._now()
        self.spent_s += end - start
        gather = _Gather(place, op, start, end, left=0)
        if kind == Kind.UNSHARD:
            names = self.names(op)
            gather.left = len(names)
            self._gathered.update(names)
            self._gathers.update(dict.fromkeys(names, gather))
        else:
            self._record(gather)

    def wait(self, stage: int, unit: int) -> None:
        """Return once the unit's weights are whole."""
        gather = self._gathers.pop(self.name(stage, unit), None)
        if gather is None:
            return
        start = self._now()
        with _named(f"waiting for {op_text(gather.op)}, unit {self.name(stage, unit)!r}"):
            self._grad_sync.wait(self._chunks[stage], unit)
        gather.end_s = self._now()
        gather.waited_s += gather.end_s - start
        self.spent_s += gather.end_s - start
        gather.left -= 1
        if not gather.left:
            self._record(gather)

    def _of(self, op: RawOp) -> range:
        """The units of an operation."""
        return range(op[4], op[5]) if op[4] >= 0 else range(len(self._units[op[1]].units))

    def _now(self) -> float:
        return 0.0 if self._recorder is None else self._recorder.now()

    def _record(self, gather: _Gather) -> None:
        if self._recorder is not None and gather.place not in self._recorded:
            self._recorded.add(gather.place)
            self._recorder.record(gather.place, gather.start_s, gather.end_s, gather.waited_s)


@contextlib.contextmanager
def _named(what: str) -> Iterator[None]:
    """Errors inside say what was being done."""
    try:
        yield
    except PeerLostError as error:
        raise error.at(what) from error
    except Exception as error:
        error.add_note(what)
        raise
