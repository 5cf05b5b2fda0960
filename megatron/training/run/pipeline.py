"""A step's microbatches, run by the pipeline's plan: the user's forward step on this rank's stages.

One path for every run: a world of one executes the plan of one stage.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from pathlib import Path

import torch
from torch import Tensor

from megatron.core.distributed.custom_fsdp.unit_events import watch_units
from megatron.core.distributed.plan_inputs import measured_moves, measured_wire, units_of_all_stages
from megatron.core.pipeline_parallel.plan.held.lanes import LaneCosts
from megatron.core.pipeline_parallel.plan.ir import Kind, Plan, RawOp
from megatron.core.pipeline_parallel.plan.planned_residency import HeldBytes, StepMoves
from megatron.core.pipeline_parallel.plan.spec import PlanPurpose, ScheduleSpec
from megatron.core.pipeline_parallel.post_validation.state import Go, Validation
from megatron.core.pipeline_parallel.post_validation.validator import PostValidator
from megatron.core.pipeline_parallel.runtime.data_parallel_lane import UnitBoundaries
from megatron.core.pipeline_parallel.runtime.executor import Executor, Handler
from megatron.core.pipeline_parallel.runtime.p2p import P2P
from megatron.core.pipeline_parallel.runtime.profiler import Profiler
from megatron.core.pipeline_parallel.runtime.recorder import Recorder, Region
from megatron.core.pipeline_parallel.runtime.stage import ModelStage
from megatron.core.pipeline_parallel.runtime.timeline_writer import TimelineWriter
from megatron.core.transformer.experts.counted import counted
from megatron.estimate.own_description import OwnDescription
from megatron.training.engine import Chunk, Engine
from megatron.training.guard.run_folder import OutputPathError
from megatron.training.planner import Planner
from megatron.training.report.session import Session
from megatron.training.report.step_metrics import (
    ForwardStep,
    StepMetrics,
    agreed_names,
    evaluate_loss,
    loss_to_differentiate,
)
from megatron.training.run.data import StepBatches
from megatron.training.run.pipeline_memory import check_validated, settle
from megatron.training.state import StepTask


@dataclasses.dataclass
class _Step:
    """What the stages of this rank need to know of the step under way."""

    batches: StepBatches
    iteration: int
    numbers: StepMetrics


@dataclasses.dataclass(frozen=True)
class RanStep:
    """What a training step has held and moved on this rank. spec, purpose: of the plan that ran. with_new_weights: they
    had changed since the step before. repeated: that one was taken back in this one, and forwards ran again."""

    spec: ScheduleSpec
    purpose: PlanPurpose
    with_new_weights: bool
    repeated: bool
    held: HeldBytes
    moves: StepMoves


class PipelineRunner:
    """Runs the microbatches of steps and evaluations through this rank's stages.

    planner: of its steps. recorder: for who reads steps, if anybody. profiler: of these, for the schedule to be solved
    again by. validator: to be set before the first `train_and_step`.
    """

    def __init__(
        self,
        session: Session,
        engine: Engine,
        forward_step: ForwardStep,
        planner: Planner,
        *,
        recorder: Recorder | None = None,
        profiler: Profiler | None = None,
    ) -> None:
        self.profiler = profiler
        self._ps, self._timers, self._engine = session.ps, session.timers, engine
        self.forward_step = forward_step
        self._per_token_loss = session.config.model.calculate_per_token_loss
        self._counted = counted(session.config.model)
        self._recorder = recorder
        self.region: Region | None = None  # of a profiler, while one runs
        self._channel = P2P(session.ps)
        self.validator: PostValidator | None = None
        self._step: _Step | None = None
        self._own_stages = {chunk.stage: self._stage(chunk) for chunk in engine.chunks}
        self._boundaries = UnitBoundaries()
        self.wire: LaneCosts | None = None  # what is moved costs; None where nothing is
        self.planner, spec = planner, planner.spec
        residency = engine.model.residency(spec.placement.num_ranks, spec.residency)
        if engine.model.has_peers:
            own = spec.local_stages(self._ps.pp_rank)
            described, description = None, session.config.description
            if isinstance(description, OwnDescription) or (engine.is_described and description is not None):
                described = planner.chosen.stages_units or session.config.units_of(planner.chosen)
            planner.serve(units_of_all_stages(engine.model, own, described), residency)
            self.wire = measured_wire(engine.model)
            model, sinks = engine.model, [chunk.sink for chunk in engine.chunks]
            watch_units(model.unit_modules(), model.unit_of_key(), sinks, self._boundaries)
        else:
            planner.adopt(spec.bare)
        self._executors: dict[tuple[int, PlanPurpose], Executor] = {}  # (microbatches, what for)
        self._loss_names: dict[bool, tuple[str, ...]] = {}  # training or not -> agreed by all ranks
        self._began_s = self._step_s = (
            0.0  # of the last training step, which ends when its gradients are summed
        )
        self._ran: dict[int, RanStep] = {}  # by iteration, of the last steps
        self._repeated = False

    def train(self, batches: StepBatches, task: StepTask, *, reduce_gradients: bool = True) -> StepMetrics:
        """Forward and backward of every microbatch; main gradients hold the sums afterwards.

        With `reduce_gradients` they are summed over data parallel ranks too, complete on return; without, they stay
        this rank's own. Communicates over the pipeline and over dp_reduce.
        """
        self._engine.model.begin_step(task.num_microbatches, reduce_gradients=reduce_gradients)
        step = self._begin(batches, task)
        self._execute(task, PlanPurpose.TRAIN)
        numbers = self.finish_gradients() if reduce_gradients else self._named(step.numbers, True)
        if reduce_gradients:
            self._note_ran(task, PlanPurpose.TRAIN)
        self._step = None
        return numbers

    def train_and_step(self, batches: StepBatches, task: StepTask) -> bool:
        """As `train`, by a plan in which the last step is decided on and this one is made: by the validator, whose
        owner calls `finish_gradients`. False where the decision stopped it, see `Executor.run`."""
        self._begin(batches, task)
        keep = self.validator is not None and self.validator.pending
        self._engine.model.begin_step(task.num_microbatches, keep_gradients=keep)
        done = self._execute(task, PlanPurpose.TRAIN_AND_STEP)
        if done:
            self._note_ran(task, PlanPurpose.TRAIN_AND_STEP)
        self._step = None
        return done

    def finish_gradients(self) -> StepMetrics:
        """The backwards of the step under way are done: sum what they left. Communicates over dp_reduce."""
        assert self._step is not None, "no step is under way"
        if self.spec.residency is not None:
            self._engine.model.reductions.check_reduced()
            self._engine.model.reductions.wait_for_all()  # what comes now is behind the row, in plans' bytes too
        with self._timers("all-grads-sync", log_level=2):
            self._engine.model.finish()
            self._engine.biases.gather()
        self._step_s = time.monotonic() - self._began_s
        return self._named(self._step.numbers, True)

    def ran(self, iteration: int) -> RanStep | None:
        """One of the last two training steps that came to their end, where data parallelism moves anything."""
        return self._ran.get(iteration)

    def _note_ran(self, task: StepTask, purpose: PlanPurpose) -> None:
        if self.wire is None:
            return
        model, tracker = self._engine.model, self._engine.memory_tracker
        gathered, gradients = tracker.fullest("gathered"), tracker.fullest("grads", "extra")
        self._ran[task.iteration] = RanStep(
            self.spec,
            purpose,
            model.began_with_new_weights,
            self._repeated,
            HeldBytes(self._engine.persistent_bytes(), gathered, gradients, None),
            measured_moves(model, self.wire, self._step_s),
        )
        self._ran.pop(task.iteration - 2, None)

    def evaluate(self, batches: StepBatches, numbers: StepMetrics, task: StepTask) -> None:
        """Forward only, without dropout or gradients; losses are added to `numbers`. Communicates over the pipeline."""
        self._begin(batches, task, numbers)
        self._engine.model.settle_weights()  # a plan of forwards gathers only what comes and goes
        modules = [chunk.module for chunk in self._engine.chunks]
        was_training = [module.training for module in modules]
        for module in modules:
            module.eval()
        with torch.no_grad():
            self._execute(task, PlanPurpose.EVALUATE)
        self._step = None
        for module, training in zip(modules, was_training, strict=True):
            module.train(training)
        self._named(numbers, False)

    @property
    def spec(self) -> ScheduleSpec:
        return self.planner.spec

    def measure_link(self) -> int:
        """ns that a message takes on the slowest of this rank's links, for readers of steps too. Communicates over the
        pipeline, between steps, of which there has been one."""
        found = self._channel.ping()
        if self._recorder is not None:
            self._recorder.message_takes(found)
        return found

    def close(self) -> None:
        """The run is over: close the recorder."""
        if self._recorder is not None:
            self._recorder.close()

    def _begin(self, batches: StepBatches, task: StepTask, numbers: StepMetrics | None = None) -> _Step:
        if numbers is None:
            numbers = StepMetrics(self._ps.device.torch_device, self._counted)
        for chunk in self._engine.chunks:
            chunk.context.counts.clear()
        self._step = _Step(batches, task.iteration, numbers)
        return self._step

    def _named(self, numbers: StepMetrics, training: bool) -> StepMetrics:
        """Tell the numbers what layers have counted, and the names of the losses, which stages without a loss do not
        know by themselves."""
        for chunk in self._engine.chunks:
            numbers.add_layers(chunk.context.counts)
        if self._ps.pp_size > 1:
            if training not in self._loss_names:
                self._loss_names[training] = agreed_names(numbers.names, self._ps)
            numbers.agree(self._loss_names[training])
        return numbers

    def _execute(self, task: StepTask, purpose: PlanPurpose) -> bool:
        key = (task.num_microbatches, purpose)
        plan, executor = self.planner.plan(*key), self._executors.get(key)
        if executor is None or executor.plan is not plan:  # the planner has decided anew
            executor = self._executors[key] = self._executor(plan, purpose)
        self._engine.memory_tracker.begin_step()
        self._began_s, self._repeated = time.monotonic(), False
        return executor.run(task.iteration, self.region)

    def _executor(self, plan: Plan, purpose: PlanPurpose) -> Executor:
        handlers: dict[Kind, Handler] = {}
        validation: Validation | None = None
        if purpose is PlanPurpose.TRAIN_AND_STEP:
            assert self.validator is not None, "train_and_step() without a validator"
            validation = Validation(self._decide, self._forget)
            step = self.validator.handlers[Kind.STEP]

            def timed_step(op: RawOp) -> None:
                with self._timers("optimizer", log_level=1):
                    step(op)

            handlers = {**self.validator.handlers, Kind.STEP: timed_step}
        units = self.spec.stages_units
        return Executor(
            plan,
            self._ps.pp_rank,
            self._own_stages,
            self._channel,
            self._engine.model,
            units=None if units is None else {stage: units[stage] for stage in self._own_stages},
            boundaries=self._boundaries,
            recorder=None if purpose is PlanPurpose.EVALUATE else self._recorder,
            handlers=handlers,
            validation=validation,
        )

    def _decide(self) -> Go:
        assert self.validator is not None, "a decision without a validator"
        go = self.validator.decide()
        self._repeated = go is Go.AGAIN
        return go

    def _forget(self, stage: int, microbatch: int) -> None:
        """Forwards of the step under way are undone, all that there were: so are their losses and counts."""
        assert self._step is not None, "forwards outside of a step"
        self._own_stages[stage].forget(microbatch)
        self._step.numbers.clear()
        for chunk in self._engine.chunks:
            chunk.context.counts.clear()

    def _stage(self, chunk: Chunk) -> ModelStage:
        """Its backwards have a timer under Megatron's name; the forward's is around the user's function."""
        run = functools.partial(self._forward, chunk)
        timed = functools.partial(self._timers, "backward-compute", log_level=2)
        return ModelStage(run, chunk.sink, begins=chunk.spec.embedding, ends=chunk.spec.loss, timed=timed)

    def _forward(self, chunk: Chunk, microbatch: int, hidden: Tensor | None) -> Tensor:
        """One chunk's output for a microbatch; where the loss is, the number to differentiate."""
        step, ps = self._step, self._ps
        assert step is not None, "a forward outside of a step"
        chunk.context.begin_microbatch(step.iteration, microbatch, microbatch * ps.dp_size + ps.dp_rank)
        scale = self._engine.scaler.scale  # as it is now: a decision on the last step may have moved it
        chunk.context.loss_scale = scale
        chunk.set_input(hidden)
        with self._timers("forward-compute", log_level=2):
            output, loss_func = self.forward_step(iter([step.batches.microbatch(microbatch)]), chunk.module)
        chunk.set_input(None)
        if not chunk.spec.loss:
            return output
        result = evaluate_loss(output, loss_func)
        step.numbers.add(result)
        if not torch.is_grad_enabled():
            return result.loss
        loss = loss_to_differentiate(result, self._per_token_loss)
        return loss * scale if scale != 1.0 else loss


