"""A tiny GPT trained by the real engine under any layout of ranks, and what came of it as global tensors.

Everything below the command line is the trainer's own: the flags make the configuration, plans, stages, buffers and
optimizer. Only data and loss are the tests'.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.core.dist_checkpointing.state import LocalPiece, part_pieces
from megatron.core.models.gpt.loss import gpt_loss
from megatron.core.optimizer.clip_grads import clip_coefficient
from megatron.core.optimizer.mixed_precision import GradStats
from megatron.core.pipeline_parallel.plan.build import plan_for
from megatron.core.pipeline_parallel.plan.spec import PlanPurpose
from megatron.core.transport.parallel_state import ParallelState
from megatron.core.transport.rank_grid import RankGrid
from megatron.training.config.config import Config
from megatron.training.config.launch_env import LaunchEnv
from megatron.training.engine import Engine
from megatron.training.report.timers import Timers
from megatron.training.run.arguments import parse_config
from megatron.training.run.build import build_engine, build_gpt_model
from megatron.training.run.data import StepBatches
from megatron.training.run.describe import described
from megatron.training.run.pipeline import PipelineRunner
from megatron.training.state import StepTask
from tests.harness.ranks import RankContext
from tests.harness.reference_gpt import ReferenceConfig
from tests.harness.tiny_models import VOCAB, tiny_batch

MODEL = (
    "--hidden-size 32 --num-attention-heads 8 --ffn-hidden-size 64 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 1 --lr 1e-2 --lr-decay-style constant --weight-decay 0.1 --seed 7 --mock-data "
    f"--tokenizer-type NullTokenizer --vocab-size {VOCAB - 1} --padded-vocab-size {VOCAB} --train-iters 10"
).split()
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0".split()
CLIP = 0.2  # below the norms, so that it acts


def reference_config(words: Sequence[str]) -> ReferenceConfig:
    """The plain GPT of these flags: `MODEL` and a few more."""
    llama, size = "--swiglu" in words, "--padded-vocab-size"
    return ReferenceConfig(
        num_layers=int(words[words.index("--num-layers") + 1]),
        heads=8,
        groups=2 if llama else 8,
        head_dim=4,
        ffn=64,
        vocab=int(words[words.index(size) + 1]) if size in words else VOCAB,
        max_positions=16,
        positions="rope" if llama else "learned_absolute",
        norm="RMSNorm" if llama else "LayerNorm",
        activation="swiglu" if llama else "gelu",
        bias=not llama,
        tied="--untie-embeddings-and-output-weights" not in words,
    )


@dataclasses.dataclass(frozen=True)
class Layout:
    """How ranks share the work. chunks: model chunks a rank. more: further flags, those of sharding among them."""

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
        chunks = f" x{self.chunks}" if self.chunks > 1 else ""
        return " ".join([sizes, self.schedule + chunks, *self.more])


Pieces = dict[str, list[tuple[tuple[int, ...], np.ndarray]]]  # name -> (offset, values) of each rectangle


@dataclasses.dataclass
class Trained:
    """One rank's outcome. losses, norms: by step. grads: of the first step, before clipping, as sums. initial, weights:
    main weights. model: the model's weights at rest (bf16 as int16), moments: of the optimizer, both at the end."""

    losses: list[float]
    norms: list[float]
    zeros: list[int | None]
    initial: Pieces
    grads: Pieces
    weights: Pieces
    model: Pieces
    moments: Pieces


class NoWatchdog:
    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def session_of(config: Config, ps: ParallelState) -> Any:
    """What pipelines and steps take of a session, with timers that are off and nobody who watches."""
    return SimpleNamespace(config=config, ps=ps, timers=Timers(0), watchdog=NoWatchdog())


def plan_ahead(layout: Layout, words: Sequence[str], *, global_batch: int = 8) -> None:
    """Choose and plan in this process what runs of these flags plan: ranks forked from it have that already."""
    config = _config(layout.world_size, layout, tuple(words), global_batch)
    plan_for(config.planner().spec, config.last_num_microbatches, PlanPurpose.TRAIN)


