"""Measuring the steps of a run: a pipeline's bubble, what data parallelism holds and moves, and schedules solved again.

All ranks exchange small figures (plan/measuring/measured_costs.py), solve the same problem and compare their plans.
Weights keep their bits: an order of operations does not change sums.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from megatron.core.distributed.plan_inputs import measured_moves
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import Plan, plan_hash
from megatron.core.pipeline_parallel.plan.measuring.again import Bubbles, planned_bubble, replanned
from megatron.core.pipeline_parallel.plan.measuring.measured_costs import measured_bubbles
from megatron.core.pipeline_parallel.plan.planned_residency import (
    HeldBytes,
    StepMoves,
    StepResidency,
    at_once_lines,
    planned_residency,
    start_up_lines,
)
from megatron.core.pipeline_parallel.plan.spec import PlanPurpose, plan_for
from megatron.core.pipeline_parallel.plan.text import to_json
from megatron.core.safe_files import SHARED_MODE, publish_text
from megatron.core.words import size_text
from megatron.training.report.reporter import check_same_plan
from megatron.training.run.build import unsplittable
from megatron.training.run.parts import RunParts
from megatron.training.state import StepTask

PLAN_FILE = "pipeline-plan.json"


class Measuring:
    """One on every rank; pipelines of one rank have no bubble and nothing to solve, engines that move nothing no
    residency. What the engine holds at rest is taken when this is made.

    A schedule is solved again once, at the end of the window of --zero-bubble-pipeline-timers-start-iter and -end-iter,
    by figures that all ranks have exchanged. Bubbles and residency are measured in every log interval's last iteration;
    of residency the fullest pipeline rank by plan is told.
    """

    def __init__(self, parts: RunParts) -> None:
        self._parts, self._session, self._pipeline = parts, parts.session, parts.pipeline
        self._costs: CostModel | None = None  # as measured
        self._start = self._length = 0
        if parts.pipeline.spec.residency is None:
            return
        validated = self._session.config.parallel.enable_optimizer_post_validation
        self._purpose = PlanPurpose.TRAIN_AND_STEP if validated else PlanPurpose.TRAIN
        told = self._session.gather([self._session.ps.pp_rank, parts.engine.persistent_bytes()])
        ranks = range(self._session.ps.pp_size)
        self._at_rest = tuple(max(size for rank, size in told if rank == pp_rank) for pp_rank in ranks)

    def report_residency(self, num_microbatches: int) -> None:
        """At start-up; nothing where data parallelism moves nothing."""
        spec = self._pipeline.spec
        if spec.residency is None:
            return
        told = planned_residency(spec, num_microbatches, self._purpose, self._at_rest)
        lines = start_up_lines(spec.schedule, spec.residency, *told)
        held = told[1]
        most = size_text(held.total, digits=3) + (" and activations" if held.activations is None else "")
        brief = f" > memory in a step: at most {most} of tensors planned on a rank"
        self._session.print_rank_last(*lines, brief=brief)
        self._session.print_rank_last(*at_once_lines(spec, num_microbatches, self._purpose))

    def begin(self, first_iteration: int) -> None:
        """The run's first iteration is known: so is the window."""
        start, self._length = self._session.config.parallel.measured_window(first_iteration)
        self._move_window(start)

    def after_step(self, task: StepTask) -> tuple[Bubbles | None, StepResidency | None]:
        """Of a log interval's last iteration, what a whole pipeline has measured of it. Communicates then over the
        world."""
        if task.iteration % self._session.config.logging.log_interval:
            return None, None
        return self._bubbles(task), self._residency(task)

    def between_steps(self, task: StepTask) -> None:
        """Solve again where it is time. Communicates then over the world. Raises TrainingExit where ranks come to
        different plans."""
        profiler, iteration = self._pipeline.profiler, task.iteration
        if profiler is None or self._costs is not None:
            return
        if iteration < self._start:  # the window is measured by itself; its first step may have run already
            profiler.forget(iteration)
        if iteration >= self._start + self._length - 1:  # behind the end where the last iteration was skipped
            with self._parts.clock.paused(), self._session.watchdog.phase("plan the pipeline"):
                self._take_figures(iteration, task.num_microbatches)

    def _bubbles(self, task: StepTask) -> Bubbles | None:
        if (profiler := self._pipeline.profiler) is None:
            return None
        told = self._session.gather(profiler.figures_of_step(task.iteration))
        measured = measured_bubbles([one for one in told if one is not None]).get(task.iteration)
        if measured is None:
            return None
        spec, wire = self._pipeline.spec, self._pipeline.wire
        planned = planned_bubble(spec, task.num_microbatches, self._costs, wire)
        return Bubbles(task.iteration, planned, measured)

    def _residency(self, task: StepTask) -> StepResidency | None:
        pipeline, engine = self._pipeline, self._parts.engine
        if pipeline.spec.residency is None:
            return None
        assert pipeline.wire is not None, "a residency without a wire"
        asked = pipeline.spec, task.num_microbatches, self._purpose, self._at_rest, self._costs, pipeline.wire
        rank, planned, planned_moves = planned_residency(*asked)
        tracker = engine.memory_tracker
        gradients = tracker.peak("grads") + tracker.peak("extra")
        held = HeldBytes(engine.persistent_bytes(), tracker.peak("gathered"), gradients, None)
        tracker.reset_peaks()
        moves = measured_moves(engine.model, pipeline.wire, pipeline.step_s)
        own = [dataclasses.asdict(one) for one in (held, moves)]
        told = self._session.gather([self._session.ps.pp_rank, *own])
        mine = [(HeldBytes(**held), StepMoves(**moves)) for of, held, moves in told if of == rank]
        measured, _ = max(mine, key=lambda one: one[0].total)
        _, moves = max(mine, key=lambda one: one[1].exposed_share or 0.0)  # the one that has waited longest
        return StepResidency(task.iteration, rank, planned, measured, planned_moves, moves)

    def _move_window(self, start: int) -> None:
        self._start = start
        if self._pipeline.profiler is not None:
            self._pipeline.profiler.move_window(start, start + self._length)

    def _take_figures(self, iteration: int, num_microbatches: int) -> None:
        """Costs from what was measured in the window, and a plan of them."""
        profiler, pipeline, session = self._pipeline.profiler, self._pipeline, self._session
        assert profiler is not None, "figures of nobody"
        chunks, schedule = self._parts.engine.chunks, pipeline.spec.schedule
        splits = all(unsplittable(chunk.module, schedule) is None for chunk in chunks)
        # The next iteration may have run already: it is none of the window's.
        gathered = session.gather([profiler.local_figures(iteration, pipeline.link_ns()), splits])
        profiler.forget(iteration)
        figures = [one for one, _ in gathered if one is not None]
        if len(figures) < len(gathered):  # iterations were skipped, or broke off: measure the next ones
            self._move_window(iteration + 1)
            return
        pipeline.keep_groupings(pipeline.residencies)
        sizes = num_microbatches, max(num_microbatches, session.config.last_num_microbatches)
        splits = all(splits for _, splits in gathered)
        spec, self._costs, reasons, told = replanned(
            iteration, figures, pipeline.spec, sizes, splits=splits, lanes=pipeline.wire
        )
        why = " > --pipeline-schedule auto, by measured costs: "
        session.print_rank_0(*(f"{why}{line}" for line in reasons), brief="")
        if told.kept is None:
            pipeline.plan_by(spec)
            bare, plan = (plan_for(one, num_microbatches, PlanPurpose.TRAIN) for one in (spec.bare, spec))
            check_same_plan(session.gather(plan_hash(plan)))
            told = dataclasses.replace(told, path=self._save(bare))
        self._parts.reporter.planned_again(told)

    def _save(self, plan: Plan) -> str | None:
        """Beside checkpoints, else beside the timeline, by the rank that keeps the metrics; a run goes on without."""
        config = self._session.config
        directory = config.checkpoint.save or config.logging.log_pipeline_timeline
        if directory is None:
            return None
        path = Path(directory) / PLAN_FILE
        if self._session.ps.is_last_rank:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                publish_text(path, to_json(plan), mode=SHARED_MODE)
            except OSError as error:
                self._session.print_rank_last(f"WARNING: the pipeline's plan cannot be saved: {error}")
                return None
        return str(path)
