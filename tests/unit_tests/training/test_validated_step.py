"""The trainer's post-validated steps over layouts, precisions, schedules and engines: the bits of synchronous ones.

Engines, plans, optimizer, clocks and policy are the trainer's own, made from flags; only data and faults are the tests'.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
from functools import partial
from math import inf, nan

import pytest
import torch

from megatron.core.models.gpt.loss import gpt_loss
from megatron.core.optimizer.mixed_precision import RollbackBy
from megatron.training.arguments import parse_config
from megatron.training.build import build_engine, build_gpt_model
from megatron.training.launch_env import LaunchEnv
from megatron.training.nan_policy import NanPolicy, NonFiniteError
from megatron.training.pipeline import PipelineRunner
from megatron.training.plans import Plans
from megatron.training.run_clock import RunClock
from megatron.training.step import StepRunner, StepTask
from megatron.training.step_batches import StepBatches
from megatron.training.timers import Timers
from megatron.training.validated_step import ValidatedStepRunner
from tests.harness.gradient_faults import LARGE, Fault, Faults
from tests.harness.layouts import MODEL
from tests.harness.ranks import run_ranks
from tests.harness.tiny_models import tiny_batch

CLIP = 4.0  # above the norms of steps without a fault


@dataclasses.dataclass(frozen=True)
class Setting:
    """words: flags. stops: iterations that ask for an end; a run goes on behind it. looks: iterations behind which
    everything is decided on, as before saving."""

    words: str
    tp: int = 1
    pp: int = 2
    dp: int = 1
    microbatches: int = 4
    faults: tuple[Fault, ...] = ()
    num_steps: int = 8
    policy: str = "skip"
    max_skips: int = 100
    stops: tuple[int, ...] = ()
    looks: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()  # microbatches of each step, where they grow

    @property
    def world_size(self):
        return self.tp * self.pp * self.dp

    def flags(self, after):
        words = [
            *MODEL,
            *"--num-layers 4 --tensor-model-parallel-size".split(),
            str(self.tp),
            "--pipeline-model-parallel-size",
            str(self.pp),
            "--global-batch-size",
            str(self.microbatches * self.dp),
            *("" if "--clip-grad" in self.words else f"--clip-grad {CLIP}").split(),
            *self.words.split(),
            "--nan-policy",
            self.policy,
        ]
        if after is not None:
            words += f"--enable-optimizer-post-validation --post-validation-after {after}".split()
        return words


class NoWatchdog:
    def phase(self, name):
        return contextlib.nullcontext()


@functools.cache
def parallel_state(ctx, tp, pp, dp):
    return ctx.make_ps(tp=tp, pp=pp, dp=dp)


class Trainer:
    """One rank's trainer without its loop. after: of post-validation; None: steps are synchronous."""

    def __init__(self, ctx, setting, after):
        torch.set_num_threads(1)
        env = LaunchEnv(world_size=ctx.world_size, launched=True, rank=ctx.rank)
        self.setting = setting
        self.config = parse_config(setting.flags(after), env=env)
        self.ps = ps = parallel_state(ctx, setting.tp, setting.pp, setting.dp)
        self.plans = plans = Plans(self.config)
        self.engine = build_engine(self.config, ps, plans, partial(build_gpt_model, self.config, ps))
        self.faults = Faults(list(setting.faults))
        per_token = self.config.model.calculate_per_token_loss
        self.runner = PipelineRunner(
            plans, ps, self.engine, self._forward_step, Timers(0), per_token_loss=per_token
        )
        self.policy = NanPolicy(
            setting.policy, setting.max_skips, dynamic_loss_scale=self.engine.scaler.dynamic
        )
        common = self.config, ps, self.engine, self.runner, self.policy
        self.steps = StepRunner(*common, Timers(0), NoWatchdog(), RunClock())
        self.begun = []  # iterations that were run once more
        if after is not None:
            self.engine.optimizer.rollback_by = RollbackBy(self.config.parallel.post_validation_rollback)
            self.steps = ValidatedStepRunner(*common, self.steps, RunClock(), self.begun.append)
        self.batches = StepBatches(self._microbatches(), reads=plans.reads_data(ps.pp_rank))
        self.results = []

    def _microbatches(self):
        number = 0
        while True:
            tokens, labels, positions = tiny_batch(seed=number * self.ps.dp_size + self.ps.dp_rank, batch=1)
            mask = torch.ones(labels.shape)
            mask[:, : number % 5] = 0
            yield {"tokens": tokens, "labels": labels, "position_ids": positions, "loss_mask": mask}
            number += 1

    def _forward_step(self, iterator, model):
        batch = next(iterator)
        get = batch.get
        chunk = next(one for one in self.engine.chunks if one.module is model)
        context, num_stages = chunk.context, self.plans.placement.num_stages
        where = model, chunk.stage, num_stages, context.iteration, context.grads.microbatch
        mine = self.faults.into(*where) if self.ps.dp_rank == self.ps.dp_size - 1 else []
        losses = model(get("tokens"), get("position_ids"), None, labels=get("labels"))
        return self.faults.out_of(losses, mine), partial(gpt_loss, get("loss_mask"))

    def run(self):
        """As the loop: iterations until all are decided on, from the one behind the last that was."""
        done, setting = 0, self.setting
        while done < setting.num_steps:
            number = done + self.steps.num_undecided + 1
            sizes = setting.sizes or (setting.microbatches,) * setting.num_steps
            flags = (float(number in setting.stops), float(self.ps.rank))
            found = [*self.steps.step(self.batches, StepTask(number, sizes[number - 1], flags))]
            if self.steps.num_undecided and number in (*setting.looks, setting.num_steps):
                found += self.steps.settle(self.batches)
            for result in found:
                done += 1
                assert result.task.iteration == done
            self.results += found
        return self

    # What came of it --------------------------------------------------------------------------------

    def bits(self):
        """Of everything that a checkpoint holds, and that lines are made of."""
        engine = self.engine
        pieces = [*engine.model_pieces(), *engine.optimizer.pieces()]
        tensors = {
            f"{piece.name} {piece.offset}": hashlib.sha256(
                piece.tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            ).hexdigest()
            for piece in pieces
        }
        states = (
            engine.optimizer.state(),
            engine.scheduler.state(),
            engine.scaler.state(),
            self.policy.state(),
        )
        return tensors, states

    def told(self):
        """Of each step, all that the loop hears, but for times and rollbacks."""
        return [
            repr(
                dataclasses.replace(
                    one, ended_at=0.0, rolled_back=False, losses=dict(one.losses), task=one.task
                )
            )
            for one in self.results
        ]


