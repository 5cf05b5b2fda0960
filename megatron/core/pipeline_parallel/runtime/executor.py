"""One rank's row of a plan, done: one dispatch table from kinds to methods, and no schedule's name.

A plan says everything: order, transfers, batches, overlap, gathers and reductions. Whatever a schedule adds is an
operation with a kind, and a kind is a handler in the table: the executor's own, or one that another module hands in
(`handlers`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

from torch import Tensor

from megatron.core.module import ModelError
from megatron.core.pipeline_parallel.plan import ir
from megatron.core.pipeline_parallel.plan.held.sends import Key, send_completion
from megatron.core.pipeline_parallel.plan.held.units import StageUnits
from megatron.core.pipeline_parallel.plan.ir import Kind, Plan, RawOp, op_text
from megatron.core.pipeline_parallel.post_validation.state import Go, Validation, rollback_ops
from megatron.core.pipeline_parallel.runtime.data_parallel_lane import (
    Crossing,
    DataParallelLane,
    Placed,
    UnitBoundaries,
)
from megatron.core.pipeline_parallel.runtime.p2p import Arrival, Channel
from megatron.core.pipeline_parallel.runtime.program import Step, check_row, compile_row
from megatron.core.pipeline_parallel.runtime.recorder import Recorder, Region
from megatron.core.protocols import GradSync, Stage
from megatron.core.transport.peer_loss import PeerLostError

Handler = Callable[[RawOp], None]


class _Stopped(Exception):  # noqa: N818 - no error: the way out of the row
    """VALIDATE said STOP."""


_NO_UNITS = contextlib.nullcontext()
_SENDS = (ir.SEND_F, ir.SEND_B)
# What computes (`Stage`), which message brings the input, which takes the result, and to which neighbour.
_COMPUTED_BY = {
    ir.F: ("forward", ir.RECV_F, ir.SEND_F, 1),
    ir.B: ("backward_input", ir.RECV_B, ir.SEND_B, -1),
    ir.BW: ("backward", ir.RECV_B, ir.SEND_B, -1),
}


class _Computation(NamedTuple):
    """run: with the input, None where there is none. takes: what the input is filed under in `_incoming`, gives: the
    result in `into`; None where nobody hands one on. crossing: does what its units need meanwhile."""

    op: RawOp
    run: Callable[[Tensor | None], Tensor | None]
    takes: Key | None
    gives: Key | None
    into: dict[Key, Any]
    crossing: contextlib.AbstractContextManager[None]


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
        self._ranks = plan.placement.ranks()
        # Tensors on their way: what a send takes; what a computation takes, there already or arriving.
        self._outgoing: dict[Key, Tensor] = {}
        self._incoming: dict[Key, Tensor | Arrival] = {}
        self._waited_s = 0.0
        # Every kind that this executor does by itself; transfers are done by batches, operations in the middle of
        # computations by their `Crossing`.
        table: dict[int, Callable[[Any], None]] = dict.fromkeys((*_COMPUTED_BY, ir.W), self._compute)
        self._lane: DataParallelLane | None = None
        if grad_sync is not None and plan.has_lanes:
            assert set(stages) <= set(self._units), f"units of {sorted(self._units)}, stages {sorted(stages)}"
            chunks = {stage: plan.placement.chunk_of(stage) for stage in stages}
            self._lane = DataParallelLane(self._row, grad_sync, self._units, chunks)
            lane = self._lane
            beside = (kind for kind in Kind if ir.IS_BESIDE[kind])
            table |= dict.fromkeys(beside, lambda placed: lane.perform(placed))
        if validation is not None:
            table[Kind.VALIDATE] = self._validate
        both = [kind.name for kind in handlers or {} if kind in table or ir.IS_TRANSFER[kind]]
        assert not both, f"handlers for what the executor does itself: {both}"
        table |= {int(kind): handler for kind, handler in (handlers or {}).items()}
        check_row(plan, rank, stages, table, units=self._lane is not None)
        self._program = self._running = compile_row(self._row, table, self._transfer, self._computation)
        self._completed = send_completion(plan, rank)
        self._rollback = rollback_ops(plan, rank)

    def run(self, iteration: int = 0, region: Region | None = None) -> bool:
        """Do the row once. Afterwards every message is through and nothing is kept; gradients are this rank's own
        until `grad_sync.finish()`, which is the caller's (or that of a handler of the plan's last operations).

        Returns whether it came to the end: False where VALIDATE stopped it, on all ranks alike.
        iteration: for messages and the timeline. region: of a profiler that runs, which gets each operation as a range
        by its text; transfers that are posted together lie in one another. Communicates over the pipeline, and with
        whom the stages do.
        Raises PeerLostError naming rank, stage, iteration and operation, ModelError where a stage hands on what cannot
        go to the next, or runs its units in another order than the plan's; other errors than the first get a note that
        says where.
        """
        self._outgoing.clear()
        self._incoming.clear()
        self._running = (
            self._program if region is None else [self._named(step, region) for step in self._program]
        )
        if self._lane is not None:
            self._lane.begin(self._recorder, region)
        step: Step | None = None
        done = True
        try:
            for step in self._running if self._recorder is None else self._timed(self._recorder, iteration):
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

    def _computation(self, op: RawOp, within: Sequence[Placed]) -> _Computation:
        """within: operations in its middle."""
        kind, stage, microbatch = op[:3]
        crossing: contextlib.AbstractContextManager[None] = _NO_UNITS
        if self._lane is not None:
            chunk = self.plan.placement.chunk_of(stage)
            crossing = Crossing(op, chunk, self._units[stage], within, self._lane, self._boundaries)
        if kind == ir.W:
            units = () if op[4] < 0 else ((op[4], op[5]),)
            weights = functools.partial(self._stages[stage].backward_weight, microbatch, *units)
            return _Computation(op, lambda _: weights(), None, None, {}, crossing)
        name, receive, send, step = _COMPUTED_BY[kind]
        every, target = range(len(self._ranks)), stage + step
        takes = (receive, stage, microbatch) if stage - step in every else None
        gives, into = (send, stage, microbatch), cast(dict[Key, Any], self._outgoing)
        if target in every and self._ranks[target] == self._rank:  # straight to the other stage
            gives, into = (receive, target, microbatch), self._incoming
        run = functools.partial(getattr(self._stages[stage], name), microbatch)
        return _Computation(op, run, takes, gives if target in every else None, into, crossing)

    # Around the operations -------------------------------------------------------------------------

    def _timed(self, recorder: Recorder, iteration: int) -> Iterator[Step]:
        """The program; what the loop does between two steps is timed and recorded."""
        recorder.begin_step(self.plan, self._rank, iteration)
        lane = self._lane
        for step in self._running:
            self._waited_s = 0.0
            lane_s = 0.0 if lane is None else lane.spent_s
            start = recorder.now()
            yield step
            end = recorder.now()
            if ir.IS_BESIDE[self._row[step.places[0]][0]]:
                continue  # recorded by the lane, once it is known when it was through
            spent_s = 0.0 if lane is None else lane.spent_s - lane_s
            for place in step.places:
                recorder.record(place, start, end, self._waited_s, spent_s)

    def _named(self, step: Step, region: Region) -> Step:
        """Its operations as ranges; the lane names its own."""
        texts = [op_text(op) for op in map(self._row.__getitem__, step.places) if not ir.IS_BESIDE[op[0]]]

        def call(argument: Any) -> None:
            with contextlib.ExitStack() as ranges:
                for text in texts:
                    ranges.enter_context(region(text))
                step.call(argument)

        return step._replace(call=call) if texts else step

    def _where(self, step: Step | None, iteration: int) -> str:
        if step is None:
            stages = ", ".join(map(str, sorted(self._stages)))
            return f"stage {stages}, iteration {iteration}, waiting for its last sends"
        ops = [self._row[place] for place in step.places]
        where = f"stage {', '.join(sorted({str(op[1]) for op in ops}))}, iteration {iteration}"
        if ir.IS_BESIDE[ops[0][0]]:
            return where  # the lane has named its operation
        return f"{where}, {', '.join(map(op_text, ops))}"

    # Handlers --------------------------------------------------------------------------------------

    def _compute(self, computation: _Computation) -> None:
        """F, B, BW or W."""
        op, run, takes, gives, into, crossing = computation
        given = None if takes is None else self._take(takes)
        with crossing:
            result = run(given)
        if gives is None:
            return
        if result is None:
            target = op[1] + _COMPUTED_BY[op[0]][3]
            raise ModelError(
                f"stage {op[1]} handed nothing on to stage {target} for microbatch {op[2]}: a stage answers with"
                " a tensor wherever another one follows"
            )
        into[gives] = result

    def _take(self, key: Key) -> Tensor:
        """An input, waited for if it is still on its way."""
        one = self._incoming.pop(key)
        if isinstance(one, Tensor):
            return one
        start = 0.0 if self._recorder is None else self._recorder.now()
        tensor = one.wait()
        if self._recorder is not None:
            self._waited_s += self._recorder.now() - start
        if key in self._completed:
            self._channel.release(self._completed[key])
        return tensor

    def _transfer(self, batch: tuple[RawOp, ...]) -> None:
        """Post neighbouring transfers; receives are waited for by their consumers."""
        messages = [(op, self._outgoing.pop(op[:3]) if op[0] in _SENDS else None) for op in batch]
        arrivals = iter(self._channel.post(messages))
        for op in batch:
            if op[0] not in _SENDS:
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
        for step in self._running:
            if step.argument is op:
                return
            if ir.KINDS[self._row[step.places[0]][0]].repeated:
                step.call(step.argument)
