"""A small trainer over the toy pipeline: synchronous steps or post-validated ones, with faults at chosen iterations."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.distributed.custom_fsdp.data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.optimizer.clip_grads import StepRules, clip_coefficient
from megatron.core.optimizer.grad_scaler import GradScaler
from megatron.core.optimizer.mixed_precision import RollbackBy, build_optimizer
from megatron.core.optimizer.optimization_config import OptimizerConfig
from megatron.core.param_meta import GradRoute, ParamMeta
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import Plan
from megatron.core.pipeline_parallel.plan.passes.post_validation import post_validation
from megatron.core.pipeline_parallel.post_validation.channel import StateChannel
from megatron.core.pipeline_parallel.post_validation.state import Validation
from megatron.core.pipeline_parallel.post_validation.validator import Completed, PostValidator, StepOutcome
from megatron.core.pipeline_parallel.runtime.executor import Executor
from megatron.core.pipeline_parallel.runtime.p2p import P2P
from megatron.core.pipeline_parallel.runtime.stage import ModelStage
from megatron.core.transport import collectives
from megatron.core.transport.parallel_state import ParallelState
from megatron.core.weight_grad import WeightGradAccumulator
from tests.harness.toy_pipeline import HIDDEN, TOKENS, ToyChunk


@dataclasses.dataclass(frozen=True)
class Run:
    """faults: iteration -> (stage, what its gradient is multiplied with before the step: large, inf or nan). after: of
    the validator; None: synchronous steps. saves: iterations after which everything is validated. stops: numbers of
    decisions after which the owner wants the step under way to be begun anew. dies: (stage, iteration) of a rank that
    is gone when it comes to microbatch 1."""

    plan: Plan
    num_steps: int
    faults: Mapping[int, tuple[int, float]] = dataclasses.field(default_factory=dict)
    after: int | None = None
    clip_grad: float = 1.0
    optimizer: str = "adam"
    dtype: torch.dtype = torch.float32
    rollback_by: RollbackBy = RollbackBy.SNAPSHOT
    ddp: DistributedDataParallelConfig = dataclasses.field(default_factory=DistributedDataParallelConfig)
    saves: tuple[int, ...] = ()
    stops: tuple[int, ...] = ()
    dies: tuple[int, int] | None = None


class _Keyed:
    """A chunk's sink under the names of the whole model."""

    def __init__(self, stage: int, sink: WeightGradAccumulator) -> None:
        self.stage, self.sink, self.microbatch = stage, sink, 0

    keeps_gathered = False

    @property
    def deferring(self) -> bool:
        return self.sink.deferring

    def put(self, key: str, x: Any, dy: Tensor) -> None:
        self.sink.put(f"{self.stage}.{key}", x, dy)

    def done(self, key: str, microbatch: int) -> None:
        self.sink.done(f"{self.stage}.{key}", microbatch)


