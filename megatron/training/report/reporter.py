"""What the run says: its plan and memory before the first step; then Megatron's lines on the last rank (short ones on a
terminal), scalars to every writer, progress."""

from __future__ import annotations

import dataclasses
import datetime
import math
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core.models.gpt.stage_layers import layer_map_lines
from megatron.core.pipeline_parallel.plan.measuring.replan import Bubbles, MeasuredPlan
from megatron.core.pipeline_parallel.plan.pipeline_summary import bubble_rate
from megatron.core.pipeline_parallel.plan.planned_residency import StepResidency
from megatron.training.config.config import train_step_flops
from megatron.training.engine import Engine
from megatron.training.guard.console import lost_output, on_terminal, say, show_bar, terminal_width
from megatron.training.guard.exit_status import ExitStatus
from megatron.training.report import metrics, screen
from megatron.training.report.exchanges import Exchanges
from megatron.training.report.experts import ExpertTotals, balancing_means
from megatron.training.report.plan_facts import plan_facts
from megatron.training.report.progress import ProgressLine, append_progress
from megatron.training.report.session import Session
from megatron.training.report.timers import RunClock, format_block, time_scalars
from megatron.training.report.writers import open_writers
from megatron.training.state import StepResult, TrainState

_OF_THE_STEP = ("learning_rate", "decoupled_learning_rate", "loss_scale", "grad_norm", "num_zeros")


def report_model(session: Session, engine: Engine, num_microbatches: int) -> dict[str, Any]:
    """What the run's record says of it: parameters, plan, image. num_microbatches: of the first step. Communicates over
    the world. Raises TrainingExit where ranks have come to different plans, ConfigurationError where there is none for
    these units."""
    metas, facts = engine.param_meta.values(), plan_facts(session, engine, num_microbatches)
    spec = session.planner.spec
    session.open_log()
    total = _report_parameters(session, engine)
    session.print_rank_last(metrics.plan_line(facts), brief=metrics.plan_in_words(facts))
    for line in layer_map_lines(spec.stages, spec.placement):
        session.print_rank_last(line, brief=line.partition(";")[0])
    asked = session.config.ddp.fsdp_unit_modules
    if session.config.ddp.use_custom_fsdp and asked and engine.declares_units:
        session.print_rank_0(
            f"WARNING: --fsdp-unit-modules {' '.join(asked)} has no effect: the model names its units itself"
        )
    rate = session.config.optimizer.decoupled_lr
    if rate is not None and not any(meta.embedding_or_output for meta in metas):
        session.print_rank_0(
            f"WARNING: --decoupled-lr {rate} has no effect: the model marks no parameter as its word embeddings or "
            "output layer (ParamMeta.embedding_or_output)"
        )
    log_memory(session, engine, "before the first step")
    plan = {**facts, "estimated_bubble": bubble_rate(spec, num_microbatches)}
    return {"parameters": total, "plan": plan, "image": session.device.image()}


def _report_parameters(session: Session, engine: Engine) -> int:
    """Of the model. The last rank tells those of all model parallel ranks, in order. Communicates over the world."""
    count = sum(math.prod(meta.local_shape) for meta in engine.param_meta.values())
    line = metrics.PARAMETER_COUNT.format(tp_rank=session.ps.tp_rank, pp_rank=session.ps.pp_rank, count=count)
    speaks = session.ps.dp_rank == 0 or session.ps.is_fake
    own = (line, count, _own_parameters(engine)) if speaks else None
    lines, counts, shares = zip(*filter(None, session.gather(own)), strict=True)
    total = round(sum(shares))
    session.print_rank_last(*lines, brief=metrics.parameters_in_words(total, counts))
    return total


