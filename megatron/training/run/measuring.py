"""Measuring the steps of a run: a pipeline's bubble, what data parallelism holds and moves, and schedules solved again;
and before the first plan is made what exchanges with experts cost.

All ranks exchange small figures (plan/measuring/measured_costs.py), solve the same problem and compare their plans.
Weights keep their bits: an order of operations does not change sums.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import torch

from megatron.core.device import product
from megatron.core.distributed.plan_inputs import median_seconds
from megatron.core.pipeline_parallel.plan.build import plan_for
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.held.units import groups_of
from megatron.core.pipeline_parallel.plan.ir import Plan, plan_hash
from megatron.core.pipeline_parallel.plan.measuring.replan import Bubbles
from megatron.core.pipeline_parallel.plan.planned_residency import (
    HeldBytes,
    StepMoves,
    StepResidency,
    at_once_lines,
    planned_residency,
    start_up_lines,
)
from megatron.core.pipeline_parallel.plan.spec import PlanPurpose, ScheduleSpec
from megatron.core.pipeline_parallel.plan.text import to_json
from megatron.core.pipeline_parallel.runtime.profiler import Profiler
from megatron.core.safe_files import SHARED_MODE, publish_text
from megatron.core.tensor_parallel.expert_ranks import ExpertRanks
from megatron.core.transport import collectives, host_data
from megatron.core.transport.parallel_state import ParallelState
from megatron.core.words import size_text
from megatron.estimate.description import EXCHANGE, ModelDescription
from megatron.estimate.exchange_wire import ExchangeWire
from megatron.estimate.own_description import OwnDescription
from megatron.training.config.config import Config
from megatron.training.report.plan_facts import check_same_plan
from megatron.training.run.build import params_dtype, unsplittable
from megatron.training.run.parts import RunParts
from megatron.training.state import StepTask

PLAN_FILE = "pipeline-plan.json"
_LARGEST_EXCHANGE = 1 << 24  # bytes of an exchange
_MOST_TOKENS = 1024  # of a product


class Measuring:
    """One on every rank; pipelines of one rank have no bubble and nothing to solve, engines that move nothing no
    residency. What the engine holds at rest is taken when this is made.

    A schedule is solved again once, at the end of the window of --zero-bubble-pipeline-timers-start-iter and -end-iter,
    by figures that all ranks have exchanged. Bubbles and residency are measured in every log interval's last iteration;
    of residency the fullest pipeline rank by plan is told.
    """

    def __init__(self, parts: RunParts) -> None:
        self._parts, self._session, self._pipeline = parts, parts.session, parts.pipeline
        self._start = self._length = 0
        self._link_known = False
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
        if spec.residency is None or spec.stages_units is None:
            return
        planned = planned_residency(
            spec, num_microbatches, self._purpose, self._at_rest, self._in_bytes(spec)
        )
        held = planned.at_once
        most = size_text(held.total, digits=3) + (" and activations" if held.activations is None else "")
        brief = f" > memory in a step: at most {most} of tensors planned on a rank"
        lines = start_up_lines(spec.schedule, spec.residency, groups_of(spec.stages_units), planned)
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
        if profiler is None:
            return
        if not self._link_known:
            self._pipeline.measure_link()
            self._link_known = True
        if self._pipeline.planner.costs is not None:
            return
        if iteration < self._start:  # the window is measured by itself; its first step may have run already
            profiler.forget(iteration)
        if iteration >= self._start + self._length - 1:  # behind the end where the last iteration was skipped
            with self._parts.clock.paused(), self._session.watchdog.phase("plan the pipeline"):
                self._take_figures(iteration, task.num_microbatches)

    def _bubbles(self, task: StepTask) -> Bubbles | None:
        if (profiler := self._pipeline.profiler) is None or len(self._session.ps.pp_group.ranks) == 1:
            return None
        told = self._session.gather(profiler.figures_of_step(task.iteration))
        step, figures = profiler.step_of(task.iteration), [one for one in told if one is not None]
        if step is None or len(figures) < len(told):
            return None
        return Bubbles.of(figures, step.plan, self._pipeline.spec.with_lanes(self._pipeline.wire))

    def _in_bytes(self, spec: ScheduleSpec) -> CostModel | None:
        """By which activations are counted; None where nobody has looked at the model that runs."""
        is_own = isinstance(self._session.config.description, OwnDescription)
        if not (is_own or self._parts.engine.is_described):
            return None
        return self._pipeline.planner.model.in_bytes(spec)

    def _residency(self, task: StepTask) -> StepResidency | None:
        pipeline, profiler = self._pipeline, self._pipeline.profiler
        if pipeline.spec.residency is None or (ran := pipeline.ran(task.iteration)) is None:
            return None
        asked = ran.spec, task.num_microbatches, ran.purpose, self._at_rest, self._in_bytes(ran.spec)
        planned = functools.partial(planned_residency, *asked, pipeline.planner.costs, pipeline.wire)
        step = None if profiler is None else profiler.step_of(task.iteration)
        facts = ran.with_new_weights, ran.repeated  # a rank may have stepped that others waited with
        held, moves = dataclasses.asdict(ran.held), dataclasses.asdict(ran.moves)
        activations = 0 if step is None else step.peak_bytes
        told = self._session.gather([self._session.ps.pp_rank, facts, activations, held, moves])
        rank = planned().rank
        mine = [one[1:] for one in told if one[0] == rank]
        (changed, repeated), *_ = mine[0]
        measured = max((HeldBytes(**held) for *_, held, _ in mine), key=lambda one: one.total)
        # The one that has waited longest.
        longest = max((StepMoves(**moves) for *_, moves in mine), key=lambda one: one.exposed_share or 0.0)
        most = max(activations for _, activations, *_ in mine)
        found = planned(weights_changed=changed, repeated=repeated)
        return StepResidency(task.iteration, found, measured, most or None, longest)

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
        link_ns = pipeline.measure_link()
        gathered = session.gather([profiler.local_figures(iteration, link_ns), splits])
        profiler.forget(iteration)
        figures = [one for one, _ in gathered if one is not None]
        if len(figures) < len(gathered):  # iterations were skipped, or broke off: measure the next ones
            self._move_window(iteration + 1)
            return
        sizes = num_microbatches, max(num_microbatches, session.config.last_num_microbatches)
        splits, planner = all(splits for _, splits in gathered), pipeline.planner
        spec, reasons, told = planner.replan(iteration, figures, sizes, splits=splits, lanes=pipeline.wire)
        limited = planner.budget is not None
        why = f" > --{'rank-memory-limit' if limited else 'pipeline-schedule auto'}, by measured costs: "
        session.print_rank_0(*(f"{why}{line}" for line in reasons), brief="")
        if told.kept is None:
            bare, plan = (plan_for(one, num_microbatches, PlanPurpose.TRAIN) for one in (spec.bare, spec))
            check_same_plan(session.gather(plan_hash(plan)))
            told = dataclasses.replace(told, path=self._save(bare))
            if limited:
                session.print_rank_last(*at_once_lines(spec, num_microbatches, PlanPurpose.TRAIN), brief="")
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


class MeasuredAlone:
    """In place of `Measuring` for a rank without peers (--fake-process-group): its second step is profiled, for what it
    holds, and no more is said or solved."""

    def __init__(self, profiler: Profiler | None) -> None:
        self._profiler = profiler

    def report_residency(self, num_microbatches: int) -> None:
        """`Measuring`."""

    def begin(self, first_iteration: int) -> None:
        """`Measuring`."""
        if self._profiler is not None:
            self._profiler.move_window(first_iteration, first_iteration + 2)

    def after_step(self, task: StepTask) -> tuple[None, None]:
        """`Measuring`."""
        return None, None

    def between_steps(self, task: StepTask) -> None:
        """`Measuring`."""


def measuring_of(parts: RunParts) -> Measuring | MeasuredAlone:
    """Of this rank. Communicates over the world."""
    return MeasuredAlone(parts.pipeline.profiler) if parts.session.ps.is_fake else Measuring(parts)


def measured_exchange_wire(config: Config, ps: ParallelState) -> ExchangeWire | None:
    """By the dispatcher's own collective, and a product of a layer's tokens with a matrix [hidden, hidden]; None where
    experts have no ranks of their own, or none of these is there. Communicates over `ep_etp`, and over the world."""
    if ps.experts is None or not isinstance(config.description, ModelDescription) or ps.is_fake:
        return None
    exchanged = (
        sum(size for key, size in piece.collectives.items() if key[:2] == ("F", EXCHANGE))
        for piece in config.description.kinds.values()
    )
    group, device = ps.ep_etp_group, ps.device.torch_device
    # A forward exchanges twice. Of rows of one byte, as many for each rank.
    rows = max(1, min(max(exchanged) // 2, _LARGEST_EXCHANGE) // group.size)
    own, every = (torch.zeros(count, dtype=torch.uint8, device=device) for count in (rows, rows * group.size))
    ranks = ExpertRanks.of(ps, config.model.moe_token_dispatcher_type)
    if ranks is not None and ranks.gathers:
        exchange, moved = functools.partial(collectives.all_gather, every, own, group), len(every)
    else:
        counts, into = (rows,) * group.size, torch.empty_like(every)
        exchange = functools.partial(collectives.all_to_all, into, every, counts, counts, group, most=rows)
        moved = len(every) - rows
    width, length = config.model.hidden_size, config.model.seq_length
    assert width is not None and length is not None, "a model without a shape"  # noqa: PT018
    tokens, dtype = min(_MOST_TOKENS, length * config.training.micro_batch_size), params_dtype(config)
    x, weight = (torch.ones(count, width, dtype=dtype, device=device) for count in (tokens, width))
    compute = functools.partial(product, x, weight, torch.empty_like(x))
    mine = median_seconds(exchange, ps.device), median_seconds(compute, ps.device)
    exchange_s, compute_s = map(max, zip(*host_data.all_gather_json(mine, ps.control_group), strict=True))
    return ExchangeWire(exchange_s / moved, 2 * tokens * width * width / compute_s)