class _Chunk(ToyChunk):
    """Input and dropout mask depend on iteration, data parallel rank and microbatch, and on nothing else."""

    def __init__(self, stage: int, num_stages: int, trainer: ToyTrainer) -> None:
        super().__init__(stage, num_stages)
        self.stage_number, self.trainer = stage, trainer
        self.forwards = 0
        dtype = trainer.run.dtype
        self.parameters = {
            name: nn.Parameter(getattr(self, name).detach().to(dtype)) for name in ("weight", "bias", "scale")
        }
        self.weight, self.bias, self.scale = self.parameters.values()
        self.module = nn.ParameterDict({f"{stage}": nn.ParameterDict(self.parameters)})
        self.accumulator = WeightGradAccumulator()
        self.sink = _Keyed(stage, self.accumulator)  # type: ignore[assignment]

    def run(self, microbatch: int, hidden: Tensor | None) -> Tensor:
        trainer = self.trainer
        if trainer.run.dies == (self.stage_number, trainer.iteration) and microbatch == 1:
            os._exit(9)
        self.forwards += 1
        seed = (trainer.iteration * 64 + microbatch) * 8 + trainer.ps.dp_rank
        dtype = trainer.run.dtype
        if self.begins:
            hidden = torch.randn(*TOKENS, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(dtype)
            self.begins = False  # the base class would make its own
            try:
                return self.run_masked(microbatch, hidden, seed)
            finally:
                self.begins = True
        assert hidden is not None
        return self.run_masked(microbatch, hidden, seed)

    def run_masked(self, microbatch: int, hidden: Tensor, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(7919 * (self.stage_number + 1) + seed)
        mask = (torch.rand(hidden.shape, generator=generator) > 0.2).to(hidden)
        output = super().run(microbatch, hidden * mask)
        return output * self.trainer.scaler.scale if self.ends else output


class ToyTrainer:
    """One rank. weights: after each decision. losses: of each iteration, on the last stage's rank."""

    def __init__(self, ps: ParallelState, run: Run) -> None:
        self.run, self.ps, self.iteration, self.clock = run, ps, 0, 0
        self.weights: list[dict[str, Any]] = []
        self.losses: list[Any] = []
        self.outcomes: list[StepOutcome] = []
        self.retried: list[int] = []
        self.taken_back: list[bool] = []  # of each decision: this rank really did
        self._num_taken_back = 0
        plan, place = run.plan, run.plan.placement
        # Large enough to overflow nothing; doubles every other clean step, so it moves all the time.
        self.scaler = GradScaler(dynamic=True, scale=8.0, window=2, hysteresis=1)
        self._scaler_before = self.scaler.state()
        mine = [place.stage_of(ps.pp_rank, chunk) for chunk in range(place.num_chunks)]
        self.chunks = {stage: _Chunk(stage, place.num_stages, self) for stage in mine}
        meta = {
            name: ParamMeta(name, tuple(p.shape), route=GradRoute.SINK)
            for chunk in self.chunks.values()
            for name, p in chunk.module.named_parameters()
        }
        chunks = list(self.chunks.values())
        self.engine = DistributedDataParallel(
            [chunk.module for chunk in chunks],
            ps,
            run.ddp,
            meta,
            [chunk.accumulator for chunk in chunks],
            mine,
        )
        self.buffer = self.engine.buffer
        config = OptimizerConfig(optimizer=run.optimizer, lr=1e-2, weight_decay=0.1)
        self.optimizer = build_optimizer(config, self.buffer, ps)
        self.optimizer.rollback_by = run.rollback_by
        rollback = self.optimizer.rollback

        def counted() -> None:
            self._num_taken_back += 1
            rollback()

        self.optimizer.rollback = counted  # type: ignore[method-assign]
        self.stages = {
            stage: ModelStage(chunk.run, chunk.accumulator, begins=chunk.begins, ends=chunk.ends)
            for stage, chunk in self.chunks.items()
        }
        self.validator: PostValidator | None = None
        executor: dict[str, Any] = {}
        if run.after is not None:
            plan = post_validation(plan, CostModel.of_ranks(place))
            self.validator = PostValidator(
                self.optimizer, StateChannel(ps), self,
                StepRules(run.clip_grad).decide, rank=ps.pp_rank, num_ranks=ps.pp_size, after=run.after,
                count_zero_grads=True,
            )  # fmt: skip
            validation = Validation(self.validator.decide, lambda stage, mb: self.stages[stage].forget(mb))
            executor = {"handlers": self.validator.handlers, "validation": validation}
        self.executor = Executor(plan, ps.pp_rank, self.stages, P2P(ps), self.engine, **executor)

    def train(self) -> ToyTrainer:
        while self.iteration < self.run.num_steps:
            for chunk in self.chunks.values():
                chunk.losses.clear()
            self.engine.begin_step(self.run.plan.num_microbatches)
            if not self.executor.run(self.iteration):
                self.retried.append(self.iteration)
                continue
            self.losses.append([dict(chunk.losses) for chunk in self.chunks.values() if chunk.ends])
            if self.validator is None:
                self._synchronous_step()
            elif self.iteration in self.run.saves or self.iteration + 1 == self.run.num_steps:
                self.validator.validate_now()
                assert not self.validator.pending
            self.iteration += 1
        return self

    def complete(self) -> Completed:
        """Gradients over data parallel ranks, with this iteration's fault."""
        self.engine.finish()
        stage, factor = self.run.faults.get(self.iteration, (-1, 1.0))
        if stage in self.chunks:
            self.buffer.main_grad(f"{stage}.weight").mul_(factor)
        divisor = self.scaler.scale * self.run.plan.num_microbatches * self.ps.dp_size
        self._scaler_before = self.scaler.state()
        self.scaler.update(False)  # what forwards of the next step may go by; put right where it proves wrong
        return Completed(divisor, False, (self.own_loss, 1.0))

    @property
    def own_loss(self) -> float:
        """The sum of this rank's losses in the step that has just run."""
        return sum(loss for chunk in self.chunks.values() for loss in chunk.losses.values())

    def settle_weights(self) -> None:
        self.engine.settle_weights()

    def weights_changed(self) -> None:
        self.engine.weights_changed()

    def decided(self, outcome: StepOutcome) -> bool:
        number = len(self.outcomes)
        self.taken_back.append(self._num_taken_back > sum(self.taken_back))
        self.outcomes.append(outcome)
        self._finish_step(skipped=outcome.coefficient is None)
        return number not in self.run.stops

    def _synchronous_step(self) -> None:
        divisor = self.complete().divisor
        stats = self.optimizer.prepare(divisor, count_zero_grads=True)
        coefficient = None if stats.nonfinite else clip_coefficient(stats.norm, self.run.clip_grad)
        if coefficient is not None:
            self.optimizer.step(divisor, coefficient)
            self.engine.weights_changed()
        extras = torch.tensor([self.own_loss, 1.0], dtype=torch.float64)
        collectives.all_reduce(extras, self.ps.world_group)
        self.outcomes.append(
            StepOutcome(
                stats.norm,
                coefficient,
                stats.nonfinite,
                stats.num_zeros or 0,
                rolled_back=False,
                clean=coefficient == 1.0,
                extras=tuple(extras.tolist()),
            )
        )
        self._finish_step(skipped=coefficient is None)

    def _finish_step(self, *, skipped: bool) -> None:
        if skipped:
            self.scaler.load_state(self._scaler_before)
            self.scaler.update(True)
        else:
            self.clock += 1
            for group in self.optimizer.param_groups:
                group["lr"] = 1e-2 / (1 + self.clock)
        self.engine.settle_weights()
        self.weights.append({name: self.buffer.weight(name).tolist() for name in self.buffer.names})

    def state(self) -> list[Any]:
        """Everything that a checkpoint would hold, as lists."""
        moments = [piece.tensor.tolist() for piece in self.optimizer.pieces()]
        steps = [tensor.tolist() for tensor in self.optimizer._update.mutable()]
        return [self.optimizer.num_steps, self.clock, self.scaler.state(), moments, steps]


def train(ctx: Any, runs: Mapping[str, Run], **grid: int) -> dict[str, Any]:
    """By name: (weights after each step, losses, final state, outcomes, rollbacks, forwards run) of this rank."""
    ps = ctx.make_ps(**grid)
    results = {}
    for name, run in runs.items():
        trainer = ToyTrainer(ps, run).train()
        told = [
            (one.norm if one.coefficient is not None else None, one.coefficient, one.num_zeros, one.extras)
            for one in trainer.outcomes
        ]
        results[name] = {
            "bits": (trainer.weights, trainer.losses, trainer.state(), told),
            "repeated": [not one.clean for one in trainer.outcomes],
            "rolled_back": [one.rolled_back for one in trainer.outcomes],
            "taken_back": trainer.taken_back,
            "forwards": sum(chunk.forwards for chunk in trainer.chunks.values()),
            "retried": trainer.retried,
        }
    return results
