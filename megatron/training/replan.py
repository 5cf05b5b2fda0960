"""Measuring the pipeline in the run: its bubble every log interval, and its schedule solved again for what it costs.

All ranks exchange small figures (plan/rank_figures.py), solve the same problem and compare their plans. Weights keep
their bits: an order of operations does not change sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron.core.module import ModelError
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import Plan, plan_hash
from megatron.core.pipeline_parallel.plan.measured_costs import drifted, measured_bubbles, peaks_of
from megatron.core.pipeline_parallel.plan.rank_figures import Figures
from megatron.core.pipeline_parallel.plan.simulate import simulate
from megatron.core.pipeline_parallel.plan.text import to_json
from megatron.core.pipeline_parallel.runtime.profiler import MOST_STEPS, Profiler
from megatron.core.safe_files import SHARED_MODE, publish_text
from megatron.training import pipeline_lines
from megatron.training.build import Engine, refuse_unsplittable
from megatron.training.exit_status import ExitStatus, TrainingExit
from megatron.training.pipeline import PipelineRunner
from megatron.training.plan_again import Again, measured_costs, solve_again, window_of
from megatron.training.plans import Plans, last_num_microbatches
from megatron.training.reporter import Reporter
from megatron.training.run_clock import RunClock
from megatron.training.session import Session

PLAN_FILE = "pipeline-plan.json"
_NS_PER_MS = 1e6


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
        plans: Plans,
        runner: PipelineRunner,
        engine: Engine,
        reporter: Reporter,
        clock: RunClock,
        first_iteration: int,
    ) -> None:
        parallel = session.config.parallel
        self._session, self._plans, self._runner = session, plans, runner
        self._engine, self._reporter, self._clock = engine, reporter, clock
        self._start, self._end = window_of(
            parallel.zero_bubble_pipeline_timers_start_iter,
            parallel.zero_bubble_pipeline_timers_end_iter,
            first_iteration,
        )
        self._length = self._end - self._start
        self._costs: CostModel | None = None  # as last measured
        self._planned: dict[int, float] = {}  # microbatches -> bubble of the plan, by the newest costs
        self._fewest_steps = 0  # that a rank has kept, as of the last log interval
        if runner.profiler is not None:
            runner.profiler.move_window(self._start, self._end)

    def after_step(self, iteration: int, num_microbatches: int) -> pipeline_lines.Bubbles | None:
        """The bubbles of a log interval's last iteration, where a whole pipeline has measured it. Communicates then
        over the world."""
        profiler, session = self._runner.profiler, self._session
        if profiler is None or iteration % session.config.logging.log_interval:
            return None
        told = session.gather([profiler.num_steps, _figures_of_step(profiler, session, iteration)])
        self._fewest_steps = min(num_steps for num_steps, _ in told)
        measured = measured_bubbles([one for _, one in told if one is not None]).get(iteration)
        if measured is None:
            return None
        return pipeline_lines.Bubbles(iteration, self._planned_bubble(num_microbatches), measured)

    def between_steps(self, iteration: int, num_microbatches: int) -> None:
        """Solve again where it is time. Communicates then over the world. Raises TrainingExit where ranks come to
        different plans."""
        profiler = self._runner.profiler
        if profiler is None:
            return
        if self._costs is None and iteration < self._start:
            profiler.forget(
                iteration
            )  # the window is measured by itself; its first step may have run already
        # Behind the end where the last iteration was skipped.
        window_ends = self._costs is None and iteration >= self._end - 1
        at_interval = iteration % self._session.config.logging.log_interval == 0
        enough = self._costs is not None and at_interval
        if not window_ends and not (enough and self._fewest_steps >= min(self._length, MOST_STEPS)):
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
            self._start, self._end = iteration + 1, iteration + 1 + self._length
            profiler.move_window(self._start, self._end)
            return
        costs, changed = measured_costs(figures, self._plans), None
        if self._costs is not None:
            changed = drifted(self._costs, costs)
            if changed is None:
                return
        self._costs = costs
        self._planned.clear()
        most = max(num_microbatches, last_num_microbatches(self._session.config))
        splits = all(splits for _, splits in told)
        again = solve_again(self._plans, costs, num_microbatches, most, splits=splits)
        for line in again.reasons:
            self._session.print_rank_0(f" > --pipeline-schedule auto, by measured costs: {line}")
        path = self._adopt(again, num_microbatches) if again.layout is not None else None
        self._reporter.planned_again(self._told(again, figures, costs, iteration, changed, path))

    def _adopt(self, again: Again, num_microbatches: int) -> str | None:
        """Run the new plan from the next step on; returns the path of its file, if there is one."""
        assert again.layout is not None, "nothing new"
        self._plans.use_layout(again.layout, again.limits)
        self._runner.plan_anew()
        plan = self._plans.train(num_microbatches)
        check_same_plan(self._session.gather(plan_hash(plan)))
        return self._save(plan)

    def _told(
        self,
        again: Again,
        figures: Sequence[Figures],
        costs: CostModel,
        iteration: int,
        changed: str | None,
        path: str | None,
    ) -> pipeline_lines.MeasuredPlan:
        f_ms, b_ms, w_ms = (tuple(one / _NS_PER_MS for one in times) for times in (costs.f, costs.b, costs.w))
        iterations = [told[0] for one in figures for told in one["steps"]]
        return pipeline_lines.MeasuredPlan(
            iteration=iteration,
            first_iteration=min(iterations),
            changed=changed,
            solved=self._plans.reads_costs,
            schedule=again.after.plan.schedule,
            hash=again.hash,
            f_ms=f_ms,
            b_ms=b_ms,
            w_ms=w_ms,
            comm_ms=costs.comm / _NS_PER_MS,
            activation_bytes=tuple(round(size) for size in costs.activation) if self._plans.estimated else (),
            peak_bytes_per_rank=peaks_of(figures, self._plans.placement.num_ranks),
            planned_bubble_before=max(0.0, again.before.bubble_rate),
            planned_bubble=max(0.0, again.after.bubble_rate),
            kept=again.why,
            path=path,
        )

    def _planned_bubble(self, num_microbatches: int) -> float:
        """Of the plan of so many microbatches, by measured costs once there are any."""
        if num_microbatches not in self._planned:
            costs = self._costs if self._costs is not None else self._plans.costs
            rate = simulate(self._plans.train(num_microbatches), costs).bubble_rate
            self._planned[num_microbatches] = max(0.0, rate)  # sums of times are rounded
        return self._planned[num_microbatches]

    def _splits(self) -> bool:
        """Whether this rank's part of the model can split its backwards."""
        try:
            for chunk in self._engine.chunks:
                refuse_unsplittable(chunk.module, self._plans.schedule)
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


def check_same_plan(hashes: Sequence[str]) -> None:
    """hashes: of the plan of every rank. Raises TrainingExit where they differ, which would be noticed by a hang."""
    different = sorted({hashes.index(one) for one in hashes})
    if len(different) > 1:
        told = ", ".join(f"rank {rank} has {hashes[rank][:12]}" for rank in different[:4])
        raise TrainingExit(
            ExitStatus.CONFIGURATION,
            f"ranks would run different pipeline plans ({told}): give --pipeline-schedule-file the same file, and all "
            "hosts the same version of this package",
        )


def _figures_of_step(profiler: Profiler, session: Session, iteration: int) -> Figures | None:
    """How long this rank took for one step, and for its computations; None where it was not measured."""
    step = profiler.step_of(iteration)
    if step is None:
        return None
    return Figures(
        pipeline=list(session.ps.pp_group.ranks),
        rank=session.ps.pp_rank,
        times=[],
        sends=[],
        receives=[],
        steps=[list(step)],
        activations=[],
        peak_bytes=0,
    )
