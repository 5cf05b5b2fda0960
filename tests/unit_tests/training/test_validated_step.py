"""The trainer's post-validated steps over layouts, precisions, schedules and engines: the bits of synchronous ones.

Engines, plans, optimizer, clocks and policy are the trainer's own, made from flags; only data and faults are the
tests'. test_post_validation.py has whole runs.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from functools import partial
from math import inf, nan

import pytest
import torch

from megatron.core.models.gpt.loss import gpt_loss
from megatron.core.optimizer.mixed_precision import RollbackBy
from megatron.training.config.launch_env import LaunchEnv
from megatron.training.guard.exit_status import ExitStatus
from megatron.training.guard.nan_policy import NanPolicy, NonFiniteError
from megatron.training.guard.weight_check import NonFiniteWeightsError
from megatron.training.run.arguments import parse_config
from megatron.training.run.build import build_engine, build_gpt_model
from megatron.training.run.data import StepBatches
from megatron.training.run.pipeline import PipelineRunner
from megatron.training.run.step import StepRunner
from megatron.training.run.validated_step import ValidatedStepRunner
from megatron.training.state import StepTask
from tests.harness.gradient_faults import LARGE, Fault, Faults
from tests.harness.layouts import MODEL, session_of
from tests.harness.ranks import run_ranks
from tests.harness.tiny_models import tiny_batch
from tests.harness.validated_steps import parts_of

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


@functools.cache
def parallel_state(ctx, tp, pp, dp):
    return ctx.make_ps(tp=tp, pp=pp, dp=dp)


class Trainer:
    """One rank's trainer without its loop. after: of post-validation; None: steps are synchronous."""

    def __init__(self, ctx, setting, after):
        torch.set_num_threads(1)
        env = LaunchEnv(world_size=ctx.world_size, rank=ctx.rank)
        self.setting = setting
        self.config = parse_config(setting.flags(after), env=env)
        self.ps = ps = parallel_state(ctx, setting.tp, setting.pp, setting.dp)
        planner = self.config.planner()
        self.spec = spec = planner.spec
        self.engine = build_engine(self.config, ps, partial(build_gpt_model, self.config, ps))
        self.faults = Faults(list(setting.faults))
        self.runner = PipelineRunner(session_of(self.config, ps), self.engine, self._forward_step, planner)
        self.policy = NanPolicy(
            setting.policy, setting.max_skips, dynamic_loss_scale=self.engine.scaler.dynamic
        )
        parts = parts_of(self.config, ps, self.engine, self.runner, self.policy)
        self.steps = StepRunner(parts)
        self.taken_back = []  # by their place among the results: steps that this rank had taken
        self.begun = []  # iterations that were run once more
        if after is not None:
            self.engine.optimizer.rollback_by = RollbackBy(self.config.parallel.post_validation_rollback)
            self.steps = ValidatedStepRunner(parts, self.begun.append)
            self._rollback, self.engine.optimizer.rollback = self.engine.optimizer.rollback, self._counted
        self.batches = StepBatches(self._microbatches(), reads=spec.reads_data(ps.pp_rank))
        self.results = []

    def _counted(self):
        self.taken_back.append(len(self.results))
        self._rollback()

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
        context, num_stages = chunk.context, self.spec.placement.num_stages
        where = model, chunk.stage, num_stages, context.iteration, context.grads.microbatch
        mine = self.faults.into(*where) if self.ps.dp_rank == self.ps.dp_size - 1 else []
        losses = model(get("tokens"), get("position_ids"), None, labels=get("labels"))
        return self.faults.out_of(losses, mine), partial(gpt_loss, get("loss_mask"))

    def run(self):
        """As the loop: iterations until all are decided on, from the one behind the last that was."""
        setting = self.setting
        sizes = setting.sizes or (setting.microbatches,) * setting.num_steps
        while len(self.results) < setting.num_steps:
            number = len(self.results) + self.steps.num_undecided + 1
            task = StepTask(number, sizes[number - 1], (float(number in setting.stops), 0.0))
            self._note(self.steps.step(self.batches, task))
            if self.steps.num_undecided and number in (*setting.looks, setting.num_steps):
                self._note(self.steps.settle(self.batches))
        return self

    def _note(self, results):
        """One by one: an error comes behind what was decided on before."""
        for result in results:
            self.results.append(result)
            assert result.task.iteration == len(self.results)

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
        "taken_back": trainer.taken_back,
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
                # Whoever steps on what it knows, the first rank does: it knows the least.
                really = outs[0][name][after]["taken_back"]
                assert [at for at, back in enumerate(one[after]["rolled_back"]) if back] == really, name
                for mine, other in zip(one[after]["told"], one[None]["told"], strict=True):
                    assert mine == other, f"{name}, after {after}, rank {rank}"
                (mine, states), (other, expected) = one[after]["bits"], one[None]["bits"]
                assert states == expected, f"{name}, after {after}, rank {rank}"
                differ = [key for key in other if mine[key] != other[key]]
                assert not differ, f"{name}, after {after}, rank {rank}: {differ[:4]} of {len(other)}"
    return outs[0]


