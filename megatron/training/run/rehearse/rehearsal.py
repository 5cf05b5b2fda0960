"""`--rehearse`: two steps of the launch line on tensors without memory, by one rank of each pipeline stage, in this
process. Everything runs as in a run, but nothing is computed, read, written or sent: model, engine, optimizer, plan and
executor are the run's own, and ranks tell each other only what they tell from host to host.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import torch

from megatron.core.device import Device
from megatron.core.distributed.custom_fsdp.all_gather_pipeline import AllGatherPipeline
from megatron.core.distributed.custom_fsdp.flat_buffer import FlatBuffer
from megatron.core.distributed.custom_fsdp.grad_reduce_pipeline import GradReducePipeline
from megatron.core.distributed.custom_fsdp.shared_sums import PartialSums, SharedSums
from megatron.core.distributed.custom_fsdp.squared_sums import SquaredSums
from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.module import ModelError
from megatron.core.optimizer.flat_update import FlatUpdate, UnalignedTails
from megatron.core.optimizer.global_norm_index import GlobalNormIndex
from megatron.core.optimizer.mixed_precision import MixedPrecisionOptimizer
from megatron.core.pipeline_parallel.plan.ir import Plan
from megatron.core.pipeline_parallel.plan.spec import PlanPurpose
from megatron.core.pipeline_parallel.post_validation.channel import StateChannel
from megatron.core.pipeline_parallel.runtime.p2p import P2P
from megatron.core.tokenizers.build import build_from_config
from megatron.core.transformer.experts.expert_bias import ExpertBiases
from megatron.core.transport.fake import FakePeers
from megatron.core.transport.parallel_state import ParallelState, single_process
from megatron.core.words import counted, size_text
from megatron.estimate.description import ModelDescription, ModelPiece
from megatron.estimate.peak import MemoryHolder, Peak, peak_lines
from megatron.estimate.rank_parts import SUMS
from megatron.estimate.step_watch import BATCHES, ENGINE, FIGURES, MESSAGES, Seen, StepWatch
from megatron.training.config.config import Config
from megatron.training.config.launch_env import LaunchEnv
from megatron.training.config.problems import ConfigurationError
from megatron.training.engine import Engine
from megatron.training.guard.console import say
from megatron.training.guard.exit_status import ExitStatus
from megatron.training.guard.nan_policy import NanPolicy
from megatron.training.guard.weight_check import WeightCheck
from megatron.training.report.session import Session
from megatron.training.report.step_metrics import ForwardStep, StepMetrics
from megatron.training.run.build import ModelProvider, build_engine, imagined_world
from megatron.training.run.data import StepBatches
from megatron.training.run.describe import described_model, host_batch, limit_fault
from megatron.training.run.evaluate import evaluate
from megatron.training.run.parts import RunParts
from megatron.training.run.pipeline import PipelineRunner
from megatron.training.run.pipeline_memory import settle
from megatron.training.run.rehearse.comparison import (
    account_of,
    differences,
    evaluation_account,
    parts_of,
    step_bytes,
    step_differences,
    step_purpose,
)
from megatron.training.run.rehearse.own_model import Provided, described_run
from megatron.training.run.rehearse.own_stages import own_stages, publish_here
from megatron.training.run.session import with_vocabulary
from megatron.training.run.step import StepRunner
from megatron.training.run.validated_step import ValidatedStepRunner
from megatron.training.state import StepTask, TrainState

_ENGINE = (
    AllGatherPipeline,
    DistributedDataParallel,
    FlatBuffer,
    FlatUpdate,
    GlobalNormIndex,
    GradReducePipeline,
    MixedPrecisionOptimizer,
    PartialSums,
    SharedSums,
    SquaredSums,
    UnalignedTails,
    WeightCheck,
)
_PARTS = (SUMS, "grad-norm", "optimizer")  # by their timers
_SHOWN = 20  # differences
STEPS = 2  # the first makes what lasts, and tells the shapes of messages


@dataclasses.dataclass(frozen=True)
class RehearsedRank:
    """One rank of a pipeline stage. plan: of its last step. at_rest: bytes between steps, by category. seen: behind
    each operation of the last step; behind its row, "step", the optimizer's. parts: what those of the optimizer's step
    took at most. peak: at which it held the most, with who had it. cpu_s: of its steps. evaluated: behind the steps,
    behind each operation of an evaluation by the plan `evaluation`."""

    rank: int
    pp_rank: int
    plan: Plan
    engine: Engine
    runner: PipelineRunner
    at_rest: Mapping[str, int]
    seen: tuple[Seen, ...]
    parts: Mapping[str, Mapping[str, int]]
    peak: Seen
    holders: tuple[MemoryHolder, ...]
    cpu_s: float
    evaluation: Plan
    evaluated: tuple[Seen, ...]

    @property
    def blame(self) -> Peak:
        return Peak(self.pp_rank, self.peak.operation, "", self.peak.held, self.holders)


def rehearse(config: Config, model_provider: ModelProvider, forward_step: ForwardStep) -> int:
    """`rehearsed`, and what it says; the exit status, not 0 where a rank held something else than planned. Raises
    whatever a run would."""
    if LaunchEnv.read().rank:
        return 0
    if config.model.padded_vocab_size is None:
        config = with_vocabulary(config, build_from_config(config.tokenizer), single_process(Device("cpu")))
    ranks = rehearsed(config, model_provider, forward_step)
    spec, fullest = ranks[0].runner.spec, max(ranks, key=lambda one: one.peak.total)
    say(
        f"rehearsal of {counted(config.world_size, 'rank')}: {counted(STEPS, 'step')} of one rank of each of "
        f"{counted(len(ranks), 'pipeline stage')}, schedule {spec.schedule}, on tensors without memory"
    )
    found = compared(config, ranks, (model_provider, forward_step))
    for one in ranks:
        say(f"pipeline rank {one.pp_rank}: at most {size_text(one.peak.total)}, in {one.peak.operation}")
    say("\n".join(peak_lines(fullest.blame)))
    if found:
        more = f"; {counted(len(found) - _SHOWN, 'more line')}" if len(found) > _SHOWN else ""
        say("\n".join(("ERROR: ranks held something else than was planned:", *found[:_SHOWN])) + more)
    else:
        operations = sum(len(one.plan.rows[one.pp_rank]) for one in ranks)
        say(
            f"behind all of {counted(operations, 'operation')} of the plan every kind of bytes, temporaries left out, "
            "is what was planned"
        )
    return int(ExitStatus.BUG) if found else 0


def rehearsed(
    config: Config, model_provider: ModelProvider, forward_step: ForwardStep, *, rank: int = 0
) -> list[RehearsedRank]:
    """By pipeline rank, of the copy of the model that `rank` has a part of. config: with its vocabulary.

    Raises whatever a run would.
    """
    config, undescribed = described_run(config, Provided(model_provider, forward_step))
    if (problem := limit_fault(config, undescribed)) is not None:
        raise ConfigurationError([problem])
    world = imagined_world(config, rank)
    built = world.run(lambda ps: _BuiltRank(config, ps, model_provider))
    world.keep_one_a_stage()
    found = world.run(lambda ps: built[ps.rank].run(forward_step))
    return sorted(found.values(), key=lambda one: one.pp_rank)


def compared(
    config: Config,
    ranks: Sequence[RehearsedRank],
    providers: tuple[ModelProvider, ForwardStep] | None = None,
) -> list[str]:
    """`differences` of all of them. providers: of a model that may be one's own."""
    spec, found = ranks[0].runner.spec, list[str]()
    description: ModelDescription | Mapping[int, ModelPiece]
    if providers is None or all(one.engine.is_described for one in ranks):
        ps = ranks[0].engine.model.ps
        description = described_model(config, ps, spec.stages, keeps_gathered=spec.keeps_gathered)
    else:
        description = own_stages(config, spec, *providers, rank=ranks[0].rank)
    for one in ranks:
        step = step_bytes(config, one.engine)
        parts = parts_of(config, spec, description, one.engine.model, step)
        account = account_of(one.plan, one.runner.spec, one.pp_rank, parts)
        found += differences(account, one.seen) + step_differences(one.pp_rank, step, one.parts)
        of_evaluation = evaluation_account(config, one.evaluation, one.runner.spec, one.pp_rank, parts)
        found += differences(of_evaluation, one.evaluated)
    return found


