"""One rank's row of a plan, done: one dispatch table from kinds to methods, and no schedule's name.

A plan says everything: order, transfers, batches, overlap, gathers and reductions. Whatever a schedule adds is an
operation with a kind, and a kind is a handler in the table: the executor's own, or one that another module hands in
(`handlers`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from megatron.core.module import ModelError
from megatron.core.pipeline_parallel.plan import ir, kinds
from megatron.core.pipeline_parallel.plan.held.units import StageUnits
from megatron.core.pipeline_parallel.plan.ir import Kind, Plan, RawOp
from megatron.core.pipeline_parallel.plan.send_completion import Key, send_completion
from megatron.core.pipeline_parallel.post_validation.state import Go, Validation, rollback_ops
from megatron.core.pipeline_parallel.runtime.data_parallel_lane import (
    Crossing,
    DataParallelLane,
    Placed,
    UnitBoundaries,
)
from megatron.core.pipeline_parallel.runtime.p2p import Arrival, Channel
from megatron.core.pipeline_parallel.runtime.program import Computation, Step, check_row, compile_row
from megatron.core.pipeline_parallel.runtime.recorder import Recorder
from megatron.core.protocols import GradSync, Stage
from megatron.core.transport.peer_loss import PeerLostError

Handler = Callable[[RawOp], None]


class _Stopped(Exception):  # noqa: N818 - no error: the way out of the row
    """VALIDATE said STOP."""


_NO_UNITS = contextlib.nullcontext()


class Executor:
    """Runs the operations of one pipeline rank.

    plan: verified, with its transfers. rank: in the pipeline. stages: those of this rank, by global stage. channel:
    to the other ranks. grad_sync: the data parallel engine, for plans with operations of data parallelism. units: of
    stages, for these. boundaries: who hears of units that begin; without, all of a stage's units begin as one of its
    computations is called. recorder: of the measured timeline. handlers: for kinds that this executor knows nothing of.
    validation: of the step before, for plans with VALIDATE.

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
        units: Mapping[int, StageUnits] | None = None,
        boundaries: UnitBoundaries | None = None,
        recorder: Recorder | None = None,
        handlers: Mapping[Kind, Handler] | None = None,
        validation: Validation | None = None,
    ) -> None:
        self.plan, self._rank, self._row = plan, rank, plan.rows[rank]
        self._stages, self._channel, self._units = stages, channel, units or {}
        self._boundaries, self._recorder, self._validation = boundaries, recorder, validation
        ranks = plan.placement.ranks()
        self._last_stage = len(ranks) - 1
        self._is_local = [one == rank for one in ranks]
        # Tensors on their way: what a send takes; what a computation takes, there already or arriving.
        self._outgoing: dict[Key, Tensor] = {}
        self._incoming: dict[Key, Tensor | Arrival] = {}
        self._waited_s = 0.0
        # Every kind that this executor does by itself; transfers are done by batches, operations in the middle of
        # computations by their `Crossing`.
        table: dict[int, Callable[[Any], None]] = {ir.F: self._forward, ir.W: self._backward_weight}
        table |= dict.fromkeys((ir.B, ir.BW), self._backward)
        self._lane: DataParallelLane | None = None
        if grad_sync is not None and any(kinds.IS_DATA_PARALLEL[op[0]] for op in self._row):
            assert set(stages) <= set(self._units), f"units of {sorted(self._units)}, stages {sorted(stages)}"
            chunks = {stage: plan.placement.chunk_of(stage) for stage in stages}
            self._lane = DataParallelLane(self._row, grad_sync, self._units, chunks)
            table |= {kind: self._on_lane for kind in Kind if kinds.IS_DATA_PARALLEL[kind]}
        if validation is not None:
            table[Kind.VALIDATE] = self._validate
        both = [kind.name for kind in handlers or {} if kind in table or kinds.IS_TRANSFER[kind]]
        assert not both, f"handlers for what the executor does itself: {both}"
        table |= {int(kind): handler for kind, handler in (handlers or {}).items()}
        check_row(plan, rank, stages, table, units=self._lane is not None)
        self._program = compile_row(self._row, table, self._transfer, self._crossing)
        self._completed = send_completion(plan, rank)
        self._rollback = rollback_ops(plan, rank)

    def run(self, iteration: int = 0) -> bool:
        """Do the row once. Afterwards every message is through and nothing is kept; gradients are this rank's own
        until `grad_sync.finish()`, which is the caller's (or that of a handler of the plan's last operations).

        Returns whether it came to the end: False where VALIDATE stopped it, on all ranks alike.
        iteration: for messages and the timeline. Communicates over the pipeline, and with whom the stages do.
        Raises PeerLostError naming rank, stage, iteration and operation, ModelError where a stage hands on what cannot
        go to the next, or runs its units in another order than the plan's; other errors than the first get a note that
        says where.
        """
        self._outgoing.clear()
        self._incoming.clear()
        if self._lane is not None:
            self._lane.begin(self._recorder)
        step: Step | None = None
        done = True
        try:
            for step in self._program if self._recorder is None else self._timed(self._recorder, iteration):
                step.call(step.argument)
            step = None
            self._channel.drain()
        except _Stopped:
            done = False
        except PeerLostError as error:
            raise error.at(self._where(step, iteration)) from error
        except Exception as error:
            error.add_note(f"pipeline rank {self._rank}, {self._where(step, iteration)}")
            raise
        finally:
            if self._lane is not None:
                self._lane.drop()
            if self._recorder is not None:
                self._recorder.end_step()
        assert not self._outgoing, f"never sent: {sorted(self._outgoing)}"
        assert not self._incoming, f"never used: {sorted(self._incoming)}"
        for stage in self._stages.values():
            stage.check_empty()
        return done

    def _on_lane(self, placed: Placed) -> None:
        assert self._lane is not None
        self._lane.perform(placed)

    def _crossing(self, op: RawOp, within: Sequence[Placed]) -> Crossing | None:
        """Of a computation. within: operations in its middle."""
        if self._lane is None:
            return None
        chunk = self.plan.placement.chunk_of(op[1])
        return Crossing(op, chunk, self._units[op[1]], within, self._lane, self._boundaries)

    # Around the operations -------------------------------------------------------------------------

    def _timed(self, recorder: Recorder, iteration: int) -> Iterator[Step]:
        """The program; what the loop does between two steps is timed and recorded."""
        recorder.begin_step(self.plan, self._rank, iteration)
        lane = self._lane
        for step in self._program:
            self._waited_s = 0.0
            lane_s = 0.0 if lane is None else lane.spent_s
            start = recorder.now()
            yield step
            end = recorder.now()
            if step.call == self._on_lane:
                continue  # recorded by the lane, once it is known when it was through
            spent_s = 0.0 if lane is None else lane.spent_s - lane_s
            for place in step.places:
                recorder.record(place, start, end, self._waited_s, spent_s)

    def _where(self, step: Step | None, iteration: int) -> str:
        if step is None:
            stages = ", ".join(map(str, sorted(self._stages)))
            return f"stage {stages}, iteration {iteration}, waiting for its last sends"
        ops = [self._row[place] for place in step.places]
        where = f"stage {', '.join(sorted({str(op[1]) for op in ops}))}, iteration {iteration}"
        if kinds.IS_DATA_PARALLEL[ops[0][0]]:
            return where  # the lane has named its operation
        return f"{where}, {', '.join(map(ir.op_text, ops))}"

    # Handlers --------------------------------------------------------------------------------------

    def _forward(self, computation: Computation) -> None:
        op, crossing = computation
        stage, microbatch = op[1], op[2]
        hidden = self._take(ir.RECV_F, stage, microbatch) if stage > 0 else None
        with crossing or _NO_UNITS:
            output = self._stages[stage].forward(microbatch, hidden)
        if stage < self._last_stage:
            self._hand_on(output, ir.SEND_F, ir.RECV_F, stage, stage + 1, microbatch)

    def _backward(self, computation: Computation) -> None:
        """B or BW: the gradient of the output in, that of the input out."""
        op, crossing = computation
        kind, stage, microbatch = op[:3]
        grad = self._take(ir.RECV_B, stage, microbatch) if stage < self._last_stage else None
        with crossing or _NO_UNITS:
            if kind == ir.BW:
                grad = self._stages[stage].backward(microbatch, grad)
            else:
                grad = self._stages[stage].backward_input(microbatch, grad)
        if stage > 0:
            self._hand_on(grad, ir.SEND_B, ir.RECV_B, stage, stage - 1, microbatch)

    def _backward_weight(self, computation: Computation) -> None:
        op, crossing = computation
        with crossing or _NO_UNITS:
            if op[4] < 0:
                self._stages[op[1]].backward_weight(op[2])
            else:
                self._stages[op[1]].backward_weight(op[2], (op[4], op[5]))

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
        if key in self._completed:
            self._channel.release(self._completed[key])
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

    def _transfer(self, batch: tuple[RawOp, ...]) -> None:
        """Post neighbouring transfers; receives are waited for by their consumers."""
        sends = (ir.SEND_F, ir.SEND_B)
        messages = [(op, self._outgoing.pop(op[:3]) if op[0] in sends else None) for op in batch]
        arrivals = iter(self._channel.post(messages))
        for op in batch:
            if op[0] not in sends:
                self._incoming[op[:3]] = next(arrivals)

    def _validate(self, op: RawOp) -> None:
        assert self._validation is not None
        go = self._validation.decide()
        if go is Go.ON:
            return
        # As if the forwards before VALIDATE had not run; see state, [Note: messages of undone forwards].
        # Receives come first: other ranks wait here for their sends, and none waits for one behind it before that.
        late = self._channel.post([(op, None) for op in self._rollback.surplus])
        for arrival in (*self._incoming.values(), *late):
            if not isinstance(arrival, Tensor):
                arrival.wait()
        self._channel.drain()
        self._incoming.clear()
        self._outgoing.clear()
        for stage, microbatch in self._rollback.forwards:
            self._validation.forget(stage, microbatch)
        if go is Go.STOP:
            raise _Stopped
        if self._recorder is not None:
            self._recorder.repeated()
        if self._lane is not None:
            self._lane.drop()  # by `decide`, which has changed the weights
        for step in self._program:
            if step.argument is op:
                return
            if kinds.REPEATED_ON_AGAIN[self._row[step.places[0]][0]]:
                step.call(step.argument)