def log_memory(session: Session, engine: Engine, when: str) -> None:
    """--log-fsdp-ledger: what the data parallel engine of rank 0 holds."""
    if session.config.ddp.log_fsdp_ledger:
        session.print_rank_0(*metrics.memory_lines(when, engine.memory_tracker.lines()))


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """Losses on held-out data. split: "validation", "test". set_name: "" where there is one set. samples: which of it,
    in words."""

    split: str
    set_name: str
    losses: Mapping[str, float]
    samples: str


class Reporter:
    """Collects an interval's numbers and prints them at its end. Every rank has one; the last rank speaks."""

    def __init__(
        self, session: Session, engine: Engine, state: TrainState, clock: RunClock, about: Mapping[str, Any]
    ) -> None:
        """about: of the run, for its record."""
        self._session, self._engine, self._state, self._clock = session, engine, state, clock
        self._log = session.config.logging
        self._totals = metrics.IntervalTotals()  # since the last line
        self._unrecorded = metrics.IntervalTotals()  # since the last record
        by_layer = session.config.model.moe_per_layer_logging
        self._experts, self._unrecorded_experts = (  # since the last line, the last record
            ExpertTotals(session.config.model, by_layer=by_layer) for _ in range(2)
        )
        self._exchanges = Exchanges.of(session)
        self._first_iteration = state.iteration + 1
        self._memory_every = session.config.profiling.log_memory_interval
        self._memory_said = self._memory_every is not None
        self._lost_told: set[tuple[int, str]] = set()  # rank, stream
        self._scalars: dict[str, float] = {}  # of plans and their measurement, that no record has had yet
        self.start_interval()
        assert session.folder.path is not None, "a run without a folder"
        speaks, begins, total = session.ps.is_last_rank, state.iteration, session.config.total_iterations
        more: dict[str, Any] = {"resumed_iteration": begins, "about": about}
        self.writers = open_writers(session.config, session.folder.path, enabled=speaks, **more)
        total = total if self._log.progress != "off" else 0
        has = {"throughput_tflops": self._log.log_throughput, "eta": total, "bubbles": session.ps.pp_size > 1}
        self._columns = [name for name, there in has.items() if there]
        bar = show_bar if on_terminal() else None
        self._progress = ProgressLine(total, first_iteration=begins + 1, speaks=speaks, show_bar=bar)
        self._log_progress("Starting job")

    def start_interval(self, now: float | None = None) -> None:
        """An interval begins, now or then by the run's clock."""
        self._totals.reset()
        self._experts.reset()
        self._exchanges.reset()
        self._flops = 0.0
        self._interval_started = self._clock.now() if now is None else now

    def step_done(
        self,
        result: StepResult,
        *,
        batch_size: int,
        bubbles: Bubbles | None = None,
        residency: StepResidency | None = None,
    ) -> None:
        """Count one finished iteration, and print its line if it is time. Communicates when timers are on.

        The extra line after a run's first iteration is a look at an interval that goes on: nothing is reset.
        """
        session, iteration = self._session, self._state.iteration
        tokens = batch_size * session.config.model.seq_length
        num_microbatches = batch_size // session.config.training.micro_batch_size
        losses = {**result.losses, **balancing_means(result.layers, num_microbatches)}
        for totals in (self._totals, self._unrecorded):
            totals.add_iteration(
                losses, skipped=result.skipped, tokens=tokens, rolled_back=result.rolled_back
            )
        for experts in (self._experts, self._unrecorded_experts):
            experts.add_iteration(result.layers, num_microbatches, skipped=result.skipped)
        self._flops += train_step_flops(session.config, batch_size)
        self._exchanges.add_iteration(num_microbatches // session.ps.dp_size)
        if result.note:
            session.print_rank_last(f" iteration {iteration}: {result.note}")
        if (every := self._memory_every) is not None and iteration % every == 0:
            self._say_memory(iteration)
        measured = [one for one in (bubbles, residency) if one is not None]
        for one in measured:
            self._scalars.update(one.scalars())
        self._progress.update(iteration)
        if self.is_due(iteration):
            self._report(result, batch_size, bubbles)
        session.print_rank_last(*(line for one in measured for line in one.lines()), brief="")
        if self._ends_interval(iteration):
            tokens_by_layer = self._experts.tokens()
            session.print_rank_last(*self._exchanges.lines(tokens_by_layer), brief="")
            if tokens_by_layer:
                self.writers.event("experts", iteration, tokens=tokens_by_layer)
            self._report_timers()
            if not self._memory_said and iteration > self._first_iteration:  # when all of it is in use
                self._memory_said = True
                self._say_memory(iteration, brief="")
            self.start_interval(result.ended_at)
        self._progress.show()
        self._tell_lost(session.ps.rank, lost_output())

    def _say_memory(self, iteration: int, brief: str | None = None) -> None:
        session = self._session
        used = session.device.used_bytes() if session.config.profiling.log_device_memory_used else None
        say(metrics.memory_line(session.ps.rank, iteration, session.device.memory(), used), brief=brief)

    def is_due(self, iteration: int) -> bool:
        """Whether an iteration has a line or a record."""
        return self._has_line(iteration) or iteration % self._log.tensorboard_log_interval == 0

    def _ends_interval(self, iteration: int) -> bool:
        return iteration % self._log.log_interval == 0

    def _has_line(self, iteration: int) -> bool:
        return self._ends_interval(iteration) or iteration == self._first_iteration

    def batch_skipped(self, why: str) -> None:
        """An iteration without a step."""
        self._session.print_rank_last(f" iteration {self._state.iteration}: {why}")
        self._progress.update(self._state.iteration)
        self._progress.show()

    def _report(self, result: StepResult, batch_size: int, bubbles: Bubbles | None) -> None:
        """One iteration's line, and its record.

        The line is the mean over --log-interval, the record the mean over --tensorboard-log-interval.
        """
        line = self._line(result, batch_size)
        if self._has_line(line.iteration):
            held, eta = self._session.device.memory().max_allocated_bytes, self._progress.eta()
            shown = dataclasses.replace(line, bubbles=bubbles, memory_bytes=held, eta=eta)
            brief = screen.short_line(shown, terminal_width(), self._columns)
            self._session.print_rank_last(metrics.iteration_line(line), brief=brief)
            loss = next(iter(line.losses.values()), None)
            self._progress.figures(loss=loss, tokens_per_s=line.tokens_per_s)
        if line.iteration % self._log.tensorboard_log_interval == 0:
            record = dataclasses.replace(line, **self._counted(self._unrecorded))
            scalars = metrics.iteration_scalars(record)
            if self._log.log_memory_to_tensorboard:
                scalars |= metrics.memory_scalars(self._session.device.memory())
            scalars |= self._scalars | self._unrecorded_experts.scalars()
            self.writers.record(scalars, step=record.iteration, samples=record.consumed_samples)
            self._scalars = {}
            self._unrecorded.reset()
            self._unrecorded_experts.reset()

    def _line(self, result: StepResult, batch_size: int) -> metrics.IterationRecord:
        state, totals, log = self._state, self._totals, self._log
        elapsed_s = result.ended_at - self._interval_started
        device_s = elapsed_s * self._session.ps.world_size * 1e12  # for TFLOP/s of one device
        return metrics.IterationRecord(
            iteration=state.iteration,
            train_iters=state.train_iters,
            consumed_samples=state.consumed_train_samples,
            skipped_samples=state.skipped_train_samples or None,
            elapsed_s=elapsed_s / max(totals.iterations, 1),
            global_batch_size=batch_size,
            params_norm=self._engine.optimizer.params_norm() if log.log_params_norm else None,
            throughput_tflops=_rate(self._flops, device_s) if log.log_throughput else None,
            tokens_per_s=_rate(totals.tokens, elapsed_s),
            when=datetime.datetime.now(),
            **{name: getattr(result, name) for name in _OF_THE_STEP},
            **self._counted(totals),
        )

    def _counted(self, totals: metrics.IntervalTotals) -> dict[str, Any]:
        validated = self._session.config.parallel.enable_optimizer_post_validation
        return {
            "losses": totals.losses(),
            "skipped_iterations": totals.skipped_iterations,
            "nan_iterations": totals.nan_iterations,
            "rollbacks": totals.rollbacks if validated else None,
        }

    def _report_timers(self) -> None:
        """Gather the timers of all ranks and print the block of the phases."""
        session, iterations = self._session, max(self._totals.iterations, 1)
        if session.timers.log_level == 0:  # nothing is timed, so there is nothing to gather
            return
        ranks = session.gather(session.timers.values())
        if self._log.log_timers_to_tensorboard:
            self.writers.record(time_scalars(ranks, iterations), step=self._state.iteration)
        if block := format_block(ranks, session.timers.log_option, iterations):
            session.print_rank_last(block)

    def evaluated(self, where: str, found: Evaluated, *, again: bool) -> None:
        """Print and record one evaluation. again: a person has been told."""
        name, losses = found.set_name, found.losses
        lines = metrics.validation_lines(where, losses, set_name=name, samples=found.samples)
        brief = "" if again else screen.evaluation_line(found.split, name, self._state.iteration, losses)
        self._session.print_rank_last(*lines, brief=brief)
        scalars = metrics.validation_scalars(losses, set_name=name, split=found.split)
        if not self._log.log_validation_ppl_to_tensorboard:
            scalars = {tag: value for tag, value in scalars.items() if not tag.endswith(" ppl")}
        self.writers.record(scalars, step=self._state.iteration, samples=self._state.consumed_train_samples)

    def saved(self, iteration: int, directory: str, seconds: float) -> None:
        """The checkpoint of `iteration` was committed, so many seconds after its save had begun."""
        self.writers.event("checkpoint", iteration, path=directory, seconds=round(seconds, 3))
        self._progress.checkpoint_saved()
        self._log_progress(f"Saved checkpoint\t{directory}")

    def planned_again(self, plan: MeasuredPlan) -> None:
        """The pipeline's schedule was solved again."""
        self._session.print_rank_last(plan.line(), brief=plan.in_short())
        fields = dataclasses.asdict(plan)
        self.writers.event("plan", fields.pop("iteration"), **fields)

    def _tell_lost(self, rank: int, lost: Sequence[str]) -> None:
        """What could not be printed, once: nobody reads it on the console."""
        for stream in lost:
            if (rank, stream) not in self._lost_told:
                self._lost_told.add((rank, stream))
                self.writers.event("console", self._state.iteration, rank=rank, lost=stream)

    def ended(self, status: ExitStatus, reason: str, *, lost: Sequence[Sequence[str]]) -> None:
        """The run is over, in good order. lost: of each rank, `console.lost_output`."""
        for rank, streams in enumerate(lost):
            self._tell_lost(rank, streams)
        self.writers.event("exit", self._state.iteration, status=int(status), reason=reason)

    def _log_progress(self, event: str) -> None:
        """--log-progress, on one rank."""
        session, save = self._session, self._session.config.checkpoint.save
        if self._log.log_progress and save and session.ps.is_last_rank:
            job, ranks = session.env.slurm_job_id or "", session.ps.world_size
            append_progress(save, event, job_id=job, world_size=ranks, state=self._state)

    def close(self) -> None:
        self._progress.close()
        self.writers.close()


def _own_parameters(engine: Engine) -> float:
    """Parameters on this rank, each divided by how many model parallel ranks have it: their sum is the model's."""
    every = ((part, 2 if meta.shared else 1) for meta in engine.param_meta.values() for part in meta.parts)
    return sum(part.numel / (part.copies * stages) for part, stages in every)


def _rate(amount: float, elapsed_s: float) -> float:
    return amount / elapsed_s if elapsed_s > 0 else 0.0