def outcome(ctx, setting, after):
    trainer = Trainer(ctx, setting, after).run()
    return {
        "told": trainer.told(),
        "bits": trainer.bits(),
        "rolled_back": [one.rolled_back for one in trainer.results],
        "skipped": [one.skipped for one in trainer.results],
        "norms": [one.grad_norm for one in trainer.results],
        "scales": [one.loss_scale for one in trainer.results],
    }


def compared(ctx, settings, afters=(0, 2)):
    """By setting and mode, what came of it on this rank."""
    return {
        name: {after: outcome(ctx, setting, after) for after in (None, *afters)}
        for name, setting in settings.items()
    }


def check(world_size, settings, afters=(0, 2), timeout=110):
    """All settings on one fork; the optimistic runs' outcomes are those of the synchronous. Returns them, of rank 0."""
    outs = run_ranks(compared, world_size, settings, afters, timeout=timeout)
    for name in settings:
        for rank, out in enumerate(outs):
            one = out[name]
            for after in afters:
                for mine, other in zip(one[after]["told"], one[None]["told"], strict=True):
                    assert mine == other, f"{name}, after {after}, rank {rank}"
                (mine, states), (other, expected) = one[after]["bits"], one[None]["bits"]
                assert states == expected, f"{name}, after {after}, rank {rank}"
                differ = [key for key in other if mine[key] != other[key]]
                assert not differ, f"{name}, after {after}, rank {rank}: {differ[:4]} of {len(other)}"
    return outs[0]


# The first step, several in a row, two in a row on different stages, the last; on the loss, on one stage only. Behind two
# clean ones in the middle, so that steps are rolled back that were trusted for them.
EVERYTHING = (
    Fault(1, 1.0, LARGE),
    Fault(2, 0.0, inf),
    Fault(3, 1.0, nan, loss=True),
    Fault(6, 1.0, LARGE),
    Fault(7, 0.0, LARGE),
    Fault(8, 0.6, inf),
)
ROLLED_BACK = {
    None: [False] * 8,
    0: [True, True, True, False, False, True, True, True],
    2: [False, False, False, False, False, True, False, False],
}
# Overflows of its own besides the faults; doubled every two clean steps.
FP16 = "--fp16 --initial-loss-scale 131072 --hysteresis 1 --loss-scale-window 2"
UNTIED = "--untie-embeddings-and-output-weights"
CLOCKS = (
    "--lr-warmup-iters 4 --lr-decay-style cosine --min-lr 1e-4 --start-weight-decay 0.01 --end-weight-decay 0.2 "
    "--weight-decay-incr-style linear --decoupled-lr 3e-2"
)
OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
FSDP = "--use-custom-fsdp --data-parallel-sharding-strategy"


def setting(words="", **more):
    return Setting(words, **{"faults": EVERYTHING, **more})


def of_schedules(num_ranks, names):
    return {name: setting(schedule_flags(name), pp=num_ranks, microbatches=2 * num_ranks) for name in names}