# The first step, several in a row, two in a row on different stages, the last; on the loss, on one stage only. Behind
# two clean ones in the middle, so that a step is rolled back that was trusted for them.
EVERYTHING = (
    Fault(1, 0.6, LARGE),
    Fault(2, 0.0, inf),
    Fault(3, 1.0, nan, loss=True),
    Fault(6, 0.6, LARGE),
    Fault(7, 0.0, LARGE),
    Fault(8, 0.6, inf),
)
# Where the first rank is clean by itself: it steps, and has to take that back. On a V it has the loss.
ROLLED_BACK, ON_A_V = {None: [], 0: [0, 2, 5, 7], 2: [5]}, {None: [], 0: [0, 5, 7], 2: [5]}
# Steps are taken whatever comes, as long as weights stay finite.
UNCHECKED = (Fault(1, 0.6, LARGE), Fault(6, 0.6, LARGE), Fault(7, 0.0, LARGE))
# Overflows of its own besides the faults; doubled every two clean steps.
FP16 = "--fp16 --initial-loss-scale 131072 --hysteresis 1 --loss-scale-window 2"
UNTIED = "--untie-embeddings-and-output-weights"
CLOCKS = (
    "--lr-warmup-iters 4 --lr-decay-style cosine --min-lr 1e-4 --start-weight-decay 0.01 --end-weight-decay 0.2 "
    "--weight-decay-incr-style linear --decoupled-lr 3e-2"
)
OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
FSDP = "--use-custom-fsdp --data-parallel-sharding-strategy"


def setting(words="", *, tied=False, **more):
    """tied: the first rank, too, knows what is wrong with the last stage's weights, so it never has to step back."""
    return Setting(words if tied else f"{words} {UNTIED}", **{"faults": EVERYTHING, **more})


def of_schedules(num_ranks, names):
    layers = f"--num-layers {2 * num_ranks} "
    return {
        name: setting(layers + schedule_flags(name), pp=num_ranks, microbatches=2 * num_ranks)
        for name in names
    }


def schedule_flags(name):
    chunks = " --num-virtual-stages-per-pipeline-rank 2" if name in ("interleaved", "gis") else ""
    return f"--pipeline-schedule {name}{chunks}"


