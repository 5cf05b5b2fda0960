"""The contestants of `pipeline_training.py` and `fsdp_pipelines.py`: one GPT under our pipelines, and under torch's.

Ours are what the trainer builds from flags: configuration, plans, engine, runner, and where they are asked to, costs
measured in the run and a schedule solved again for them. Torch's are as its documentation has them: a PipelineStage a
chunk, the schedule's class, fused AdamW, clipping by the norm over all ranks, and with data parallel ranks
`fully_shard` over each block and stage. Both hold the same layers in each chunk.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleZBVZeroBubble
from torch.distributed.tensor import DTensor

from benchmarks.plain_gpt import Block, copy_weights, set_schedule
from megatron.core.models.gpt.loss import gpt_loss
from megatron.core.models.gpt.stage_layers import StageSpec
from megatron.core.optimizer.clip_grads import clip_coefficient
from megatron.core.pipeline_parallel.plan.build import plan_for
from megatron.core.pipeline_parallel.plan.ir import plan_hash
from megatron.core.pipeline_parallel.plan.measuring.replan import measured_costs, solve_again
from megatron.core.pipeline_parallel.plan.simulate import simulate
from megatron.core.pipeline_parallel.plan.spec import PlanPurpose
from megatron.core.pipeline_parallel.runtime.profiler import Profiler
from megatron.core.pipeline_parallel.runtime.recorder import Recorder
from megatron.core.pipeline_parallel.runtime.timeline_writer import TimelineWriter
from megatron.core.transport import host_data
from megatron.core.transport.parallel_state import ParallelState
from megatron.training.config.config import Config
from megatron.training.config.launch_env import LaunchEnv
from megatron.training.report.timers import Timers
from megatron.training.run.arguments import parse_config
from megatron.training.run.build import build_engine, build_gpt_model
from megatron.training.run.data import StepBatches
from megatron.training.run.describe import described
from megatron.training.run.pipeline import PipelineRunner
from megatron.training.state import StepTask

NUM_RANKS = 2
LEARNING_RATE, WEIGHT_DECAY, BETAS, CLIP, SEED = 3e-4, 0.1, (0.9, 0.95), 1.0, 1234
PEERS = {"1f1b": Schedule1F1B, "zbv": ScheduleZBVZeroBubble}  # ours of the same name lay the stages alike
Batches = list[tuple[Tensor, Tensor]]  # tokens and labels of each microbatch, [micro_batch, seq]


@dataclasses.dataclass(frozen=True)
class Work:
    """What is trained. layers, hidden, heads, seq, vocab: of the model. num_microbatches: of a data parallel rank.
    line, v: layers of each stage of schedules with one chunk a rank, and of those on a V; empty: even ones. bf16: bf16
    weights (ours), autocast (torch's; with data parallel ranks FSDP2's mixed precision). dp: data parallel ranks.
    """

    layers: int
    hidden: int
    heads: int
    seq: int
    vocab: int
    micro_batch: int = 1
    num_microbatches: int = 8
    bf16: bool = False
    line: tuple[int, ...] = ()
    v: tuple[int, ...] = ()
    dp: int = 1

    def config(self, schedule: str, rank: int, flags: Sequence[str] = ()) -> Config:
        """The trainer's, of a launch with these flags and more. Raises ConfigurationError."""
        samples = self.micro_batch * self.num_microbatches * self.dp
        env = LaunchEnv(
            world_size=NUM_RANKS * self.dp,
            local_world_size=NUM_RANKS * self.dp,
            rank=rank,
            local_rank=rank,
        )
        words = (
            f"--num-layers {self.layers} --hidden-size {self.hidden} --num-attention-heads {self.heads} "
            f"--seq-length {self.seq} --max-position-embeddings {self.seq} --untie-embeddings-and-output-weights "
            "--hidden-dropout 0 --attention-dropout 0 --mock-data --tokenizer-type NullTokenizer "
            f"--vocab-size {self.vocab - 1} --padded-vocab-size {self.vocab} "
            f"--micro-batch-size {self.micro_batch} --global-batch-size {samples} --train-iters 1000 "
            f"--lr {LEARNING_RATE} --lr-decay-style constant --weight-decay {WEIGHT_DECAY} "
            f"--adam-beta1 {BETAS[0]} --adam-beta2 {BETAS[1]} --clip-grad {CLIP} --seed {SEED} "
            f"--pipeline-model-parallel-size {NUM_RANKS} --pipeline-schedule {schedule}"
        ).split()
        words += ["--bf16"] if self.bf16 else []
        words += flags
        even = parse_config(words, env=env)
        counts = self.line if even.planner().spec.placement.num_chunks == 1 else self.v
        if not counts:
            return described(even)
        stages = "|".join("t" * count for count in counts)
        return described(parse_config([*words, "--pipeline-model-parallel-layout", f"E{stages}L"], env=env))

    def batches(self, dp_rank: int = 0) -> Batches:
        """Random tokens of a data parallel rank, the same in every step: what is compared is time."""
        generator = torch.Generator().manual_seed(5)
        samples = self.micro_batch * self.num_microbatches
        text = torch.randint(self.vocab, (samples * self.dp, self.seq + 1), generator=generator)
        own = text[samples * dp_rank : samples * (dp_rank + 1)]
        return [(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) for rows in own.split(self.micro_batch)]