def schedule_flags(name):
    chunks = " --num-virtual-stages-per-pipeline-rank 2" if name in ("interleaved", "gis") else ""
    return f"--pipeline-schedule {name}{chunks}"


SCHEDULES = (
    "1f1b",
    "gpipe",
    "interleaved",
    "gis",
    "zb-h1",
    "zb-1p",
    "zb-2p",
    "zbv",
    "v-half",
    "v-min",
    "1f1b-v",
    "dualpipe-v",
)
TWO = {
    "bf16": setting("--bf16"),
    "fp16": setting(FP16),
    "sgd": setting("--optimizer sgd"),
    "sgd without momentum, bf16": setting("--optimizer sgd --sgd-momentum 0 --bf16"),
    "fp64": setting("--fp64"),
    "bf16 gradients": setting("--bf16 --grad-reduce-in-bf16"),
    "untied": setting(UNTIED),
    "tied on a V": setting("--zero-bubble-v-schedule"),
    "untied on a V, bf16": setting(f"--zero-bubble-v-schedule --bf16 {UNTIED}"),
    "clocks": setting(CLOCKS),
    "clocks, untied, bf16, zb-1p": setting(f"{CLOCKS} {UNTIED} --bf16 --enable-zero-bubble"),
    "per token": setting("--calculate-per-token-loss"),
    "per token, fp16": setting(f"--calculate-per-token-loss {FP16}"),
    "clip off": setting("--clip-grad 0"),
    "clip off, fp16": setting(f"--clip-grad 0 {FP16}"),
    "clip each": setting("--clip-grad 0.5", faults=()),
    "clip some": setting("--clip-grad 0.8", faults=()),
    "clip some, bf16, zbv": setting("--clip-grad 0.8 --bf16 --zero-bubble-v-schedule", faults=()),
    "zeros": setting("--log-num-zeros-in-grad"),
    "growing": setting(sizes=(2, 2, 3, 3, 4, 4, 5, 6)),
    "looks": setting(looks=(1, 3, 5, 6)),
    "stops": setting(stops=(1, 2, 4, 6, 8)),
    "stops, fp16": setting(FP16, stops=(1, 2, 3, 4, 6)),
    "unchecked": setting("--no-check-for-nan-in-loss-and-grad"),
    "recompute": setting("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    "one microbatch": setting(
        microbatches=1, faults=tuple(dataclasses.replace(f, microbatch=0) for f in EVERYTHING)
    ),
    "one microbatch, zbv": setting(
        "--zero-bubble-v-schedule",
        microbatches=1,
        faults=tuple(dataclasses.replace(f, microbatch=0) for f in EVERYTHING),
    ),
}
FOUR_BY_DATA = {
    "whole": setting(dp=2),
    "overlapped": setting(OVERLAP, dp=2),
    "overlapped, bf16": setting(f"{OVERLAP} --bf16", dp=2),
    "overlapped, bf16, zbv": setting(f"{OVERLAP} --bf16 --zero-bubble-v-schedule", dp=2),
    "overlapped, fp16, sgd": setting(f"{OVERLAP} {FP16} --optimizer sgd", dp=2),
    "overlapped, stops, interleaved": setting(
        f"{OVERLAP} {schedule_flags('interleaved')}", dp=2, stops=(1, 3, 5)
    ),
    "fsdp optim": setting(f"{FSDP} optim", dp=2),
    "fsdp optim, overlapped, bf16": setting(
        f"{FSDP} optim --overlap-grad-reduce --overlap-param-gather --bf16", dp=2
    ),
    "fsdp optim, zbv": setting(f"{FSDP} optim --zero-bubble-v-schedule --overlap-param-gather", dp=2),
    "averaged": setting("--ddp-average-in-collective", dp=2),
}
FOUR_BY_TENSOR = {
    "tp": setting(tp=2),
    "sp": setting("--sequence-parallel", tp=2),
    "sp, bf16, zbv": setting("--sequence-parallel --bf16 --zero-bubble-v-schedule", tp=2),
    "sp, fp16, zb-1p, untied": setting(f"--sequence-parallel {FP16} --enable-zero-bubble {UNTIED}", tp=2),
    "sp, clocks, stops": setting(f"--sequence-parallel {CLOCKS}", tp=2, stops=(1, 3, 5)),
}
EIGHT = {
    "tp 2, dp 2": setting(f"{OVERLAP} --sequence-parallel --bf16", tp=2, dp=2),
    "tp 2, dp 2, zbv, fp16": setting(
        f"{OVERLAP} --sequence-parallel {FP16} --zero-bubble-v-schedule", tp=2, dp=2
    ),
    "fsdp optim, tp 2": setting(f"{FSDP} optim --overlap-param-gather --sequence-parallel", tp=2, dp=2),
    "dp 4": setting(OVERLAP, dp=4),
}
