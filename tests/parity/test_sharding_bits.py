"""Which sharding strategies give the same bits.

Ten clipped steps in fp32, and in bf16 with fp32 main weights, with dropout: main weights, moments, the model's weights
and losses. Sums over ranks run in rank order, so only the order of adding up microbatches and ranks tells runs apart:

    sum first      microbatches are added on each rank, then ranks: no_shard, optim, and optim_grads and
                   optim_grads_params where units reduce late (--fsdp-reshard-policy step)
    reduce first   each microbatch is summed over ranks, then microbatches: optim_grads, optim_grads_params

With one microbatch these are the same. Instances add their ranks first, then each other: HSDP and HFSDP have the bits
of each other. How weights are gathered (units, bounds, double buffer, what is kept) changes no bit. Norms are summed
over other parts under each strategy: they agree to the last bits of fp64, see [Note: the norm's bits] in clip_grads.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.harness.layouts import Layout, train
from tests.harness.ranks import run_ranks
from tests.harness.same_bits import differing, outcome_of

STEPS = 10
ZERO3 = ("--use-custom-fsdp", "--data-parallel-sharding-strategy", "optim_grads_params")
ZERO2 = ("--use-custom-fsdp", "--data-parallel-sharding-strategy", "optim_grads")
TWO = ("--num-distributed-optimizer-instances", "2")
STEP = ("--fsdp-reshard-policy", "step")
SMALL_BUCKETS = ("--ddp-bucket-size", "2000", "--overlap-grad-reduce")

SUM_FIRST = {
    "no_shard": ("--use-custom-fsdp", "--data-parallel-sharding-strategy", "no_shard"),
    "plain": (),
    "plain, small buckets": SMALL_BUCKETS,
    "optim": ("--use-custom-fsdp", "--data-parallel-sharding-strategy", "optim"),
    "distributed optimizer": ("--use-distributed-optimizer",),
    "distributed optimizer, small buckets": (
        "--use-distributed-optimizer",
        *SMALL_BUCKETS,
        "--overlap-param-gather",
    ),
    "optim_grads, late": (*ZERO2, *STEP),
    "optim_grads_params, late": (*ZERO3, *STEP),
}
REDUCE_FIRST = {
    "optim_grads": ZERO2,
    "optim_grads_params": ZERO3,
    "optim_grads_params, again": ZERO3,
    "optim_grads_params, double buffer": (*ZERO3, "--fsdp-double-buffer"),
    "optim_grads, double buffer": (*ZERO2, "--fsdp-double-buffer"),
    "optim_grads_params, no prefetch": (*ZERO3, "--suggested-communication-unit-size", "0"),
    "optim_grads_params, all ahead": (*ZERO3, "--suggested-communication-unit-size", "1000000"),
    "optim_grads_params, backward": (*ZERO3, "--fsdp-reshard-policy", "backward"),
    "optim_grads_params, units": (*ZERO3, "--fsdp-unit-modules", "TransformerLayer"),
}
HSDP_SUM_FIRST = {
    "HSDP distributed optimizer": ("--use-distributed-optimizer", *TWO),
    "HSDP optim": (*SUM_FIRST["optim"], *TWO),
    "HSDP optim_grads, late": (*ZERO2, *STEP, *TWO),
    "HFSDP, late": (*ZERO3, *STEP, *TWO, "--outer-dp-sharding-strategy", "optim"),
}
HSDP_REDUCE_FIRST = {
    "HSDP optim_grads": (*ZERO2, *TWO),
    "HSDP optim_grads_params": (*ZERO3, *TWO),
    "HFSDP": (*ZERO3, *TWO, "--outer-dp-sharding-strategy", "optim"),
    "HFSDP, double buffer": (
        *ZERO3,
        *TWO,
        "--outer-dp-sharding-strategy",
        "optim",
        "--fsdp-double-buffer",
    ),
}


@dataclasses.dataclass(frozen=True)
class Klass:
    """Runs that have the same bits. flags: the model's."""

    runs: dict[str, tuple[str, ...]]
    ga: int
    flags: tuple[str, ...] = ()
    num_layers: int = 1

    def __str__(self) -> str:
        return f"GA {self.ga} {' '.join(self.flags)}"