V_SCHEDULES = ("zbv", "v-half", "v-min", "1f1b-v", "dualpipe-v")
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
    "tied": setting(tied=True),
    "tied, bf16, zb-1p": setting("--bf16 --enable-zero-bubble", tied=True),
    "tied on a V": setting("--zero-bubble-v-schedule", tied=True),
    "untied on a V, bf16": setting("--zero-bubble-v-schedule --bf16"),
    "clocks": setting(CLOCKS),
    "clocks, untied, bf16, zb-1p": setting(f"{CLOCKS} --bf16 --enable-zero-bubble"),
    "per token": setting("--calculate-per-token-loss"),
    "per token, fp16": setting(f"--calculate-per-token-loss {FP16}".replace("131072", "8192")),
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
    "unchecked": setting("--no-check-for-nan-in-loss-and-grad", policy="abort", faults=UNCHECKED),
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
    "tied, overlapped": setting(OVERLAP, dp=2, tied=True),
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
    "sp, fp16, zb-1p, untied": setting(f"--sequence-parallel {FP16} --enable-zero-bubble", tp=2),
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
GROUPS = {
    "two": (2, TWO),
    "schedules of two": (2, of_schedules(2, SCHEDULES)),
    "schedules of four": (4, of_schedules(4, SCHEDULES)),
    "data parallel": (4, FOUR_BY_DATA),
    "tensor parallel": (4, FOUR_BY_TENSOR),
    "eight": (8, EIGHT),
}


def pick(group, *names):
    return {name: GROUPS[group][1][name] for name in names}


@pytest.mark.grid
def test_faults_at_every_turn_leave_the_bits_of_synchronous_steps():
    settings = pick("two", "bf16", "fp16", "clocks", "stops", "tied on a V")
    out = check(2, settings, afters=(0,))
    for name in ("bf16", "clocks", "tied on a V", "stops"):
        assert out[name][0]["taken_back"] == (ON_A_V if "V" in name else ROLLED_BACK)[0], name
        assert out[name][0]["skipped"] == [False, True, True, False, False, False, False, True]
    assert len(set(out["fp16"][0]["scales"])) > 2
    assert len({norm for norm in out["clocks"][0]["norms"] if norm is not None}) == 5


@pytest.mark.grid
def test_steps_are_trusted_after_clean_ones():
    out = check(2, pick("two", "sgd", "clip off", "growing") | pick("schedules of two", "zb-1p"), afters=(2,))
    assert out["sgd"][2]["taken_back"] == out["growing"][2]["taken_back"] == ROLLED_BACK[2]
    assert out["zb-1p"][2]["taken_back"] == ROLLED_BACK[2]
    # Without clipping a large gradient is as clean as any.
    assert out["clip off"][2]["taken_back"] == [7]


@pytest.mark.grid
def test_steps_that_are_clipped_because_of_all_ranks_only():
    """Norms about the limit: each rank by itself is below it, the first ones step."""
    out = check(2, pick("two", "clip some"), afters=(0,))["clip some"]
    clipped = [at for at, norm in enumerate(out[0]["norms"]) if norm > 0.8]
    assert set(out[0]["taken_back"]) <= set(clipped)
    assert 2 <= len(out[0]["taken_back"]) <= len(clipped) < 8


@pytest.mark.grid
def test_data_parallel_ranks_overlapped():
    out = check(4, pick("data parallel", "fsdp optim", "overlapped"), afters=(0,))
    for name in ("fsdp optim", "overlapped"):
        assert out[name][0]["taken_back"] == ROLLED_BACK[0]


@pytest.mark.grid
def test_tensor_parallel_ranks():
    out = check(4, pick("tensor parallel", "sp"), afters=(0,))
    assert out["sp"][0]["taken_back"] == ROLLED_BACK[0]


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("group", GROUPS)
def test_the_whole_grid(group):
    world_size, settings = GROUPS[group]
    for name, one in settings.items():
        out = check(world_size, {name: one}, timeout=600)[name]
        if one.faults == EVERYTHING and not one.stops and "fp16" not in name and "clip" not in name:
            if one.pp == 2 and "--num-virtual" not in one.words:
                on_v = "zero-bubble-v" in one.words or any(v in one.words for v in V_SCHEDULES)
                # The first rank knows of its own faults, of tied ends, and on a V of the loss.
                expected = ON_A_V if on_v else ROLLED_BACK
                for after in (None, 0, 2):
                    mine = [] if name.startswith("tied") and not on_v else expected[after]
                    assert out[after]["taken_back"] == mine, name


