"""Measuring the pipeline in the run: its bubble every log interval, and its schedule solved again for what it costs.

All ranks exchange small figures (plan/measuring/measured_costs.py), solve the same problem and compare their plans.
Weights keep their bits: an order of operations does not change sums.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from megatron.core.module import ModelError
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import Plan, plan_hash
from megatron.core.pipeline_parallel.plan.measuring.again import planned_bubble, replanned
from megatron.core.pipeline_parallel.plan.measuring.measured_costs import measured_bubbles
from megatron.core.pipeline_parallel.plan.measuring.measured_lines import Bubbles
from megatron.core.pipeline_parallel.plan.spec import PlanPurpose, plan_for
from megatron.core.pipeline_parallel.plan.text import to_json
from megatron.core.safe_files import SHARED_MODE, publish_text
from megatron.training.engine import Engine
from megatron.training.report.reporter import Reporter
from megatron.training.report.session import Session
from megatron.training.report.start_report import check_same_plan
from megatron.training.report.timers import RunClock
from megatron.training.run.build import refuse_unsplittable
from megatron.training.run.pipeline import PipelineRunner

PLAN_FILE = "pipeline-plan.json"


class Replanner:
    """One on every rank; pipelines of one rank have nothing to measure. first_iteration: of this run.

    A schedule is solved again once, at the end of the window of --zero-bubble-pipeline-timers-start-iter and -end-iter,
    by figures that all ranks have exchanged. Bubbles are measured in every log interval's last iteration.
    """

    def __init__(
        self,
        session: Session,
        runner: PipelineRunner,
        engine: Engine,
        reporter: Reporter,
        clock: RunClock,
        first_iteration: int,
    ) -> None:
        self._session, self._runner = session, runner
        self._engine, self._reporter, self._clock = engine, reporter, clock
        self.costs: CostModel | None = None  # as measured
        self._start, self._length = session.config.parallel.measured_window(first_iteration)
        self._move_window(self._start)

    def after_step(self, iteration: int, num_microbatches: int) -> Bubbles | None:
        """The bubbles of a log interval's last iteration, where a whole pipeline has measured it. Communicates then
        over the world."""
        profiler, session = self._runner.profiler, self._session
        if profiler is None or iteration % session.config.logging.log_interval:
            return None
        told = session.gather(profiler.figures_of_step(iteration))
        measured = measured_bubbles([one for one in told if one is not None]).get(iteration)
        if measured is None:
            return None
        spec, wire = self._runner.spec, self._runner.wire
        return Bubbles(iteration, planned_bubble(spec, num_microbatches, self.costs, wire), measured)

    def between_steps(self, iteration: int, num_microbatches: int) -> None:
        """Solve again where it is time. Communicates then over the world. Raises TrainingExit where ranks come to
        different plans."""
        profiler = self._runner.profiler
        if profiler is None or self.costs is not None:
            return
        if iteration < self._start:  # the window is measured by itself; its first step may have run already
            profiler.forget(iteration)
        if iteration >= self._start + self._length - 1:  # behind the end where the last iteration was skipped
            with self._clock.paused(), self._session.watchdog.phase("plan the pipeline"):
                self._take_figures(iteration, num_microbatches)

    def _move_window(self, start: int) -> None:
        self._start = start
        if self._runner.profiler is not None:
            self._runner.profiler.move_window(start, start + self._length)

    def _take_figures(self, iteration: int, num_microbatches: int) -> None:
        """Costs from what was measured in the window, and a plan of them."""
        profiler, runner, session = self._runner.profiler, self._runner, self._session
        assert profiler is not None, "figures of nobody"
        # The next iteration may have run already: it is none of the window's.
        gathered = session.gather([profiler.local_figures(iteration, runner.link_ns()), self._splits()])
        profiler.forget(iteration)
        figures = [one for one, _ in gathered if one is not None]
        if len(figures) < len(gathered):  # iterations were skipped, or broke off: measure the next ones
            self._move_window(iteration + 1)
            return
        runner.keep_groupings(runner.residencies)
        sizes = num_microbatches, max(num_microbatches, session.config.last_num_microbatches)
        splits = all(splits for _, splits in gathered)
        found = replanned(iteration, figures, runner.spec, sizes, splits=splits, lanes=runner.wire)
        self.costs, told = found.costs, found.told
        for line in found.reasons:
            session.print_rank_0(f" > --pipeline-schedule auto, by measured costs: {line}")
        if told.kept is None:
            runner.plan_by(found.spec)
            plan = plan_for(found.spec, num_microbatches, PlanPurpose.TRAIN)
            check_same_plan(session.gather(plan_hash(plan)))
            told = dataclasses.replace(told, path=self._save(found.plan))
        self._reporter.planned_again(told)

    def _splits(self) -> bool:
        """Whether this rank's part of the model can split its backwards."""
        try:
            for chunk in self._engine.chunks:
                refuse_unsplittable(chunk.module, self._runner.spec.schedule)
        except ModelError:
            return False
        return True

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