def run_classes(ctx, classes):
    torch.set_num_threads(1)
    return [
        {
            name: train(
                ctx,
                Layout(dp=ctx.world_size, more=more),
                ["--num-layers", str(one.num_layers), *one.flags],
                global_batch=one.ga * ctx.world_size,
                steps=STEPS,
                masked=True,
            )
            for name, more in one.runs.items()
        }
        for one in classes
    ]


def outcomes(world, classes, timeout=600):
    """name -> outcome, by class."""
    by_rank = run_ranks(run_classes, world, classes, timeout=timeout)
    return [
        {name: outcome_of([rank[number][name] for rank in by_rank]) for name in one.runs}
        for number, one in enumerate(classes)
    ]


def check(world, classes, timeout=600):
    """All runs of each class have the same bits; returns the first outcome of each."""
    found = outcomes(world, classes, timeout)
    failed = []
    for one, runs in zip(classes, found, strict=True):
        (first, expected), *others = runs.items()
        again = runs.get("optim_grads_params, again")
        assert again is None or again.norms == runs["optim_grads_params"].norms, f"{one}: a repeated run"
        failed += [
            f"{one}: {name} and {first}: {why}"
            for name, outcome in others
            if (why := differing(expected, outcome))
        ]
    assert not failed, "\n".join(failed)
    return [next(iter(runs.values())) for runs in found]


def some(runs, *names):
    return {name: runs[name] for name in names}


UNTIED = ("--untie-embeddings-and-output-weights",)


@pytest.mark.grid
def test_bits_over_two_ranks():
    one_microbatch = {
        **some(SUM_FIRST, "no_shard"),
        **some(REDUCE_FIRST, "optim_grads", "optim_grads_params"),
    }
    sum_first, reduce_first = check(
        2,
        [
            Klass(
                some(
                    SUM_FIRST, "no_shard", "distributed optimizer, small buckets", "optim_grads_params, late"
                ),
                2,
            ),
            Klass(some(REDUCE_FIRST, "optim_grads_params", "optim_grads_params, again", "optim_grads"), 2),
            Klass(one_microbatch, 1, UNTIED),
            Klass(some(REDUCE_FIRST, "optim_grads", "optim_grads_params, units"), 2, ("--bf16",)),
        ],
    )[:2]
    assert differing(sum_first, reduce_first), "the orders of addition do not show: this test proves nothing"


@pytest.mark.grid
def test_bits_over_four_ranks():
    one_microbatch = {**some(SUM_FIRST, "no_shard"), **some(REDUCE_FIRST, "optim_grads_params")}
    check(
        4,
        [
            Klass(one_microbatch, 1),
            Klass(some(HSDP_REDUCE_FIRST, "HSDP optim_grads_params", "HFSDP"), 1, UNTIED),
        ],
    )


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("model", [(), UNTIED, ("--bf16",), ("--bf16", *UNTIED)], ids=" ".join)
@pytest.mark.parametrize("world", [2, 4])
def test_all_classes(world, model):
    classes = [Klass({**SUM_FIRST, **REDUCE_FIRST}, 1, model, 2)]
    for ga in (2, 4):
        classes += [Klass(SUM_FIRST, ga, model, 2), Klass(REDUCE_FIRST, ga, model, 2)]
    if world == 4:
        classes.append(Klass({**HSDP_SUM_FIRST, **HSDP_REDUCE_FIRST}, 1, model, 2))
        for ga in (2, 4):
            classes += [Klass(HSDP_SUM_FIRST, ga, model, 2), Klass(HSDP_REDUCE_FIRST, ga, model, 2)]
    check(world, classes, timeout=1700)
