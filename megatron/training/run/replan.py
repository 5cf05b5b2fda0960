"""Measuring the pipeline in the run: its bubble every log interval, and its schedule solved again for what it costs.

All ranks exchange small figures (plan/rank_figures.py), solve the same problem and compare their plans. Weights keep
their bits: an order of operations does not change sums.
"""

from __future__ import annotations

from pathlib import Path

from megatron.core.module import ModelError
from megatron.core.pipeline_parallel.plan.again import planned_bubble, replanned
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import Plan, plan_hash
from megatron.core.pipeline_parallel.plan.measured_costs import measured_bubbles
from megatron.core.pipeline_parallel.plan.measured_lines import Bubbles, MeasuredPlan
from megatron.core.pipeline_parallel.plan.rank_figures import Figures
from megatron.core.pipeline_parallel.plan.spec import Purpose, plan_for
from megatron.core.pipeline_parallel.plan.text import to_json
from megatron.core.pipeline_parallel.runtime.profiler import MOST_STEPS, Profiler
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

    [Note: when a schedule is solved again] At the end of the window of --zero-bubble-pipeline-timers-start-iter and
    -end-iter. From then on the last iterations of log intervals are measured: of as many of them as the window has
    iterations (32 at the most) costs are made again, and where one differs by more than a tenth from what the schedule
    was last solved for, it is solved again. Everything is decided by figures that all ranks have exchanged.
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
        self._start, self._length = session.config.parallel.measured_window(first_iteration)
        self.costs: CostModel | None = None  # as last measured
        self._fewest_steps = 0  # that a rank has kept, as of the last log interval
        if runner.profiler is not None:
            runner.profiler.move_window(self._start, self._start + self._length)

    def after_step(self, iteration: int, num_microbatches: int) -> Bubbles | None:
        """The bubbles of a log interval's last iteration, where a whole pipeline has measured it. Communicates then
        over the world."""
        profiler, session = self._runner.profiler, self._session
        if profiler is None or iteration % session.config.logging.log_interval:
            return None
        told = session.gather([profiler.num_steps, profiler.figures_of_step(iteration)])
        self._fewest_steps = min(num_steps for num_steps, _ in told)
        measured = measured_bubbles([one for _, one in told if one is not None]).get(iteration)
        if measured is None:
            return None
        spec, wire = self._runner.spec, self._runner.wire
        return Bubbles(iteration, planned_bubble(spec, num_microbatches, self.costs, wire), measured)

    def between_steps(self, iteration: int, num_microbatches: int) -> None:
        """Solve again where it is time. Communicates then over the world. Raises TrainingExit where ranks come to
        different plans."""
        profiler = self._runner.profiler
        if profiler is None:
            return
        if self.costs is None:
            # The window is measured by itself; its first step may have run already.
            if iteration < self._start:
                profiler.forget(iteration)
            # Behind the end where the last iteration was skipped.
            is_time = iteration >= self._start + self._length - 1
        else:
            enough = self._fewest_steps >= min(self._length, MOST_STEPS)
            is_time = enough and iteration % self._session.config.logging.log_interval == 0
        if not is_time:
            return
        with self._clock.paused(), self._session.watchdog.phase("plan the pipeline"):
            self._take_figures(profiler, iteration, num_microbatches)

    # --- costs and plans

    def _take_figures(self, profiler: Profiler, iteration: int, num_microbatches: int) -> None:
        """Costs from what was measured since the last time, and a plan of them if they are new."""
        # The next iteration may have run already: it is of those measured next.
        told = self._session.gather([profiler.local_figures(iteration), self._splits()])
        profiler.forget(iteration)
        figures: list[Figures] = [one for one, _ in told if one is not None]
        if len(figures) < len(told):  # iterations were skipped, or broke off: measure the next ones
            self._start = iteration + 1
            profiler.move_window(self._start, self._start + self._length)
            return
        self._runner.keep_groupings(self._runner.residencies)
        most = max(num_microbatches, self._session.config.last_num_microbatches)
        splits = all(splits for _, splits in told)
        sizes, wire = (num_microbatches, most), self._runner.wire
        found = replanned(figures, self._runner.spec, self.costs, sizes, splits=splits, lanes=wire)
        if found is None:
            return
        self.costs, path = found.costs, None
        for line in found.reasons:
            self._session.print_rank_0(f" > --pipeline-schedule auto, by measured costs: {line}")
        if found.kept is None:
            self._runner.plan_by(found.spec)
            plan = plan_for(found.spec, num_microbatches, Purpose.TRAIN)
            check_same_plan(self._session.gather(plan_hash(plan)))
            path = self._save(found.plan)
        self._reporter.planned_again(MeasuredPlan.of(iteration, figures, found, path))

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