@functools.cache
def _config(world_size: int, layout: Layout, words: tuple[str, ...], global_batch: int) -> Config:
    """The same on all ranks. global_batch: in microbatches."""
    sizes = [*MODEL, *words]
    samples = int(sizes[len(sizes) - sizes[::-1].index("--micro-batch-size")])
    flags = [*MODEL, "--global-batch-size", str(global_batch * samples), *words, *layout.flags]
    config = parse_config(flags, env=LaunchEnv(world_size=world_size))
    limits = config.parallel.rank_memory_limit, config.parallel.pipeline_memory_limit
    return config if limits == (None, None) else described(config)


class Run:
    """The trainer's engine on this rank, with `layout` over all ranks of `ctx`.

    global_batch: microbatches of a step, over all ranks. masked: a part of the tokens does not count, in every
    microbatch another. Runs of one fork share communicators where their ranks are laid out alike.
    """

    def __init__(
        self,
        ctx: RankContext,
        layout: Layout,
        words: Sequence[str],
        *,
        global_batch: int = 8,
        masked: bool = False,
    ) -> None:
        self.config = _config(ctx.world_size, layout, tuple(words), global_batch)
        part = self.config.world_part()
        self.ps = _parallel_state(ctx, layout.tp, layout.pp, layout.dp, part.instances, part.experts)
        planner = self.config.planner()
        self.spec = planner.spec
        provider = partial(build_gpt_model, self.config, self.ps)
        self.engine = build_engine(self.config, self.ps, provider, planner)
        _off_symmetry(self.engine)
        self._per_token = self.config.model.calculate_per_token_loss
        self.runner = PipelineRunner(
            session_of(self.config, self.ps),
            self.engine,
            forward_step,
            planner,
        )
        self.global_batch, self.masked = global_batch, masked
        self.num_microbatches = global_batch // layout.dp

    def step(
        self,
        step: int,
        clip: float = CLIP,
        *,
        count_zeros: bool = False,
        look: Callable[[], None] | None = None,
    ) -> tuple[float, GradStats]:
        """One step of the trainer: (mean loss of the counted tokens, figures of the gradients). look: called with
        gradients complete and nothing updated."""
        batches = StepBatches(self.microbatches(step), reads=self.spec.reads_data(self.ps.pp_rank))
        batches.begin_step()
        numbers = self.runner.train(batches, StepTask(step, self.num_microbatches))
        totals = numbers.reduce(self.ps)
        divisor = totals.num_tokens if self._per_token else float(self.global_batch)
        stats = self.engine.optimizer.prepare(divisor, count_zero_grads=count_zeros)
        if look is not None:
            look()
        self.engine.optimizer.step(divisor, clip_coefficient(stats.norm, clip))
        self.engine.model.weights_changed()
        total, count = totals.losses["lm loss"]
        return total / count, stats

    def microbatches(self, step: int) -> Iterator[dict[str, Tensor]]:
        """This rank's, of one step."""
        for index in range(self.num_microbatches):
            place = index * self.ps.dp_size + self.ps.dp_rank
            samples = self.config.training.micro_batch_size
            yield microbatch(step, place, masked=self.masked, samples=samples)

    # What this rank holds ---------------------------------------------------------------------------------

    def main_weights(self) -> Pieces:
        buffer = self.engine.model.buffer
        return self._of_optimizer(buffer.main_weight_part)

    def main_grads(self) -> Pieces:
        """Complete, of what this rank's optimizer updates."""
        return self._of_optimizer(self.engine.model.buffer.main_grad_part)

    def model_weights(self) -> Pieces:
        """At rest. Communicates where those of the last step have not come yet."""
        return _values(self.engine.model_pieces())

    def moments(self) -> Pieces:
        own = [piece for piece in self.engine.optimizer.pieces() if ".main_weight." not in piece.name]
        return _values(own)

    def _of_optimizer(self, part_of: Callable[[str], Tensor]) -> Pieces:
        buffer = self.engine.model.buffer
        found = []
        for name in buffer.names:
            start, end = buffer.updated_part(name)
            found += part_pieces("", buffer.param_meta[name], part_of(name), start, end)
        return {name.removeprefix("."): parts for name, parts in _values(found).items()}