def steps_of(
    config: Config, ps: ParallelState, model_provider: ModelProvider, forward_step: ForwardStep
) -> RehearsedRank:
    """The same steps by a rank that is there, or is one of an imagined world."""
    own = contextvars.copy_context()  # of what user code is told
    return own.run(lambda: _BuiltRank(config, ps, model_provider).run(forward_step))


def tell_of_peers(
    config: Config, ps: ParallelState, model_provider: ModelProvider, forward_step: ForwardStep
) -> None:
    """--fake-process-group: before this rank is built, all that have a part of its copy of the model are, on tensors
    without memory, and one of each pipeline stage runs one forward: what they tell each other, this rank will hear.

    Raises whatever a run would, ModelError where the forward step fails on such tensors.
    """
    peers = ps.world_group.peers
    if not isinstance(peers, FakePeers) or len(peers.world.ranks) == 1:
        return
    try:
        built = peers.world.run(lambda one: _BuiltRank(config, one, model_provider))
        runners = peers.world.run(lambda one: built[one.rank].runner(forward_step))
        peers.world.keep_one_a_stage()
        peers.world.run(lambda one: built[one.rank].forward(runners[one.rank]))
    except (KeyError, NotImplementedError, RuntimeError) as error:
        raise ModelError(
            "--fake-process-group with a pipeline: what other stages hand on is seen by running provider and forward "
            f"step on tensors without memory and a batch of {sorted(host_batch(config, ps.device.torch_device))}, and "
            f"that failed ({type(error).__name__}: {error}): do without values of tensors there, or without a pipeline"
        ) from error