# Failures --------------------------------------------------------------------------------------------


def failed(ctx, settings, after):
    """By setting: what was told until the error, the error, and what a checkpoint would hold then."""
    found = {}
    for name, one in settings.items():
        for mode in (None, after):
            trainer = Trainer(ctx, one, mode)
            error = None
            try:
                trainer.run()
            except NonFiniteError as failure:
                error = str(failure), failure.status, failure.iteration, failure.verdict
            except NonFiniteWeightsError as failure:
                error = str(failure), ExitStatus.NON_FINITE
            found[name, mode] = (
                trainer.told(),
                error,
                trainer.bits(),
                trainer.begun,
                [one.rolled_back for one in trainer.results],
            )
    return found


CLIPPED_THEN_BROKEN = (Fault(4, 1.0, LARGE), Fault(5, 0.0, inf))
BROKEN = {
    "abort": setting(faults=(Fault(2, 1.0, LARGE), Fault(5, 1.0, nan, loss=True)), policy="abort"),
    "skips": setting(faults=tuple(Fault(n, 0.0, inf) for n in (4, 5, 6)), max_skips=2),
    "least scale": setting(
        "--fp16 --initial-loss-scale 1 --min-loss-scale 1",
        faults=tuple(Fault(n, 1.0, inf) for n in (4, 5, 6)),
        max_skips=2,
    ),
    "persistent": setting(faults=CLIPPED_THEN_BROKEN, policy="rerun-once"),
    "transient": setting(
        faults=(Fault(1, 1.0, LARGE), Fault(5, 1.0, nan, loss=True, attempts=range(1, 2))),
        policy="rerun-once",
    ),
    "other bits": setting(
        faults=(Fault(5, 1.0, nan, attempts=range(1, 2)), Fault(5, 1.0, inf, attempts=range(2, 9))),
        policy="rerun-once",
    ),
}
# Steps that are taken and make weights that are not finite: of finite gradients, on what ranks know; of infinite ones.
BAD_WEIGHTS = {
    "weights": setting("--lr 1e38", policy="skip"),
    "unchecked": setting(
        "--no-check-for-nan-in-loss-and-grad",
        policy="abort",
        faults=(Fault(2, 1.0, LARGE), Fault(5, 0.0, inf)),
    ),
}


STATUSES = {
    "abort": 5, "skips": 5, "least scale": 5, "persistent": 16, "other bits": 17, "weights": 5, "unchecked": 5
}  # fmt: skip


@pytest.mark.grid
@pytest.mark.parametrize(
    ("words", "dp", "after"),
    [
        ("", 1, 0),
        *(pytest.param("", 1, after, marks=pytest.mark.full) for after in (1, 2)),
        *(
            pytest.param(words, 2, 0, marks=pytest.mark.full)
            for words in (
                OVERLAP,
                f"{FSDP} optim --overlap-param-gather",
                f"{OVERLAP} --zero-bubble-v-schedule",
            )
        ),
    ],
)
def test_failures_are_those_of_synchronous_steps(words, dp, after):
    """What was decided before the failing step is told before its error; nothing is left of the step behind it."""
    broken = {
        name: dataclasses.replace(one, words=f"{one.words} {words}", dp=dp)
        for name, one in {**BROKEN, **BAD_WEIGHTS}.items()
    }
    outs = run_ranks(failed, 2 * dp, broken, after, timeout=110)
    for found in outs:
        for name in broken:
            one, other = found[name, None], found[name, after]
            assert other[:2] == one[:2], name
            assert other[2] == one[2] or name in BAD_WEIGHTS, name
        assert "iteration 1: the weight of " in found["weights", after][1][0]
        assert len(found["unchecked", after][0]) == 4
        for name, status in STATUSES.items():
            assert found[name, after][1][1] == status, name
        told, error, _, begun, rolled_back = found["transient", after]
        assert error is None
        assert len(told) == 8
        assert begun == [5]  # user code hears of it, although iteration 6 had begun
        # On a V the first rank has the last stage: it knows, and nobody steps.
        assert rolled_back[4] == ("--zero-bubble-v" not in words)