def train(
    ctx: RankContext,
    layout: Layout,
    words: Sequence[str],
    *,
    global_batch: int = 8,
    steps: int = 1,
    clip: float = CLIP,
    masked: bool = False,
) -> Trained:
    """Train on this rank, with `layout` over all ranks of `ctx`."""
    return train_run(Run(ctx, layout, words, global_batch=global_batch, masked=masked), steps, clip)


def train_run(
    run: Run, steps: int, clip: float = CLIP, *, between: Callable[[int], None] | None = None
) -> Trained:
    """Train from the beginning. between: called behind each step, with its number."""
    outcome = Trained([], [], [], run.main_weights(), {}, {}, {}, {})

    def keep_grads() -> None:
        outcome.grads = run.main_grads()

    for step in range(1, steps + 1):
        loss, stats = run.step(step, clip, count_zeros=True, look=keep_grads if step == 1 else None)
        outcome.losses.append(loss)
        outcome.norms.append(stats.norm)
        outcome.zeros.append(stats.num_zeros)
        if between is not None:
            between(step)
    outcome.weights, outcome.model, outcome.moments = run.main_weights(), run.model_weights(), run.moments()
    return outcome


@functools.cache
def _parallel_state(
    ctx: RankContext, tp: int, pp: int, dp: int, instances: int, experts: RankGrid | None
) -> ParallelState:
    return ctx.make_ps(tp=tp, pp=pp, dp=dp, instances=instances, experts=experts)


def microbatch(step: int, index: int, *, masked: bool = False, samples: int = 1) -> dict[str, Tensor]:
    """Global microbatch `index` of a step: two global batches in turn, so that ten steps learn something."""
    tokens, labels, positions = tiny_batch(seed=100 * (step % 2) + index, batch=samples)
    mask = torch.ones(labels.shape)
    if masked:
        mask[:, : 1 + (3 * index + step) % 11] = 0
    return {"tokens": tokens, "labels": labels, "position_ids": positions, "loss_mask": mask}


def forward_step(iterator, model):
    """As pretrain_gpt.py's."""
    batch = next(iterator)
    get = batch.get
    losses = model(get("tokens"), get("position_ids"), None, labels=get("labels"))
    return losses, partial(gpt_loss, get("loss_mask"))


def _off_symmetry(engine: Engine) -> None:
    """Norms and biases start at ones and zeros, where many errors do not show."""
    buffer = engine.model.buffer
    for name in buffer.names:
        meta = buffer.param_meta[name]
        if len(meta.global_shape) > 1:
            continue
        generator = torch.Generator().manual_seed(sum(name.encode()))
        noise = torch.empty(meta.global_shape, dtype=torch.float32).normal_(0, 0.1, generator=generator)
        start, end = buffer.updated_part(name)
        for piece in part_pieces("", meta, buffer.main_weight_part(name), start, end):
            piece.tensor.add_(noise[piece.offset[0] : piece.offset[0] + len(piece.tensor)])
    buffer.copy_main_to_weights()
    engine.model.weights_changed()


def _values(pieces: Iterable[LocalPiece]) -> Pieces:
    """Copies, by name; bf16, which numpy does not know, as int16."""
    found: Pieces = {}
    for piece in pieces:
        values = piece.tensor.detach().clone(memory_format=torch.contiguous_format)
        plain = values.view(torch.int16) if values.dtype == torch.bfloat16 else values
        found.setdefault(piece.name, []).append((piece.offset, plain.numpy()))
    return found


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
