"""A tiny GPT trained by the real engine under any layout of ranks, and what came of it as global tensors.

Everything below the command line is the trainer's own: the flags make the configuration, plans, stages, buffers and
optimizer. Only data and loss are the tests'.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch

from megatron.core.models.gpt.loss import gpt_loss
from megatron.core.optimizer.clip_grads import clip_coefficient
from megatron.core.parallel_state import ParallelState
from megatron.core.param_meta import ParamMeta
from megatron.training.arguments import parse_config
from megatron.training.build import Engine, build_engine, build_gpt_model
from megatron.training.launch_env import LaunchEnv
from megatron.training.pipeline import PipelineRunner
from megatron.training.plans import Plans
from megatron.training.step_batches import StepBatches
from megatron.training.timers import Timers
from tests.harness.ranks import RankContext
from tests.harness.tiny_models import VOCAB, tiny_batch

MODEL = (
    "--hidden-size 32 --num-attention-heads 8 --ffn-hidden-size 64 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 1 --lr 1e-2 --lr-decay-style constant --weight-decay 0.1 --seed 7 --mock-data "
    f"--tokenizer-type NullTokenizer --vocab-size {VOCAB - 1} --padded-vocab-size {VOCAB} --train-iters 10"
).split()
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0".split()
CLIP = 0.2  # below the norms, so that it acts


@dataclasses.dataclass(frozen=True)
class Layout:
    """How ranks share the work. chunks: model chunks a rank."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    sp: bool = False
    schedule: str = "1f1b"
    chunks: int = 1
    more: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def flags(self) -> list[str]:
        words = ["--tensor-model-parallel-size", str(self.tp), "--pipeline-model-parallel-size", str(self.pp)]
        words += ["--sequence-parallel"] if self.sp else []
        words += ["--pipeline-schedule", self.schedule]
        words += ["--num-virtual-stages-per-pipeline-rank", str(self.chunks)] if self.chunks > 1 else []
        return [*words, *self.more]

    def __str__(self) -> str:
        sizes = f"tp{self.tp}{'+sp' * self.sp} pp{self.pp} dp{self.dp}"
        return f"{sizes} {self.schedule}" + (f" x{self.chunks}" if self.chunks > 1 else "")


Pieces = dict[str, list[tuple[tuple[int, ...], np.ndarray]]]  # name -> (offset, values) of each region


@dataclasses.dataclass
class Trained:
    """One rank's outcome. losses, norms: by step. grads: of the first step, before clipping, as sums."""

    losses: list[float]
    norms: list[float]
    zeros: list[int | None]
    initial: Pieces
    grads: Pieces
    weights: Pieces


def train(
    ctx: RankContext,
    layout: Layout,
    words: Sequence[str],
    *,
    global_batch: int = 8,
    steps: int = 1,
    clip: float = CLIP,
) -> Trained:
    """Train on this rank, with `layout` over all ranks of `ctx`."""
    flags = [*MODEL, "--global-batch-size", str(global_batch), *words, *layout.flags]
    config = parse_config(flags, env=LaunchEnv(world_size=ctx.world_size, launched=True, rank=ctx.rank))
    ps = ctx.make_ps(tp=layout.tp, pp=layout.pp, dp=layout.dp)
    plans = Plans(config)
    engine = build_engine(config, ps, plans, partial(build_gpt_model, config, ps))
    _off_symmetry(engine)
    runner = PipelineRunner(plans, ps, engine, forward_step, Timers(0), per_token_loss=False)
    num_microbatches = global_batch // layout.dp
    outcome = Trained([], [], [], _pieces(engine, weights=True), {}, {})
    batches = StepBatches(_microbatches(ps, num_microbatches), reads=plans.reads_data(ps.pp_rank))
    for step in range(1, steps + 1):
        batches.begin_step()
        numbers = runner.train(batches, iteration=step, num_microbatches=num_microbatches, loss_scale=1.0)
        total, count = numbers.reduce(ps).losses["lm loss"]
        stats = engine.optimizer.prepare(global_batch, count_zero_grads=True)
        if step == 1:
            outcome.grads = _pieces(engine, weights=False)
        engine.optimizer.step(global_batch, clip_coefficient(stats.norm, clip))
        outcome.losses.append(total / count)
        outcome.norms.append(stats.norm)
        outcome.zeros.append(stats.num_zeros)
    outcome.weights = _pieces(engine, weights=True)
    return outcome


def microbatch(step: int, index: int) -> dict[str, torch.Tensor]:
    """Global microbatch `index` of a step: two global batches in turn, so that ten steps learn something."""
    tokens, labels, positions = tiny_batch(seed=100 * (step % 2) + index, batch=1)
    return {
        "tokens": tokens,
        "labels": labels,
        "position_ids": positions,
        "loss_mask": torch.ones(labels.shape),
    }


def _microbatches(ps: ParallelState, count: int) -> Iterator[dict[str, torch.Tensor]]:
    step = 0
    while True:
        step += 1
        for index in range(count):
            yield microbatch(step, index * ps.dp_size + ps.dp_rank)


def forward_step(iterator, model):
    """As pretrain_gpt.py's."""
    batch = next(iterator)
    get = batch.get
    losses = model(get("tokens"), get("position_ids"), None, labels=get("labels"))
    return losses, partial(gpt_loss, get("loss_mask"))


def _off_symmetry(engine: Engine) -> None:
    """Norms and biases start at ones and zeros, where many errors do not show."""
    buffer = engine.model.buffer
    for name, meta in engine.param_meta.items():
        if len(meta.global_shape) > 1:
            continue
        generator = torch.Generator().manual_seed(sum(name.encode()))
        noise = torch.empty(meta.global_shape, dtype=torch.float32).normal_(0, 0.1, generator=generator)
        for part in meta.parts:
            rows = slice(part.offset[0], part.offset[0] + part.shape[0])
            part.view(buffer.main_weight(name)).add_(noise[rows])
    buffer.copy_main_to_weights()


def _pieces(engine: Engine, *, weights: bool) -> Pieces:
    buffer = engine.model.buffer
    of = buffer.main_weight if weights else buffer.main_grad
    return {name: _parts(meta, of(name)) for name, meta in engine.param_meta.items()}


def _parts(meta: ParamMeta, tensor: torch.Tensor) -> list[tuple[tuple[int, ...], np.ndarray]]:
    return [(part.offset, part.view(tensor).detach().clone().numpy()) for part in meta.parts]


def assembled(by_rank: Sequence[Pieces]) -> dict[str, np.ndarray]:
    """Global tensors from all ranks' pieces. Elements held by several ranks must be the same bits on all of them."""
    shapes: dict[str, tuple[int, ...]] = {}
    for pieces in by_rank:
        for name, parts in pieces.items():
            for offset, values in parts:
                end = tuple(o + s for o, s in zip(offset, values.shape, strict=True))
                shapes[name] = tuple(map(max, end, shapes.get(name, end)))
    out: dict[str, np.ndarray] = {}
    for name, shape in shapes.items():
        first = next(parts for pieces in by_rank if (parts := pieces.get(name)))
        whole, seen = np.zeros(shape, first[0][1].dtype), np.zeros(shape, bool)
        for rank, pieces in enumerate(by_rank):
            for offset, values in pieces.get(name, []):
                box = tuple(slice(o, o + s) for o, s in zip(offset, values.shape, strict=True))
                known = seen[box]
                assert np.array_equal(whole[box][known], values[known]), f"{name}: rank {rank} has other bits"
                whole[box], seen[box] = values, True
        assert seen.all(), f"{name}: {np.count_nonzero(~seen)} elements are held by no rank"
        out[name] = whole
    return out
