"""One rank's row of a plan, done: one dispatch table from kinds to methods, and no schedule's name.

A plan says everything: order, transfers, batches, overlap. Whatever a schedule adds is an operation with a kind, and
a kind is a handler in the table: the executor's own, or one that another module hands in (`handlers`).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from megatron.core.module import ModelError
from megatron.core.peer_loss import PeerLostError
from megatron.core.pipeline_parallel.plan.echoes import Key, echoes
from megatron.core.pipeline_parallel.plan.ir import (
    BW,
    RECV_B,
    RECV_F,
    SEND_B,
    SEND_F,
    B,
    F,
    Kind,
    Plan,
    PlanError,
    RawOp,
    W,
    op_text,
)
from megatron.core.pipeline_parallel.plan.kinds import HAS_MICROBATCH, IS_TRANSFER, REPEATED_ON_AGAIN
from megatron.core.pipeline_parallel.plan.undone import undone
from megatron.core.pipeline_parallel.runtime.channel import Arrival, Channel
from megatron.core.pipeline_parallel.runtime.recorder import Recorder
from megatron.core.protocols import GradSync, Stage

Handler = Callable[[RawOp], None]


class Go(enum.Enum):
    """What follows VALIDATE, on all ranks alike. ON: the rest of the row. AGAIN: the forwards before it once more, then
    the rest. STOP: the forwards are dropped, and the step ends here."""

    ON = "on"
    AGAIN = "again"
    STOP = "stop"


@dataclass(frozen=True)
class Validation:
    """What VALIDATE does. decide: communicates over the pipeline, perhaps changes the weights. forget: a stage's
    forward of a microbatch did not happen (stage, microbatch): nothing of it is kept, or counted."""

    decide: Callable[[], Go]
    forget: Callable[[int, int], None]


class _Stopped(Exception):  # noqa: N818 - no error: the way out of the row
    """VALIDATE said STOP."""


class _Step(NamedTuple):
    """What the loop calls: an operation, or a batch of transfers. first, end: its places in the row."""

    call: Callable[[Any], None]
    argument: Any
    first: int
    end: int


class Executor:
    """Runs the operations of one pipeline rank.

    plan: verified, with its transfers. rank: in the pipeline. stages: those of this rank, by global stage. channel:
    to the other ranks. grad_sync: the data parallel engine; None where nobody wants to hear of gradients (evaluation).
    recorder: of the measured timeline. handlers: for kinds that this executor knows nothing of. validation: of the step
    before, for plans with VALIDATE.

    Overlapped computations run one after the other. Raises PlanError where a stage is missing, where the row has a
    kind without a handler, or where B and W are split on a stage that cannot split them.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        stages: Mapping[int, Stage],
        channel: Channel,
        grad_sync: GradSync | None = None,
        *,
        recorder: Recorder | None = None,
        handlers: Mapping[Kind, Handler] | None = None,
        validation: Validation | None = None,
    ) -> None:
        self._plan, self._rank, self._row = plan, rank, plan.rows[rank]
        self._stages, self._channel = stages, channel
        self._grad_sync, self._recorder, self._validation = grad_sync, recorder, validation
        ranks = plan.placement.ranks()
        self._last_stage = len(ranks) - 1
        self._is_local = [one == rank for one in ranks]
        self._chunks = {stage: plan.placement.chunk_of(stage) for stage in stages}
        # Tensors on their way: what a send takes; what a computation takes, there already or arriving.
        self._outgoing: dict[Key, Tensor] = {}
        self._incoming: dict[Key, Tensor | Arrival] = {}
        self._gathering: dict[int, list[int | None]] = {}  # stage -> units whose weights are under way
        self._weights_done = dict.fromkeys(
            stages, 0
        )  # stage -> microbatches whose weight gradients are complete
        self._waited_s = 0.0
        self._check(handlers or {})
        self._program = self._compile(handlers or {})
        self._echoes = echoes(plan, rank)
        self._undone = undone(plan, rank)

    def run(self, iteration: int = 0) -> bool:
        """Do the row once. Afterwards every message is through and nothing is kept; gradients are this rank's own
        until `grad_sync.finish()`, which is the caller's (or that of a handler of the plan's last operations).

        Returns whether it came to the end: False where VALIDATE stopped it, on all ranks alike.
        iteration: for messages and the timeline. Communicates over the pipeline, and with whom the stages do.
        Raises PeerLostError naming rank, stage, iteration and operation, ModelError where a stage hands on what cannot
        go to the next; other errors than the first get a note that says where.
        """
        for store in (self._outgoing, self._incoming, self._gathering):
            store.clear()
        self._weights_done = dict.fromkeys(self._stages, 0)
        step: _Step | None = None
        try:
            for step in self._program if self._recorder is None else self._timed(self._recorder, iteration):
                step.call(step.argument)
            step = None
            self._channel.drain()
        except _Stopped:
            self._check_empty()
            return False
        except PeerLostError as error:
            raise error.at(self._where(step, iteration)) from error
        except Exception as error:
            error.add_note(f"pipeline rank {self._rank}, {self._where(step, iteration)}")
            raise
        finally:
            if self._recorder is not None:
                self._recorder.end_step()
        self._check_empty()
        return True

    def _check_empty(self) -> None:
        assert not self._outgoing, f"never sent: {sorted(self._outgoing)}"
        assert not self._incoming, f"never used: {sorted(self._incoming)}"
        for stage in self._stages.values():
            stage.check_empty()

    # Before the first step -------------------------------------------------------------------------

    def _table(self) -> dict[int, Handler]:
        """Every kind that this executor does by itself; transfers are done by batches, see `_transfer`."""
        table: dict[int, Handler] = {F: self._forward, B: self._backward_input, W: self._backward_weight}
        table[BW] = self._backward
        if self._grad_sync is not None:
            table[Kind.UNSHARD], table[Kind.RESHARD] = self._unshard, self._reshard
            table[Kind.REDUCE] = self._reduce
        if self._validation is not None:
            table[Kind.VALIDATE] = self._validate
        return table

    def _check(self, handlers: Mapping[Kind, Handler]) -> None:
        plan, rank, table = self._plan, self._rank, self._table()
        both = [kind.name for kind in handlers if kind in table or HAS_MICROBATCH[kind]]
        assert not both, f"handlers for what the executor does itself: {both}"
        mine = {stage for stage, local in enumerate(self._is_local) if local}
        assert set(self._stages) == mine, (
            f"rank {rank} has stages {sorted(mine)}, given {sorted(self._stages)}"
        )
        for op in self._row:
            kind = Kind(op[0])
            if not (kind in table or kind in handlers or IS_TRANSFER[kind]):
                raise PlanError(
                    f"rank {rank}: {op_text(op)}: nothing here does {kind.name}; it needs"
                    + _NEEDED.get(kind, " a handler")
                )
            if HAS_MICROBATCH[kind] and (op[3] or op[4] >= 0):
                raise PlanError(
                    f"rank {rank}: {op_text(op)}: stages compute whole microbatches of all their units"
                )
            if kind in (B, W) and not self._stages[op[1]].splits:
                raise PlanError(
                    f"rank {rank}: {op_text(op)}: stage {op[1]} cannot split B from W, because autograd accumulates its"
                    " gradients; use a schedule of F and BW, such as 1f1b, or layers that put them into a sink"
                )
            if kind == F and op[1] > 0 and not self._is_local[op[1] - 1] and not plan.has_transfers:
                raise PlanError(f"rank {rank}: {op_text(op)}: the plan has no transfers; `lower` adds them")

    def _compile(self, handlers: Mapping[Kind, Handler]) -> list[_Step]:
        """The row with each operation's handler; neighbouring transfers are one step."""
        table = self._table() | {int(kind): handler for kind, handler in handlers.items()}
        row, program, place = self._row, [], 0
        while place < len(row):
            end = place
            while end < len(row) and IS_TRANSFER[row[end][0]]:
                end += 1
            if end > place:
                program.append(_Step(self._transfer, row[place:end], place, end))
                place = end
            else:
                program.append(_Step(table[row[place][0]], row[place], place, place + 1))
                place += 1
        return program

    # Around the operations -------------------------------------------------------------------------

    def _timed(self, recorder: Recorder, iteration: int) -> Iterator[_Step]:
        """The program; what the loop does between two steps is timed and recorded."""
        recorder.begin_step(self._plan, self._rank, iteration)
        for step in self._program:
            self._waited_s = 0.0
            start = recorder.now()
            yield step
            end = recorder.now()
            for place in range(step.first, step.end):
                recorder.record(place, start, end, self._waited_s)

    def _where(self, step: _Step | None, iteration: int) -> str:
        if step is None:
            stages = ", ".join(map(str, sorted(self._stages)))
            return f"stage {stages}, iteration {iteration}, waiting for its last sends"
        texts = ", ".join(op_text(op) for op in self._row[step.first : step.end])
        stages = ", ".join(sorted({str(op[1]) for op in self._row[step.first : step.end]}))
        return f"stage {stages}, iteration {iteration}, {texts}"

    # Handlers --------------------------------------------------------------------------------------

    def _forward(self, op: RawOp) -> None:
        stage, microbatch = op[1], op[2]
        hidden = self._take(RECV_F, stage, microbatch) if stage > 0 else None
        self._weights_ready(stage)
        output = self._stages[stage].forward(microbatch, hidden)
        if stage < self._last_stage:
            self._hand_on(output, SEND_F, RECV_F, stage, stage + 1, microbatch)

    def _backward(self, op: RawOp) -> None:
        self._propagate(op, self._stages[op[1]].backward)
        self._complete(op)

    def _backward_input(self, op: RawOp) -> None:
        self._propagate(op, self._stages[op[1]].backward_input)

    def _backward_weight(self, op: RawOp) -> None:
        self._stages[op[1]].backward_weight(op[2])
        self._complete(op)

    def _transfer(self, batch: tuple[RawOp, ...]) -> None:
        """Post neighbouring transfers; receives are waited for by their consumers."""
        messages = [(op, self._outgoing.pop(op[:3]) if op[0] in (SEND_F, SEND_B) else None) for op in batch]
        arrivals = iter(self._channel.post(messages))
        for op in batch:
            if op[0] in (RECV_F, RECV_B):
                self._incoming[op[:3]] = next(arrivals)

    def _unshard(self, op: RawOp) -> None:
        assert self._grad_sync is not None
        for unit in _units(op):
            self._grad_sync.unshard(self._chunks[op[1]], unit)
            self._gathering.setdefault(op[1], []).append(unit)

    def _reshard(self, op: RawOp) -> None:
        assert self._grad_sync is not None
        for unit in _units(op):
            self._grad_sync.reshard(self._chunks[op[1]], unit)

    def _reduce(self, op: RawOp) -> None:
        assert self._grad_sync is not None
        last = self._weights_done[op[1]] == self._plan.num_microbatches
        for unit in _units(op):
            self._grad_sync.reduce(self._chunks[op[1]], unit, last=last)

    def _validate(self, op: RawOp) -> None:
        assert self._validation is not None
        go = self._validation.decide()
        if go is Go.ON:
            return
        self._drop_forwards()
        if go is Go.STOP:
            raise _Stopped
        if self._recorder is not None:
            self._recorder.repeated()
        place = self._row.index(op)
        for step in self._program:
            if step.end > place:
                return
            if REPEATED_ON_AGAIN[self._row[step.first][0]]:
                step.call(step.argument)

    def _drop_forwards(self) -> None:
        """As if the forwards before VALIDATE had not run; see plan.undone, [Note: messages of undone forwards].

        Receives come first: other ranks wait here for their sends. No deadlock, as each rank has nothing else to do
        for the ranks behind it than to have come here.
        """
        late = self._channel.post([(op, None) for op in self._undone.surplus])
        for arrival in (*self._incoming.values(), *late):
            if not isinstance(arrival, Tensor):
                arrival.wait()
        self._channel.drain()
        self._incoming.clear()
        self._outgoing.clear()
        assert self._validation is not None
        for stage, microbatch in self._undone.forwards:
            self._validation.forget(stage, microbatch)

    # What handlers share ---------------------------------------------------------------------------

    def _propagate(self, op: RawOp, backward: Callable[[int, Tensor | None], Tensor | None]) -> None:
        """B or BW: the gradient of the output in, that of the input out."""
        stage, microbatch = op[1], op[2]
        grad = self._take(RECV_B, stage, microbatch) if stage < self._last_stage else None
        self._weights_ready(stage)
        grad = backward(microbatch, grad)
        if stage > 0:
            self._hand_on(grad, SEND_B, RECV_B, stage, stage - 1, microbatch)

    def _complete(self, op: RawOp) -> None:
        """W or BW is through."""
        self._weights_done[op[1]] += 1
        if self._grad_sync is not None:
            self._grad_sync.microbatch_done(self._chunks[op[1]], op[2])

    def _take(self, kind: int, stage: int, microbatch: int) -> Tensor:
        """An input, waited for if it is still on its way."""
        key = (kind, stage, microbatch)
        one = self._incoming.pop(key)
        if isinstance(one, Tensor):
            return one
        if self._recorder is None:
            tensor = one.wait()
        else:
            start = self._recorder.now()
            tensor = one.wait()
            self._waited_s += self._recorder.now() - start
        if key in self._echoes:
            self._channel.release(self._echoes[key])
        return tensor

    def _hand_on(
        self, tensor: Tensor | None, send: int, receive: int, stage: int, target: int, microbatch: int
    ) -> None:
        """A result goes to the channel, or straight to the other stage where that is on this rank too."""
        if tensor is None:
            raise ModelError(
                f"stage {stage} handed nothing on to stage {target} for microbatch {microbatch}: a stage answers with"
                " a tensor wherever another one follows"
            )
        if self._is_local[target]:
            self._incoming[receive, target, microbatch] = tensor
        else:
            self._outgoing[send, stage, microbatch] = tensor

    def _weights_ready(self, stage: int) -> None:
        """Wait for what UNSHARD has begun to gather: F and B need weights, W needs none."""
        for unit in self._gathering.pop(stage, ()):
            assert self._grad_sync is not None
            self._grad_sync.wait(self._chunks[stage], unit)


_NEEDED = {
    Kind.UNSHARD: " a data parallel engine",
    Kind.RESHARD: " a data parallel engine",
    Kind.REDUCE: " a data parallel engine",
    Kind.VALIDATE: " a validation",
}


def _units(op: RawOp) -> tuple[int | None, ...]:
    """The units that an operation is about; None means all of the chunk."""
    return (None,) if op[4] < 0 else tuple(range(op[4], op[5]))
