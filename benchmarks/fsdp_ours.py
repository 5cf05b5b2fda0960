"""Our contestants of `fsdp_vs_peers.py`: every sharding strategy in the trainer's way, and `fully_shard` over the very
network that the peers train.

bf16: bf16 weights, fp32 main weights and gradients, reduced in fp32 (`-bf16wire`: in bf16).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from benchmarks.fsdp_peers import PlainLoop
from benchmarks.fsdp_workload import (
    BETAS,
    EPS,
    LEARNING_RATE,
    Trainer,
    Work,
    our_model,
    plain_adam,
    plain_model,
)
from benchmarks.plain_gpt import Block, set_schedule
from megatron.core.distributed.custom_fsdp.data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.custom_fsdp.unit_events import hook_units
from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.distributed.plan_inputs import units_of_all_stages
from megatron.core.distributed.sharded_module.fully_shard import fully_shard
from megatron.core.models.gpt.loss import gpt_loss
from megatron.core.optimizer.mixed_precision import build_optimizer
from megatron.core.optimizer.optimization_config import OptimizerConfig
from megatron.core.pipeline_parallel.plan.build import build_plan
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.passes.add_residency import add_residency
from megatron.core.pipeline_parallel.plan.passes.lower import lower
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.runtime.data_parallel_lane import UnitBoundaries
from megatron.core.pipeline_parallel.runtime.executor import Executor
from megatron.core.pipeline_parallel.runtime.p2p import P2P
from megatron.core.pipeline_parallel.runtime.stage import ModelStage
from megatron.core.transport.parallel_state import ParallelState, single_process

Config = DistributedDataParallelConfig


def config_of(strategy: str, **changes: object) -> Config:
    """As the trainer resolves `--data-parallel-sharding-strategy`, with everything overlapped, as the peers do."""
    fsdp = strategy in ("optim_grads", "optim_grads_params")
    config = Config(
        use_custom_fsdp=fsdp,
        data_parallel_sharding_strategy=strategy,  # type: ignore[arg-type]
        use_distributed_optimizer=strategy != "no_shard",
        overlap_grad_reduce=True,
        overlap_param_gather=strategy != "no_shard",
    )
    return dataclasses.replace(config, **changes)  # type: ignore[arg-type]


class OurLoop:
    """GPTModel by the plan of one stage, over the flat buffer and the trainer's optimizer. together: False is a world
    of one on every rank. execute: runs a step's forwards and backwards."""

    def __init__(self, work: Work, config: Config, *, together: bool = True) -> None:
        self.work = work
        ps = work.ps if together else single_process(work.device)
        self.gpt = our_model(work, work.dtype)
        self.sink = self.gpt.context.grads
        self.model = DistributedDataParallel([self.gpt], ps, config)
        optimizer = OptimizerConfig(
            lr=LEARNING_RATE,
            weight_decay=0.0,
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            adam_eps=EPS,
            bf16=work.dtype == torch.bfloat16,
        )
        self.optimizer = build_optimizer(optimizer, self.model.buffer, ps)
        self.model.release_gradients()
        set_schedule(self.optimizer.param_groups, LEARNING_RATE, 0.0)
        self.divisor = float(len(work.mine) * ps.dp_size)
        tokens = work.mine[0][0]
        self.positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        self.iteration, self.total = 0, 0.0
        self.execute = self._executor(ps).run

    def _executor(self, ps: ParallelState) -> Executor:
        plan = build_plan("1f1b", Request(1, len(self.work.mine)))
        costs, boundaries = CostModel.of_ranks(plan.placement), UnitBoundaries()
        plan, units, residency = lower(plan, costs), None, self.model.residency(1)
        if self.model.place.dp_size > 1:
            units = units_of_all_stages(self.model, (0,))
            plan = add_residency(plan, units, residency, costs)
            hook_units([tuple(enumerate(self.model.unit_modules()[0]))], boundaries)
            self.sink.report_units(self.model.unit_of_key()[0], lambda unit: boundaries.unit_begins(0, unit))
        return Executor(
            plan,
            0,
            {
                0: ModelStage(
                    lambda microbatch, _: self.forward(microbatch), self.sink, begins=True, ends=True
                )
            },
            P2P(ps),
            self.model,
            units=None if units is None else dict(enumerate(units)),
            boundaries=boundaries,
        )

    def forward(self, microbatch: int) -> torch.Tensor:
        tokens, labels = self.work.mine[microbatch]
        self.gpt.context.begin_microbatch(self.iteration, microbatch, microbatch)
        losses = self.gpt(tokens, self.positions, labels=labels)
        loss_sum, num_tokens, _ = gpt_loss(torch.ones_like(losses), losses)
        loss = loss_sum / num_tokens
        self.total += loss.item() / len(self.work.mine)
        return loss

    def step(self) -> float | None:
        self.total = 0.0
        self.model.begin_step(len(self.work.mine))
        self.execute(self.iteration)
        self.model.finish()
        self.optimizer.step(self.divisor)
        self.model.weights_changed()
        self.iteration += 1
        return self.total


class OurPlainLoop(PlainLoop):
    """`fully_shard` over the plain network, with torch's own Adam on the shards."""

    def __init__(self, work: Work, config: Config) -> None:
        model = plain_model(work)
        if work.dtype != torch.float32:
            model.to(work.dtype)
        fully_shard(model, work.ps, config, fsdp_unit_modules=[Block])
        super().__init__(work, model, work.mine, autocast=False)
        self.optimizer = plain_adam(model)


def strategy(name: str, **changes: object) -> Callable[[Work], Trainer]:
    return lambda work: OurLoop(work, config_of(name, **changes))


FULL = "optim_grads_params"
OURS: Mapping[str, Callable[[Work], Trainer]] = MappingProxyType(
    {
        "ours-alone": lambda work: OurLoop(work, config_of("no_shard"), together=False),
        "ours-no_shard": strategy("no_shard"),
        "ours-optim": strategy("optim"),
        "ours-optim_grads": strategy("optim_grads"),
        "ours-optim_grads_params": strategy(FULL),
        "ours-optim_grads_params-bf16wire": strategy(FULL, megatron_fsdp_grad_comm_dtype="bf16"),
        "ours-optim_grads_params-backward": strategy(FULL, fsdp_reshard_policy="backward"),
        "ours-optim_grads_params-step": strategy(FULL, fsdp_reshard_policy="step"),
        "ours-plain": lambda work: OurPlainLoop(work, config_of(FULL)),
    }
)