# Inverse --------------------------------------------------------------------------------------------


def inverse_errors(ctx, settings):
    """By setting: the largest error of one step back in weights and moments; how far the run ends from the exact one:
    main weights, and the loss at its worst; how many steps were taken back; whether all is finite."""
    found = {}
    for name, one in settings.items():
        exact = Trainer(ctx, one, None).run()
        inverse = dataclasses.replace(one, words=f"{one.words} --post-validation-rollback inverse")
        close = Trainer(ctx, inverse, 0)
        once = watched(close)
        close.run()
        losses = [
            abs(a.losses["lm loss"][0] - b.losses["lm loss"][0]) / b.losses["lm loss"][1]
            for a, b in zip(close.results, exact.results, strict=True)
        ]
        found[name] = {
            "weights once": max(once["weights"], default=0.0),
            "moments once": max(once["moments"], default=0.0),
            "weights at the end": differences(main_state(close), main_state(exact))["weights"],
            "loss": max(losses),
            "rollbacks": len(close.taken_back),
            "finite": all(bool(torch.isfinite(t).all()) for _, t in main_state(close)),
        }
    return found


def watched(trainer):
    """Every rollback of this rank notes how far it is from what was there before the step."""
    optimizer, noted = trainer.engine.optimizer, {"weights": [], "moments": []}
    snapshot, rollback = optimizer.snapshot, optimizer.rollback

    def keep():
        noted["before"] = main_state(trainer)
        snapshot()

    def compare():
        rollback()
        for kind, error in differences(main_state(trainer), noted["before"]).items():
            noted[kind].append(error)

    optimizer.snapshot, optimizer.rollback = keep, compare
    return noted


def differences(mine, other):
    """The largest, of weights and of moments."""
    found = {"weights": 0.0, "moments": 0.0}
    for (name, one), (_, two) in zip(mine, other, strict=True):
        kind = "moments" if "optimizer." in name else "weights"
        found[kind] = max(found[kind], float((one - two).abs().max()))
    return found


def main_state(trainer):
    """Main weights and moments of this rank by name."""
    buffer = trainer.engine.model.buffer
    found = [(name, buffer.main_weight_part(name).detach().clone()) for name in buffer.names]
    moments = [piece for piece in trainer.engine.optimizer.pieces() if "main_weight" not in piece.name]
    return found + [(piece.name, piece.tensor.detach().clone()) for piece in moments]


INVERSE = {
    f"{name}, {num_steps} steps": setting(f"{words} --clip-grad {clip}", faults=(), num_steps=num_steps)
    for num_steps in (4, 16)
    for name, words, clip in (("fp32", "", 0.6), ("bf16", "--bf16", 0.6), ("sgd", "--optimizer sgd", 1.5))
}


@pytest.mark.grid
def test_the_inverse_is_close():
    """The first rank steps by what it knows, and takes that back by arithmetic; the last one never has to."""
    some = {name: INVERSE[name] for name in ("fp32, 4 steps", "bf16, 4 steps")}
    some["faults, decay 0"] = setting("--adam-beta1 0 --adam-beta2 0")
    first, _ = run_ranks(inverse_errors, 2, some)
    for name, one in first.items():
        assert one["finite"], name
        assert one["rollbacks"] >= 2, name
        if name in INVERSE:
            assert 0.0 < one["weights once"] < 3e-7, (name, one)  # about a rounding of weights of about 1
            assert one["moments once"] < 1e-8, (name, one)
            assert one["loss"] < 1e-5, (name, one)


@pytest.mark.full
def test_figures_of_the_inverse():
    for rank, found in enumerate(run_ranks(inverse_errors, 2, INVERSE)):
        for name, one in found.items():
            print(rank, name, one)
            assert one["weights once"] < 3e-7, (name, one)
