"""What `--recompute-modules` drops comes back bit for bit on every layout, and the loss over all data parallel ranks is
that of one process that has their sequences in one microbatch."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from tests.harness.layouts import NO_DROPOUT, Layout, Run, assembled, microbatch, train_run
from tests.harness.ranks import run_ranks

MODEL = (
    "--num-layers 4 --num-experts 4 --moe-ffn-hidden-size 24 --moe-layer-freq [0,1,1,0] --swiglu "
    "--disable-bias-linear --normalization RMSNorm --position-embedding-type rope"
).split()
SHARED = (
    "--moe-shared-expert-intermediate-size 16 --moe-shared-expert-gate --moe-input-jitter-eps 0.1 "
    "--moe-router-load-balancing-type global_aux_loss seq_aux_loss --moe-aux-loss-coeff 0.1 0.2 "
    "--moe-z-loss-coeff 0.01 --hidden-dropout 0.1 --attention-dropout 0.1"
).split()
MODULES = ("core_attn", "layernorm", "mlp", "moe", "shared_experts")
FSDP = "--use-custom-fsdp --data-parallel-sharding-strategy".split()
LAYOUTS = [
    Layout(tp=2, sp=True),
    Layout(pp=2, schedule="zb-1p"),
    Layout(dp=2, more=(*FSDP, "optim_grads_params")),
]
LARGER = [
    Layout(tp=2, sp=True, pp=2, schedule="zbv"),
    Layout(pp=2, dp=2, schedule="zb-1p", more=(*FSDP, "optim_grads_params")),
    Layout(pp=2, dp=2, schedule="interleaved", chunks=2, more=(*FSDP, "optim_grads")),
    Layout(tp=2, sp=True, dp=2, more=(*FSDP, "optim_grads_params")),
]
STEPS = 2


def dropping(modules):
    return ["--recompute-granularity", "selective", "--recompute-modules", *modules] if modules else []


def train_each(ctx, layouts, choices):
    return [
        [
            train_run(Run(ctx, layout, [*MODEL, *SHARED, *dropping(modules)], global_batch=4), STEPS)
            for modules in choices
        ]
        for layout in layouts
    ]


def check_bits(layouts, choices):
    """With every choice of modules what there is without any."""
    by_rank = run_ranks(train_each, layouts[0].world_size, layouts, [(), *choices], timeout=600)
    for ranks in by_rank:
        for layout, (expected, *found) in zip(layouts, ranks, strict=True):
            for modules, trained in zip(choices, found, strict=True):
                told = f"{layout}: {' '.join(modules)}"
                assert (trained.losses, trained.norms) == (expected.losses, expected.norms), told
                for kind in ("grads", "weights", "moments"):
                    ours, theirs = getattr(trained, kind), getattr(expected, kind)
                    for name, parts in theirs.items():
                        for (_, one), (_, other) in zip(ours[name], parts, strict=True):
                            assert np.array_equal(one, other), f"{told}: {kind} of {name}"


@pytest.mark.grid
def test_recomputing_changes_no_bit_on_two_ranks():
    check_bits(LAYOUTS, [MODULES])


@pytest.mark.full
def test_recomputing_changes_no_bit_on_two_ranks_module_by_module():
    choices = [combination for count in (1, 2) for combination in itertools.combinations(MODULES, count)]
    check_bits(LAYOUTS, choices)


@pytest.mark.full
def test_recomputing_changes_no_bit_on_four_ranks():
    check_bits(LARGER, [MODULES, *((one,) for one in MODULES)])


class Joined(Run):
    """One process whose microbatches are those of two data parallel ranks, side by side."""

    def __init__(self, ctx, layout, words):
        super().__init__(ctx, layout, [*words, "--micro-batch-size", "2"])
        self.global_batch = self.num_microbatches = self.global_batch // 2

    def microbatches(self, step):
        for index in range(self.num_microbatches):
            pair = [microbatch(step, 2 * index + rank) for rank in range(2)]
            yield {name: torch.cat([one[name] for one in pair]) for name in pair[0]}


GLOBAL = [
    *MODEL,
    *NO_DROPOUT,
    *"--fp64 --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.3".split(),
]
LOSS = "global_load_balancing_loss"


def train_global(ctx, kind, layouts, more):
    """And the mean of the loss over the last step's microbatches, of layer 1."""
    outcomes = []
    for layout in layouts:
        run = kind(ctx, layout, [*GLOBAL, *more])
        trained = train_run(run, 10)
        totals = run.engine.chunks[0].context.counts.totals
        outcomes.append((trained, totals[1, LOSS].item() / run.num_microbatches))
    return outcomes


@pytest.mark.grid
@pytest.mark.parametrize("more", [(), ("--calculate-per-token-loss",)])
def test_the_global_loss_looks_over_data_parallel_ranks(more):
    ((alone, alone_loss),) = run_ranks(train_global, 1, Joined, [Layout()], more, timeout=240)[0]
    layouts = [Layout(dp=2), Layout(dp=2, more=(*FSDP, "optim_grads_params"))]
    for ranks in zip(*run_ranks(train_global, 2, Run, layouts, more, timeout=240), strict=True):
        for trained, _ in ranks:
            assert np.allclose(trained.losses, alone.losses, rtol=0, atol=1e-10)
            assert np.allclose(trained.norms, alone.norms, rtol=0, atol=1e-10)
        assert abs(sum(loss for _, loss in ranks) / len(ranks) - alone_loss) < 1e-10
        weights = assembled([trained.weights for trained, _ in ranks])
        for name, values in assembled([alone.weights]).items():
            assert np.abs(weights[name] - values).max() < 1e-10, name