class OurPipeline:
    """The trainer's engine and runner under one of our schedules.

    measured: steps that are profiled, the second one is the first of them. timeline: folder for the measured timeline.
    flags: more of the trainer's.
    """

    def __init__(
        self,
        work: Work,
        schedule: str,
        ps: ParallelState,
        *,
        measured: int = 0,
        timeline: Path | None = None,
        flags: Sequence[str] = (),
    ) -> None:
        self.config = config = work.config(schedule, ps.rank, flags)
        self.ps, self.count = ps, work.num_microbatches
        self.engine = build_engine(config, ps, partial(build_gpt_model, config, ps))
        set_schedule(self.engine.optimizer.param_groups, LEARNING_RATE, WEIGHT_DECAY)
        self.profiler = Profiler(ps.device, ps.pp_group.ranks, start=2, end=2 + measured)
        readers = [self.profiler, *(() if timeline is None else [TimelineWriter(timeline, ps)])]
        self.runner = PipelineRunner(
            SimpleNamespace(config=config, ps=ps, timers=Timers(0)),
            self.engine,
            _forward_step,
            config.planner(),
            recorder=Recorder(ps.device, readers),
            profiler=self.profiler,
        )
        self.batches, self.iteration = _trainer_batches(work, ps.dp_rank), 0

    def step(self) -> float:
        """One of the trainer's steps; the mean loss."""
        self.iteration += 1
        batches = StepBatches(iter(self.batches), reads=self.runner.spec.reads_data(self.ps.pp_rank))
        numbers = self.runner.train(batches, StepTask(self.iteration, self.count))
        total, count = numbers.reduce(self.ps).losses["lm loss"]
        divisor = float(self.count * self.ps.dp_size)
        stats = self.engine.optimizer.prepare(divisor)
        self.engine.optimizer.step(divisor, clip_coefficient(stats.norm, CLIP))
        self.engine.model.weights_changed()
        return total / count

    def solve_again(self) -> dict[str, Any]:
        """As the trainer at the end of its window: costs of what all ranks measured, and the plan of these.

        What is returned is the same on all ranks, in milliseconds and MB.
        """
        group = self.ps.control_group
        figures = host_data.all_gather_json(self.profiler.local_figures(), group)
        self.profiler.forget()
        before = self.runner.spec
        costs = measured_costs(figures, before)
        again, kept, _ = solve_again(before, costs, self.count, self.count, splits=True)
        if kept is None:
            self.runner.planner.adopt(again)
        planned_before = simulate(plan_for(before, self.count, PlanPurpose.TRAIN), costs)
        plan = plan_for(again, self.count, PlanPurpose.TRAIN)
        hashes = host_data.all_gather_json(plan_hash(plan), group)
        assert len(set(hashes)) == 1, f"ranks have solved different plans: {hashes}"
        planned = simulate(plan, costs)
        return {
            "plan": hashes[0][:12],
            "kept": kept,
            **{
                f"{kind}_ms": [round(one / 1e6, 2) for one in times]
                for kind, times in (("f", costs.f), ("b", costs.b), ("w", costs.w))
            },
            "comm_ms": round(costs.comm / 1e6, 3),
            "planned_ms": planned.cost / 1e6,
            "planned_bubble": max(0.0, planned.bubble_rate),
            "planned_bubble_before": max(0.0, planned_before.bubble_rate),
            "activation_mb": [round(size / 1e6, 1) for size in costs.activation],
        }

    def close(self) -> None:
        """Finish the timeline."""
        self.runner.close()


def _trainer_batches(work: Work, dp_rank: int) -> list[dict[str, Tensor]]:
    positions = torch.arange(work.seq).expand(work.micro_batch, work.seq)
    return [
        {"tokens": tokens, "labels": labels, "position_ids": positions, "loss_mask": torch.ones(labels.shape)}
        for tokens, labels in work.batches(dp_rank)
    ]


def _forward_step(iterator: Iterator[Mapping[str, Tensor]], model: nn.Module) -> tuple[Tensor, Any]:
    """As pretrain_gpt.py's."""
    batch = next(iterator)  # nothing on a rank that neither embeds nor has the loss
    output = model(batch.get("tokens"), batch.get("position_ids"), None, labels=batch.get("labels"))
    return output, lambda losses: gpt_loss(batch["loss_mask"], losses)