class _BuiltRank:
    """One that has been built."""

    def __init__(self, config: Config, ps: ParallelState, model_provider: ModelProvider) -> None:
        # Validated steps as they are once many were clean.
        parallel = dataclasses.replace(config.parallel, post_validation_after=0)
        config = dataclasses.replace(config, parallel=parallel)
        planner = config.planner()
        self._parts: Callable[[str], AbstractContextManager[None]] = _phase
        quiet: Any = SimpleNamespace(phase=_phase)
        timers: Any = self._timer
        nothing: Any = None
        own = config, LaunchEnv(world_size=ps.world_size), ps.device, ps, timers, quiet
        self.session = _Session(*own, nothing, nothing, time.monotonic(), planner)
        self._publish()
        self.engine = build_engine(config, ps, model_provider, planner)

    def _publish(self) -> None:
        """What user code asks for."""
        publish_here(self.session.config, self.session.ps, self.session.settings())

    def runner(self, forward_step: ForwardStep) -> PipelineRunner:
        """Of its steps."""
        self._publish()
        settle(self.session, self.session.planner, self.engine)
        return PipelineRunner(self.session, self.engine, forward_step, self.session.planner)

    def forward(self, runner: PipelineRunner) -> None:
        """Of one microbatch, through the whole pipeline."""
        self._publish()
        ps, config = self.session.ps, self.session.config
        data = StepBatches(batches(config, ps.device), reads=runner.spec.reads_data(ps.pp_rank))
        data.begin_step()
        runner.evaluate(data, StepMetrics(ps.device.torch_device), StepTask(1, 1, ()))

    def run(self, forward_step: ForwardStep) -> RehearsedRank:
        """Its steps."""
        runner, engine = self.runner(forward_step), self.engine
        session, config = self.session, self.session.config
        validated, ps = config.parallel.enable_optimizer_post_validation, session.ps
        state = TrainState.start(config)
        size = config.last_num_microbatches
        plan = session.planner.plan(size, step_purpose(config))
        policy = NanPolicy(
            config.reliability.nan_policy,
            config.reliability.nan_max_skips,
            dynamic_loss_scale=engine.scaler.dynamic,
        )
        parts = RunParts(session, engine, runner, policy, state)
        steps = ValidatedStepRunner(parts, lambda number: None) if validated else StepRunner(parts)
        source = batches(config, ps.device)
        data = StepBatches(source, reads=runner.spec.reads_data(ps.pp_rank))
        watch = self._watch()
        parts_seen = (SUMS,) if validated else _PARTS  # the rest of validated steps are operations
        self._parts = lambda name: watch.part(name) if name in parts_seen else _phase(name)
        runner.region = watch.region
        at_rest, began = dict[str, int](), time.thread_time()
        with watch:
            for number in range(1, STEPS + 1):
                watch.begin()
                at_rest = watch.held_by_kind()
                flags = (0.0, 0.0)
                with watch.region("step"):
                    for _ in steps.step(data, StepTask(number, size, flags)):
                        pass
            for _ in steps.settle(data):
                pass
            spent = time.thread_time() - began
            watch.name_holders()
            seen = tuple(watch.seen), watch.parts, watch.peak, tuple(watch.holders)
            watch.begin()
            held_out = StepBatches(source, reads=runner.spec.reads_data(ps.pp_rank))
            with watch.region("evaluation"):
                evaluate(runner, ps, held_out, StepTask(STEPS, size), size)
        evaluation = session.planner.plan(size, PlanPurpose.EVALUATE)
        found = plan, engine, runner, at_rest, *seen, spent, evaluation, tuple(watch.seen)
        return RehearsedRank(ps.rank, ps.pp_rank, *found)

    def _timer(self, name: str, log_level: int) -> AbstractContextManager[None]:
        """In place of the run's timers."""
        return self._parts(name)

    def _watch(self) -> StepWatch:
        paths, weights = dict[int, str](), list[tuple[str, torch.Tensor]]()
        for chunk in self.engine.chunks:
            paths |= {id(module): path for path, module in chunk.module.named_modules()}
            named = [*chunk.module.named_parameters(), *chunk.module.named_buffers()]
            weights += [(name.rpartition(".")[0], tensor) for name, tensor in named]
        paths |= {id(StepBatches): BATCHES, id(P2P): MESSAGES}
        paths |= dict.fromkeys(map(id, (ExpertBiases, StateChannel, StepMetrics)), FIGURES)
        paths |= {id(kind): ENGINE for kind in _ENGINE}
        device = self.session.ps.device.torch_device
        return StepWatch(device, paths, weights, self.engine.memory_tracker)


class _Session(Session):
    """Of a rank that says nothing."""

    def print_rank_0(self, *texts: str, brief: str | None = None) -> None:
        pass


@contextlib.contextmanager
def _phase(name: str) -> Iterator[None]:
    yield


def batches(config: Config, device: Device) -> Iterator[dict[str, torch.Tensor]]:
    """Microbatches without values."""
    while True:
        yield host_batch(config, device.torch_device)  # and keeps none itself