def build_runner(session: Session, engine: Engine, forward_step: ForwardStep) -> PipelineRunner:
    """The runner of a run, by its flags. Communicates over the world where the device limits activations.

    Raises OutputPathError where the timeline cannot be written, ConfigurationError where the device has no room.
    """
    parallel = session.config.parallel
    planner = session.planner
    settle(session, planner, engine)
    if parallel.enable_optimizer_post_validation:
        check_validated(session, planner, engine)
    directory = session.config.logging.log_pipeline_timeline
    try:
        writer = None if directory is None else TimelineWriter(Path(directory), session.ps)
    except OSError as error:
        raise OutputPathError(f"--log-pipeline-timeline {directory}: {error}") from None
    profiler = None
    ps = session.ps
    if (
        ps.pp_size > 1 or parallel.rank_memory_limit is not None or ps.is_fake
    ):  # there are messages, or limits to keep to, or bytes to show
        live, (start, end) = engine.memory_tracker.live, parallel.timers_window
        profiler = Profiler(
            session.device,
            session.ps.pp_group.ranks,
            start=start,
            end=end,
            interval=session.config.logging.log_interval,
            transient_bytes=lambda: sum(live(kind) for kind in ("gathered", "grads", "extra")),
        )
    readers = [one for one in (writer, profiler) if one is not None]
    recorder = Recorder(session.device, readers) if readers else None
    runner = PipelineRunner(session, engine, forward_step, planner, recorder=recorder, profiler=profiler)
    if writer is not None:
        writer.lanes, writer.at_rest = runner.spec.with_lanes(runner.wire), engine.persistent_bytes()
    return runner