class PlainStage(nn.Module):
    """A stage of benchmarks/plain_gpt.py's model, with a head of its own: tokens or hidden states in, hidden states
    [b, s, h] or logits [b, s, v] out."""

    def __init__(self, work: Work, spec: StageSpec, autocast: bool) -> None:
        super().__init__()
        hidden = work.hidden
        self.autocast, self.spec = autocast, spec
        if spec.embedding:
            self.wte, self.wpe = nn.Embedding(work.vocab, hidden), nn.Embedding(work.seq, hidden)
        self.blocks = nn.ModuleDict({str(layer): Block(hidden, work.heads) for layer in spec.layers})
        if spec.loss:
            self.ln_f, self.lm_head = nn.LayerNorm(hidden), nn.Linear(hidden, work.vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        context = torch.autocast("cpu", dtype=torch.bfloat16) if self.autocast else contextlib.nullcontext()
        with context:
            if self.spec.embedding:
                x = self.wte(x) + self.wpe(torch.arange(x.shape[1]))
            for block in self.blocks.values():
                x = block(x)
            return self.lm_head(self.ln_f(x)) if self.spec.loss else x


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), labels.view(-1))


class TorchPipeline:
    """One of torch's schedules over plain stages, laid out as ours of the same name. pure: all of bf16 runs in bf16,
    no autocast. mesh: of pipeline and data parallel ranks ("pp", "dp"): FSDP2 over the latter, weights kept to the end
    of the step, as torch's schedules ask for."""

    def __init__(
        self, work: Work, schedule: str, pp_rank: int, *, pure: bool = False, mesh: DeviceMesh | None = None
    ) -> None:
        config = work.config(schedule, 0 if mesh is None else mesh.get_rank())
        spec = config.planner().spec
        numbers = spec.local_stages(pp_rank)
        specs = spec.held_by(pp_rank)
        self.begins, self.ends = any(one.embedding for one in specs), any(one.loss for one in specs)
        autocast = work.bf16 and not pure and mesh is None
        modules = [PlainStage(work, one, autocast=autocast) for one in specs]
        self.model = nn.ModuleList(modules)
        _copy_initial(config, modules, work)
        if work.bf16 and pure:
            self.model.to(torch.bfloat16)
        self.pp_group = None if mesh is None else mesh.get_group("pp")
        if mesh is not None:
            _shard(modules, mesh["dp"], bf16=work.bf16)
        decay = [p for p in self.model.parameters() if p.dim() > 1]
        rest = [p for p in self.model.parameters() if p.dim() <= 1]
        groups = [{"params": decay, "weight_decay": WEIGHT_DECAY}, {"params": rest, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, fused=True)
        total = spec.placement.num_stages
        stages = [
            PipelineStage(module, number, total, torch.device("cpu"), group=self.pp_group)
            for module, number in zip(modules, numbers, strict=True)
        ]
        one_chunk = spec.placement.num_chunks == 1
        self.schedule: Any = PEERS[schedule](
            stages[0] if one_chunk else stages,
            work.num_microbatches,
            loss_fn=_cross_entropy,
        )
        batches = work.batches(0 if mesh is None else mesh.get_local_rank("dp"))
        self.tokens = torch.cat([tokens for tokens, _ in batches])
        self.labels = torch.cat([labels for _, labels in batches])

    def step(self) -> float | None:
        """The mean loss where it is computed, None elsewhere."""
        losses: list[Tensor] = []
        targets: dict[str, Any] = {"target": self.labels, "losses": losses} if self.ends else {}
        self.schedule.step(*[self.tokens] * self.begins, **targets, return_outputs=False)
        self._clip()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return sum(loss.item() for loss in losses) / len(losses) if self.ends else None

    def _clip(self) -> None:
        parameters = list(self.model.parameters())
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        squared = (norm.full_tensor() if isinstance(norm, DTensor) else norm).float() ** 2
        dist.all_reduce(squared, group=self.pp_group)
        torch.nn.utils.clip_grads_with_norm_(parameters, CLIP, squared.sqrt())

    def close(self) -> None:
        """Nothing is open."""


def _shard(modules: Sequence[PlainStage], mesh: DeviceMesh, *, bf16: bool) -> None:
    """FSDP2 over each block and each stage; bf16: fp32 shards, bf16 weights, gradients reduced in fp32."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
    for module in modules:
        for block in module.blocks.values():
            fully_shard(block, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
        fully_shard(module, mesh=mesh, reshard_after_forward=False, mp_policy=policy)


def _copy_initial(config: Config, modules: list[PlainStage], work: Work) -> None:
    """Our initial weights depend on seed and name alone: those of a whole model are those of every stage."""
    whole = build_gpt_model(config)
    weights = {name: parameter.float() for name, parameter in whole.named_parameters()}
    for module in modules:
        copy_weights(weights, module, work.heads)
