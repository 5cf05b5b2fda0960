"""Our pipelined training step against torch.distributed.pipelining's Schedule1F1B: 2 ranks, PP = 2, 1F1B.

    python benchmarks/pipeline_training.py                     # 8 layers x 512, as in the README
    python benchmarks/pipeline_training.py --size tiny --steps 3 --dtypes fp32 --json out.json

Both train the same GPT (untied head) on the same tokens from the same weights, half of the layers a rank: forward,
backward, clip by the norm over both stages, fused AdamW. The same two forked processes run both, one thread each,
over gloo; steps are interleaved (ours, torch, torch, ours, ...), with a barrier before each. A step's wall time is
that of the slower rank, its CPU time the sum over both; the ratio is the median over pairs. bf16: ours holds bf16
weights with fp32 main weights and gradients; torch's runs under autocast, or with --peer-bf16 pure entirely in bf16.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.plain_gpt import Block, copy_weights, set_schedule
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.gpt.loss import gpt_loss
from megatron.core.optimizer.clip_grads import clip_coefficient
from megatron.core.optimizer.mixed_precision import build_optimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.parallel_state import ParallelState
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.passes.lower import lower
from megatron.core.pipeline_parallel.plan.registry import build_plan
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.runtime.executor import Executor
from megatron.core.pipeline_parallel.runtime.p2p import P2P
from megatron.core.pipeline_parallel.runtime.stage import ModelStage
from megatron.core.pipeline_parallel.runtime.timeline_writer import TimelineWriter
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.harness.ranks import RankContext, run_ranks

NUM_RANKS = 2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SIZES = {
    "small": {"layers": 8, "hidden": 512, "heads": 8, "seq": 512, "vocab": 8192},
    "tiny": {"layers": 4, "hidden": 128, "heads": 4, "seq": 128, "vocab": 1024},
}
LEARNING_RATE, WEIGHT_DECAY, BETAS, CLIP = 3e-4, 0.1, (0.9, 0.95), 1.0
Batches = list[tuple[Tensor, Tensor]]  # tokens and labels of each microbatch, [micro_batch, seq]


class Trainer(Protocol):
    def step(self, batches: Batches) -> float | None:
        """The mean loss on the last rank, None elsewhere."""


def stage_layers(shape: dict[str, int], rank: int) -> range:
    each = shape["layers"] // NUM_RANKS
    return range(rank * each, (rank + 1) * each)


class OurTrainer:
    """A GPTModel stage under the executor, over the flat buffer and the optimizer of the trainer."""

    def __init__(
        self,
        shape: dict[str, int],
        dtype: torch.dtype,
        ps: ParallelState,
        microbatches: int,
        timeline: Path | None = None,
    ) -> None:
        config = TransformerConfig(
            num_layers=shape["layers"],
            hidden_size=shape["hidden"],
            num_attention_heads=shape["heads"],
            seq_length=shape["seq"],
            max_position_embeddings=shape["seq"],
            attention_dropout=0.0,
            hidden_dropout=0.0,
            untie_embeddings_and_output_weights=True,
        ).resolved()
        optimizer = OptimizerConfig(
            lr=LEARNING_RATE,
            weight_decay=WEIGHT_DECAY,
            adam_beta2=BETAS[1],
            bf16=dtype == torch.bfloat16,
            clip_grad=CLIP,
        )
        self.rank, self.last = ps.pp_rank, ps.pp_rank == NUM_RANKS - 1
        self.gpt = GPTModel(
            config,
            padded_vocab_size=shape["vocab"],
            seed=1234,
            params_dtype=dtype,
            pre_process=self.rank == 0,
            post_process=self.last,
            layers=stage_layers(shape, self.rank),
        )
        sink = self.gpt.context.grads
        self.model = DistributedDataParallel(
            [self.gpt],
            ps,
            DistributedDataParallelConfig(),
            self.gpt.param_meta,
            sinks=[sink],
            stages=[self.rank],
        )
        self.optimizer = build_optimizer(optimizer, self.model.buffer, ps)
        set_schedule(self.optimizer.param_groups, LEARNING_RATE, WEIGHT_DECAY)
        self.writer = None if timeline is None else TimelineWriter(timeline, ps)
        plan = build_plan("1f1b", Request(NUM_RANKS, microbatches))
        stage = ModelStage(self._forward, sink, begins=self.rank == 0, ends=self.last)
        self.executor = Executor(
            lower(plan, CostModel.of_ranks(plan.placement)),
            self.rank,
            {self.rank: stage},
            P2P(ps),
            self.model,
            recorder=self.writer,
        )
        self.batches: Batches = []
        self.total, self.iteration = 0.0, 0

    def _forward(self, microbatch: int, hidden: Tensor | None) -> Tensor:
        tokens, labels = self.batches[microbatch]
        self.gpt.context.begin_microbatch(self.iteration, microbatch, microbatch)
        if self.rank > 0:
            self.gpt.set_input_tensor(hidden)
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        output: Tensor = self.gpt(tokens, positions, labels=labels if self.last else None)
        if not self.last:
            return output
        loss_sum, num_tokens, _ = gpt_loss(torch.ones_like(output), output)
        loss = loss_sum / num_tokens
        self.total += loss.item() / len(self.batches)
        return loss

    def step(self, batches: Batches) -> float | None:
        self.batches, self.total = batches, 0.0
        self.iteration += 1
        self.model.begin_step(len(batches))
        self.executor.run(self.iteration)
        self.model.finish()
        divisor = float(len(batches))
        stats = self.optimizer.prepare(divisor)
        self.optimizer.step(divisor, clip_coefficient(stats.norm, CLIP))
        return self.total if self.last else None


class PlainStage(nn.Module):
    """What one rank holds of benchmarks/plain_gpt.py's model, with a head of its own: tokens or hidden states in,
    hidden states [b, s, h] or logits [b, s, v] out."""

    def __init__(self, shape: dict[str, int], rank: int, autocast: bool) -> None:
        super().__init__()
        hidden = shape["hidden"]
        self.autocast, self.first, self.last = autocast, rank == 0, rank == NUM_RANKS - 1
        if self.first:
            self.wte, self.wpe = nn.Embedding(shape["vocab"], hidden), nn.Embedding(shape["seq"], hidden)
        self.blocks = nn.ModuleDict(
            {str(layer): Block(hidden, shape["heads"]) for layer in stage_layers(shape, rank)}
        )
        if self.last:
            self.ln_f, self.lm_head = nn.LayerNorm(hidden), nn.Linear(hidden, shape["vocab"], bias=False)

    def forward(self, x: Tensor) -> Tensor:
        context = torch.autocast("cpu", dtype=torch.bfloat16) if self.autocast else contextlib.nullcontext()
        with context:
            if self.first:
                x = self.wte(x) + self.wpe(torch.arange(x.shape[1]))
            for block in self.blocks.values():
                x = block(x)
            return self.lm_head(self.ln_f(x)) if self.last else x


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), labels.view(-1))


class TorchTrainer:
    """Torch's pipeline as its tutorial has it: PipelineStage, Schedule1F1B, a norm over the stages, fused AdamW."""

    def __init__(
        self, shape: dict[str, int], dtype: torch.dtype, pure: bool, rank: int, microbatches: int
    ) -> None:
        self.rank, self.last = rank, rank == NUM_RANKS - 1
        bf16 = dtype == torch.bfloat16
        self.model = PlainStage(shape, rank, autocast=bf16 and not pure)
        if bf16 and pure:
            self.model.to(torch.bfloat16)
        decay = [p for p in self.model.parameters() if p.dim() > 1]
        rest = [p for p in self.model.parameters() if p.dim() <= 1]
        groups = [{"params": decay, "weight_decay": WEIGHT_DECAY}, {"params": rest, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, fused=True)
        stage = PipelineStage(self.model, rank, NUM_RANKS, torch.device("cpu"))
        self.schedule = Schedule1F1B(stage, microbatches, loss_fn=cross_entropy)

    def step(self, batches: Batches) -> float | None:
        losses: list[Tensor] = []
        if self.rank == 0:
            self.schedule.step(torch.cat([tokens for tokens, _ in batches]))
        else:
            labels = torch.cat([labels for _, labels in batches])
            self.schedule.step(target=labels, losses=losses, return_outputs=False)
        self._clip()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return sum(loss.item() for loss in losses) / len(batches) if self.last else None

    def _clip(self) -> None:
        parameters = list(self.model.parameters())
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        squared = norm.float() ** 2
        dist.all_reduce(squared)
        torch.nn.utils.clip_grads_with_norm_(parameters, CLIP, squared.sqrt())


def make_batches(args: argparse.Namespace, shape: dict[str, int]) -> Batches:
    generator = torch.Generator().manual_seed(5)
    text = torch.randint(shape["vocab"], (args.global_batch, shape["seq"] + 1), generator=generator)
    return [(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) for rows in text.split(args.micro_batch)]


def timed(trainer: Trainer, batches: Batches) -> tuple[float | None, float, float]:
    """(loss, wall s, CPU s) of one step on this rank."""
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    loss = trainer.step(batches)
    return loss, time.perf_counter() - wall, time.process_time() - cpu


def run_case(ctx: RankContext, dtype: str, args: argparse.Namespace) -> dict[str, list[tuple[Any, ...]]]:
    """On each rank: (loss, wall s, CPU s) of every step of both, the first one a warm-up."""
    shape = SIZES[args.size]
    batches = make_batches(args, shape)
    timeline = args.log_pipeline_timeline and args.log_pipeline_timeline / dtype
    ours = OurTrainer(shape, DTYPES[dtype], ctx.make_ps(pp=NUM_RANKS), len(batches), timeline)
    theirs = TorchTrainer(shape, DTYPES[dtype], args.peer_bf16 == "pure", ctx.rank, len(batches))
    weights = {name: ours.model.buffer.main_weight(name) for name in ours.gpt.param_meta}
    copy_weights(weights, theirs.model, shape["heads"])
    trainers: dict[str, Trainer] = {"ours": ours, "torch": theirs}
    runs: dict[str, list[tuple[Any, ...]]] = {
        name: [timed(trainer, batches)] for name, trainer in trainers.items()
    }
    for pair in range(args.steps):
        for name in ("ours", "torch") if pair % 2 == 0 else ("torch", "ours"):
            runs[name].append(timed(trainers[name], batches))
    if ours.writer is not None:
        ours.writer.close()
    return runs


def time_case(dtype: str, args: argparse.Namespace) -> dict[str, Any]:
    """Medians over the steps of both ranks, and the median ratio of the pairs."""
    by_rank = run_ranks(run_case, NUM_RANKS, dtype, args, timeout=args.timeout)
    losses = {name: [one[0] for one in steps] for name, steps in by_rank[-1].items()}
    tolerance = 1e-4 if dtype == "fp32" else 2e-2
    pairs = list(zip(losses["ours"], losses["torch"], strict=True))
    if not all(abs(ours - theirs) < tolerance for ours, theirs in pairs):
        raise SystemExit(f"not the same work: losses {losses}")
    result: dict[str, Any] = {"dtype": dtype, "losses": losses}
    for index, clock, over_ranks in ((1, "wall", max), (2, "cpu", sum)):
        times = {
            name: [
                over_ranks(one[index] for one in step)
                for step in zip(*(r[name] for r in by_rank), strict=True)
            ]
            for name in losses
        }
        for name, values in times.items():
            result[f"{name}_{clock}_s"] = statistics.median(values[1:])
        result[f"{clock}_ratio"] = statistics.median(
            ours / theirs for ours, theirs in zip(times["ours"][1:], times["torch"][1:], strict=True)
        )
    return result


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None, allow_abbrev=False
    )
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--global-batch", type=int, default=8, help="samples a step")
    parser.add_argument("--micro-batch", type=int, default=1, help="samples a microbatch")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--peer-bf16", choices=("autocast", "pure"), default="autocast")
    parser.add_argument("--steps", type=int, default=5, help="timed pairs of steps")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for one case")
    parser.add_argument(
        "--log-pipeline-timeline",
        type=Path,
        metavar="DIR",
        help="write ours to DIR/fp32 and DIR/bf16, for tools/show_schedule.py --measured",
    )
    parser.add_argument("--json", type=Path, help="write the figures there instead of to the console")
    args = parser.parse_args()
    if (
        args.steps < 1
        or args.micro_batch < 1
        or args.global_batch < 1
        or args.global_batch % args.micro_batch
    ):
        parser.error(
            "--steps, --micro-batch and --global-batch: at least 1, the batch a multiple of the microbatch"
        )
    return args


def main() -> None:
    args = parse()
    torch.set_num_threads(1)
    results = []
    print("dtype |  ours s  torch s  ratio | ours CPU  torch CPU  ratio | ours tokens/s")
    for dtype in args.dtypes:
        case = time_case(dtype, args)
        case["ours_tokens_per_s"] = args.global_batch * SIZES[args.size]["seq"] / case["ours_wall_s"]
        line = f"{dtype:5}"
        for clock, width in (("wall", 7), ("cpu", 8)):
            ours, theirs = case[f"ours_{clock}_s"], case[f"torch_{clock}_s"]
            line += f" | {ours:{width}.3f}  {theirs:{width}.3f}  {case[f'{clock}_ratio']:5.3f}"
        results.append(case)
        print(f"{line} | {case['ours_tokens_per_s']:,.0f}", flush=True)
    described = {
        name: getattr(args, name) for name in ("size", "global_batch", "micro_batch", "peer_bf16", "steps")
    }
    text = json.dumps(
        {**described, "shape": SIZES[args.size], "ranks": NUM_RANKS, "cases": results}, indent=1
    )
    if args.json:
        args.json.write_text(text + "\n")
    else:
        print(text)


if __name__ == "__main__":
    main()
